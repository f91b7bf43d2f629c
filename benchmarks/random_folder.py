"""Writes a model of random weights of OPT's shapes into a folder, with random predictors of a stated density.

    python -m benchmarks.random_folder 6.7b /tmp/opt-6.7b

For what starts from a folder, such as `benchmarks.serve`. A predictor's threshold is a quantile of its logits on
random inputs, which a layer's norm makes of any. The tokenizer is opt-mini's.
"""

import dataclasses
import math
import statistics
from pathlib import Path

import torch
from transformers import OPTForCausalLM

from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import ACTIVE, RANKS, SHAPES
from benchmarks.rows import command_line
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import PREDICTORS_FOLDER
from dejavu_train.bundle.spec import PredictorSpec, tensor_name
from dejavu_train.families import TARGETS, ModelDims
from dejavu_train.models.load import load_tokenizer, weight_hash
from dejavu_train.models.tokenizer_hash import tokenizer_hash

TOKENIZER = "checkpoints/opt-mini"  # any: of a prompt for random weights
STD, HEAD_RANK, INPUTS = 0.02, 16, 256


def random_bundle(shape: ModelDims, rank: int, mlp_density: float, head_density: float, device: str) -> Bundle:
    """Random predictors. Thresholds of zero, to be moved by `set_thresholds`."""
    generator = torch.Generator(device).manual_seed(1)
    entries, tensors = {}, {}
    for layer in range(shape.n_layers):
        for target, site, density in (("mlp", "mlp_in", mlp_density), ("heads", "attn_in", head_density)):
            n, r = shape.units(target), rank if target == "mlp" else HEAD_RANK
            for name, size in (("down", (r, shape.d_model)), ("up", (n, r)), ("bias", (n,))):
                tensor = torch.zeros(size, dtype=torch.float16, device=device)
                if name != "bias":
                    tensor.normal_(0, STD, generator=generator)
                tensors[tensor_name(layer, target, name)] = tensor.cpu()
            tensors[tensor_name(layer, target, "frequency")] = torch.ones(n)
            entries[layer, target] = PredictorSpec(
                layer, target, site, layer, r, shape.d_model, n, threshold=0.0, density=density
            )
    return Bundle("random", "random", shape, entries, tensors)


def set_active_share(model: OPTForCausalLM, share: float) -> None:
    """Shift fc1's bias so that this share of the neurons is above zero, whatever is selected."""
    for block in model.model.decoder.layers:
        deviation = float(block.fc1.weight.detach().float().std()) * math.sqrt(block.fc1.in_features)
        block.fc1.bias.data.fill_(deviation * statistics.NormalDist().inv_cdf(share))


def write(name: str, shape: ModelDims, folder: Path, densities: tuple[float, float], rank: int) -> None:
    """The model, the tokenizer, and the bundle in its folder ``predictors``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = random_model(name, shape, device, torch.float16 if device == "cuda" else torch.float32)
    set_active_share(model, ACTIVE)
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
