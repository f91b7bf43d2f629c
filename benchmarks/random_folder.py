"""Writes a model of random weights of OPT's shapes into a folder, with random predictors of a stated density.

    python -m benchmarks.random_folder 6.7b /tmp/opt-6.7b

For what starts from a folder, such as `benchmarks.serve`. The tokenizer is opt-mini's.
"""

import dataclasses
import itertools
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
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.models.load import load_tokenizer, weight_hash
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.predictors.checkpoint import stored_tensors
from dejavu_train.predictors.low_rank import LowRankPredictor

TOKENIZER = "checkpoints/opt-mini"  # any: of a prompt for random weights
HEAD_RANK = 32


def random_bundle(shape: ModelDims, rank: int, densities: tuple[float, float], dtype: str = "float16") -> Bundle:
    """Random predictors of MLPs and of heads that select about these shares. None for a share of 1.

    What a norm leaves has length sqrt(d), so a new predictor's logits are about standard normal.
    """
    specs, tensors = {}, {}
    for layer, (target, density) in itertools.product(range(shape.n_layers), zip(TARGETS, densities, strict=True)):
        if density == 1:
            continue
        key, n = UnitKey(layer, target), shape.units(target)
        made = LowRankPredictor(shape.d_model, rank if target == Target.MLP else HEAD_RANK, n)
        stored = stored_tensors(made, dtype) | {"frequency": torch.ones(n)}
        tensors |= {tensor_name(layer, target, name): tensor for name, tensor in stored.items()}
        threshold = statistics.NormalDist().inv_cdf(1 - density)
        specs[key] = PredictorSpec(
            *key, key.site.input, layer, made.rank, shape.d_model, n, dtype=dtype, threshold=threshold, density=density
        )
    return Bundle("random", "random", shape, specs, tensors)


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
    hashes = {"weight_hash": weight_hash(str(folder)), "tokenizer_hash": tokenizer_hash(str(folder))}
    bundle = random_bundle(shape, rank, densities)
    dataclasses.replace(bundle, model=str(folder), **hashes).save_pretrained(folder / PREDICTORS_FOLDER)


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
