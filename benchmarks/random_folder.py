"""Writes a model of random weights of OPT's shapes into a folder, with random predictors of a stated density.

    python -m benchmarks.random_folder 6.7b /tmp/opt-6.7b

For what starts from a folder, such as `benchmarks.serve_speed`. A predictor's threshold is a quantile of its logits on
random inputs, which a layer's norm makes of any. The tokenizer is opt-mini's.
"""

import dataclasses
from pathlib import Path

import torch

from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import RANKS, SHAPES
from benchmarks.generate import TOKENIZER, random_bundle, set_active_share
from benchmarks.rows import command_line
from dejavu_train.bundle.folder import PREDICTORS_FOLDER
from dejavu_train.bundle.spec import tensor_name
from dejavu_train.families import TARGETS, ModelDims
from dejavu_train.models.opt import load_tokenizer, weight_hash
from dejavu_train.models.tokenizer_hash import tokenizer_hash

ACTIVE_SHARE = 0.06
INPUTS = 256


def write(name: str, shape: ModelDims, folder: Path, densities: tuple[float, float], rank: int) -> None:
    """The model, the tokenizer, and the bundle in its folder ``predictors``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = random_model(name, shape, device, torch.float16 if device == "cuda" else torch.float32)
    set_active_share(model, ACTIVE_SHARE)
    model.save_pretrained(folder)
    load_tokenizer(TOKENIZER).save_pretrained(folder)
    bundle = random_bundle(shape, rank, *densities, device)
    inputs = torch.randn(INPUTS, shape.d_model, device=device)
    specs = {}
    for layer in range(shape.n_layers):
        for target, density in zip(TARGETS, densities, strict=True):
            down, up = (bundle.tensors[tensor_name(layer, target, part)].to(device).float() for part in ("down", "up"))
            logits = (inputs @ down.T @ up.T).flatten()
            kept = max(1, int(density * logits.numel()))
            threshold = float(logits.topk(kept).values[-1])
            specs[layer, target] = dataclasses.replace(bundle.specs[layer, target], threshold=threshold)
    hashes = {"weight_hash": weight_hash(str(folder)), "tokenizer_hash": tokenizer_hash(str(folder))}
    dataclasses.replace(bundle, model=str(folder), specs=specs, **hashes).save_pretrained(folder / PREDICTORS_FOLDER)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mlp-density", type=float, default=0.1)
    parser.add_argument("--head-density", type=float, default=0.5)
    args = parser.parse_args()
    write(args.shape, SHAPES[args.shape], args.folder, (args.mlp_density, args.head_density), RANKS[args.shape])


if __name__ == "__main__":
    main()
