"""Makes bundles of random predictors for tests. Thresholds stand in curves measured on random inputs."""

import dataclasses
from pathlib import Path

import torch

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.spec import PredictorSpec, tensor_name
from dejavu_train.families import blocks_of
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.tokenizer_hash import tokenizer_hash
from dejavu_train.predictors.bit_planes import choose_grid
from dejavu_train.predictors.checkpoint import as_stored, stored_tensors
from dejavu_train.predictors.low_rank import LowRankPredictor

GRID = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]


def without_inputs(bundle: Bundle) -> Bundle:
    """The same with logits that are biases alone: a token selects the same units whatever its rounding."""
    zeroed = {name: t * 0 if name.endswith(".down") else t for name, t in bundle.tensors.items()}
    return dataclasses.replace(bundle, tensors=zeroed)


def make_bundle(
    model: Path, rank: int = 8, seed: int = 0, lookahead: bool = False, means: bool = False, dtype: str = "float16",
    cascade: bool = False,
) -> Bundle:  # fmt: skip
    """Random predictors with honest curves.

    With ``lookahead`` each reads the site one half before its own. With ``means`` skipped heads get random means. With
    ``cascade`` there is a second stage, at thresholds around the pre-activations of random inputs.
    """
    shape = read_dims(str(model))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(500, shape.d_model, generator=generator)
    specs, tensors = {}, {}
    for layer in range(shape.n_layers):
        for target in [each for each in ("mlp", "heads") if each in shape.targets_of(layer)]:
            n_out = shape.units(target)
            made = LowRankPredictor(shape.d_model, rank, n_out)
            for name, parameter in made.named_parameters():
                values = torch.randn(parameter.shape, generator=generator) * (0.3 if name != "down" else 0.15)
                parameter.data.copy_(values.half())
            stored = stored_tensors(made, dtype)
            as_stored(made, stored)
            tensors |= {tensor_name(layer, target, name): tensor for name, tensor in stored.items()}
            tensors[tensor_name(layer, target, "frequency")] = torch.rand(n_out, generator=generator)
            logits = made(inputs).detach().flatten().sort(descending=True).values
            picks = [logits[min(int(density * len(logits)), len(logits) - 1)].item() for density in GRID]
            curve = {"density": GRID, "threshold": picks, "retained_mass": [density**0.3 for density in GRID]}
            curve |= {"recall": [density**0.5 for density in GRID], "precision": [0.5] * len(GRID)}
            site = ("mlp_in", layer) if target == "mlp" else ("attn_in", layer)
            if lookahead:
                site = ("attn_in", layer) if target == "mlp" else ("mlp_in", layer - 1) if layer else ("attn_in", 0)
            metadata = {"active_density": 0.1 + 0.1 * layer, "curve": curve, "dtype": dtype}
            if cascade and target == "mlp":
                scale, steps = choose_grid(blocks_of(load_model(str(model)))[layer].up.weight.detach())
                stage2_threshold = torch.linspace(-0.5, 1.0, n_out)
                parts = {
                    "fc1_scale": scale,
                    "fc1_steps": steps,
                    "stage2_threshold": stage2_threshold[torch.randperm(n_out, generator=generator)],
                }
                tensors |= {tensor_name(layer, target, name): tensor for name, tensor in parts.items()}
                metadata |= {"kind": "cascade", "stage2_retained_mass": 0.9}
                curve["selected"] = [0.5 * density for density in GRID]
            if means and target == "heads":
                other = torch.Generator().manual_seed(layer)  # the predictors stay those of a bundle without means
                tensors[tensor_name(layer, target, "mean")] = torch.randn(
                    n_out, shape.group_dim, generator=other
                ).half()
                metadata["replacement"] = "mean"
            specs[layer, target] = PredictorSpec(layer, target, *site, rank, shape.d_model, n_out, **metadata)
    hashes = {"weight_hash": weight_hash(str(model)), "tokenizer_hash": tokenizer_hash(str(model))}
    return Bundle(str(model), shape=shape, specs=specs, tensors=tensors, metadata={"text": "made up"}, **hashes)
