"""Reads predictors and ``calibration`` shards, returns a bundle: thresholds for a density, a retained mass or a budget.

For every (layer, target) one pass over the rows gives a curve: for each density of a grid the logit threshold that
selects it, and what that selection keeps. The pass streams: logits are counted in the 65,536 values of fp16, so
memory is the same for any number of rows, and a quantile is exact to the resolution that the kernels compare at.
Predictors are rounded to their deployed dtype first, and a cascade's second stage is set before its filter's curve is
taken. With calibration text, sensitivity.py adds what each density costs
in nats, and allocation.py shares the budget out by it.

Letters: N rows, d model width, n units.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from dejavu_train.bundle.allocation import (
    OperatingPoint,
    allocate,
    density_for_mass,
    least_cost,
    mlp_bytes,
    parse_budget,
    read_curve,
    spend,
    union_density,
)
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes, unit_bytes
from dejavu_train.bundle.spec import PREDICTOR_DTYPES, TARGETS, PredictorSpec, tensor_name
from dejavu_train.calibration.curves import CASCADE_PROBES, HEAD_PROBES, MLP_PROBES, spread_loss, union_densities
from dejavu_train.calibration.scoring import fit_second_stage, row_blocks, score_predictor
from dejavu_train.calibration.sensitivity import SensitivityProbe, loss_increases
from dejavu_train.errors import UserError
from dejavu_train.models.opt import OPTShape, resolve_device
from dejavu_train.predictors.bit_planes import SecondStage
from dejavu_train.predictors.checkpoint import as_stored, read_predictor, stored_tensors
from dejavu_train.predictors.low_rank import LowRankPredictor

logger = logging.getLogger(__name__)
Key = tuple[int, str]


@dataclass(frozen=True)
class CalibrateConfig:
    """How thresholds are set."""

    mlp_density: float = 0.10
    """Mean share of neurons selected, over all layers; 1 keeps every MLP dense."""
    head_density: float = 1.0
    """Mean share of heads selected, over all layers."""
    retained_mass: float | None = None
    """Instead of mlp_density: the share of the neurons' contribution that every layer keeps."""
    budget: str | None = None
    """Instead of densities: bytes of blocks and predictors read per token (600kB), or a perplexity allowance (1%)."""
    selection: Literal["threshold", "top_k"] = "threshold"
    """A logit threshold (counts follow the token), or the same number of units for every token."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense, their heads too."""
    dtype: str = "float16"
    """Predictor weights as deployed: float16, bfloat16, float32, int8, or int4 (neurons; heads then int8).

    int8 and int4 have a scale per row. int4 is trained through its rounding, so set it before training."""
    cascade: float | None = None
    """Test what the MLP's predictor selects once more, on fc1's upper four bits, so that this share of the contribution
    passes (0.999); only then is the rest of a row read. mlp_density is that of the candidates. null: no second
    stage."""
    rows: int = 20_000
    """Rows of the calibration set that set the thresholds."""
    sensitivity_tokens: int = 2048
    """Tokens of the calibration set on which each layer's loss is measured; 0 shares out by true density instead."""
    batch_size: int = 1
    """Sequences decoded together: a budget then counts the union of their selections."""

    def dtype_of(self, target: str) -> str:
        """The dtype of one target. A head predictor is a few rows: half a byte a weight would save nothing."""
        return "int8" if self.dtype == "int4" and target == "heads" else self.dtype

    def check(self, shape: OPTShape) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        for name in ("mlp_density", "head_density", "retained_mass", "cascade"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise UserError(f"calibrate.{name} must lie above 0 and at most at 1, got {value:g}")
        for layer in self.dense_layers:
            if not 0 <= layer < shape.n_layers:
                raise UserError(f"calibrate.dense_layers: the model has layers 0 to {shape.n_layers - 1}, got {layer}")
        if self.rows < 1 or self.batch_size < 1:
            raise UserError("calibrate.rows and calibrate.batch_size must be at least 1")
        if self.cascade is not None and shape.d_model % 8:
            raise UserError(f"calibrate.cascade needs a model width that is a multiple of 8, got {shape.d_model}")
        if self.selection not in ("threshold", "top_k"):
            raise UserError(f"calibrate.selection must be threshold or top_k, got {self.selection}")
        if self.budget is not None:
            parse_budget(self.budget)
        if self.dtype not in PREDICTOR_DTYPES:
            raise UserError(f"calibrate.dtype must be one of {', '.join(PREDICTOR_DTYPES)}, got {self.dtype}")


def calibrate(
    predictors_folder: str | Path,
    activations_folder: str | Path,
    config: CalibrateConfig,
    windows: Sequence[Sequence[int]] | None = None,
    load_model: Callable[[], Any] | None = None,
    device: str = "auto",
    progress: Callable[[str], object] | None = None,
    targets: Sequence[str] | None = None,
) -> Bundle:
    """Set the thresholds of every predictor in ``predictors_folder`` and pack them.

    Args:
        predictors_folder: ``layer_XX/<target>/`` as training writes them; a target for every layer or for none.
        activations_folder: shards, of which those of the ``calibration`` set are read, and each layer's weights.
        config: what to aim at.
        windows: token ids of calibration documents, to measure sensitivities on; None shares out by true density.
        load_model: gives the dense model, wherever its layers lie; called once, for the sensitivities alone.
        device: where the rows are scored, a layer at a time.
        progress: called with a line at the start of every step.
        targets: whose predictors are packed; None: of every target that has a folder.

    Raises:
        UserError: a missing predictor, a budget that cannot be met, or another value that cannot be meant.
    """
    from dejavu_train.data.shard_reader import ShardReader
    from dejavu_train.data.shards import ActivationManifest, LayerWeights

    say = progress or logger.info
    where = resolve_device(device)
    manifest = ActivationManifest.load(activations_folder)
    shape = manifest.shape
    config.check(shape)
    folder = Path(predictors_folder)
    if targets is None:
        found = [(folder / f"layer_{i:02d}") for i in range(shape.n_layers)]
        targets = [target for target in TARGETS if any((layer / target).is_dir() for layer in found)]
    if not targets:
        raise UserError(f"there is no predictor in {folder}; train some first")
    specs: dict[Key, PredictorSpec] = {}
    tensors: dict[str, Tensor] = {}
    predictors: dict[Key, LowRankPredictor] = {}
    second_stages: dict[Key, SecondStage] = {}
    unions: dict[Key, list[float]] = {}
    for layer in range(shape.n_layers):
        say(f"thresholds of layer {layer}")
        weights = LayerWeights.load(activations_folder, layer, manifest.weight_hash).to(where)
        for target in targets:
            metadata, trained = read_predictor(folder / f"layer_{layer:02d}" / target)
            stored = stored_tensors(trained, config.dtype_of(target))
            predictor = as_stored(trained, stored).to(where)
            site = ShardReader(activations_folder, metadata["site_layer"], "calibration")
            own = ShardReader(activations_folder, layer, "calibration")
            blocks = row_blocks(weights, target, metadata["site"], site, own, config.rows, where)
            if target == "mlp" and config.cascade is not None:
                second_stages[layer, target], parts = fit_second_stage(weights, blocks(), config.cascade)
                stored |= parts
            second_stage = second_stages.get((layer, target))
            try:
                measured = score_predictor(predictor, target, blocks(), config.batch_size > 1, second_stage)
            except UserError as error:
                raise UserError(f"{target} of layer {layer}: {error}") from None
            if config.batch_size > 1:
                thresholds = measured.curve["threshold"]
                unions[layer, target] = union_densities(measured.logits, thresholds, config.batch_size)
            predictors[layer, target] = predictor
            specs[layer, target] = PredictorSpec(
                layer=layer,
                target=target,
                site=metadata["site"],
                site_layer=metadata["site_layer"],
                rank=metadata["rank"],
                d_in=metadata["d_in"],
                n_out=metadata["n_out"],
                nonlinearity=metadata["nonlinearity"],
                bias=metadata["bias"],
                kind="low_rank" if second_stage is None else "cascade",
                stage2_retained_mass=None if second_stage is None else config.cascade,
                dtype=config.dtype_of(target),
                keep_dense=layer in config.dense_layers,
                active_density=measured.active_density,
                curve=measured.curve,
            )
            for name, tensor in stored.items():
                tensors[tensor_name(layer, target, name)] = tensor
            tensors[tensor_name(layer, target, "frequency")] = measured.frequency.float().cpu()
            if target == "heads":
                if bool(weights.head_mean.any()):  # all zeros: skipped heads are dropped
                    tensors[tensor_name(layer, target, "mean")] = weights.head_mean.half().cpu()
                    specs[layer, target] = replace(specs[layer, target], replacement="mean")
    tokens = 0
    if windows and config.sensitivity_tokens and load_model is not None:
        chosen = _take(windows, config.sensitivity_tokens)
        tokens = sum(len(window) - 1 for window in chosen)
        say(f"sensitivity of every layer on {tokens} tokens")
        for key, losses in _sensitivities(load_model(), predictors, second_stages, specs, tensors, chosen).items():
            specs[key].curve["loss_increase"] = losses
    metadata_kept = {"text": manifest.text, "calibrate_rows": config.rows, "sensitivity_tokens": tokens}
    bundle = Bundle(manifest.model, manifest.weight_hash, shape, specs, tensors, metadata_kept)
    return bundle.with_densities(choose_densities(bundle, config, unions), top_k=config.selection == "top_k")


def _take(windows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """Windows spread over all documents until ``tokens`` scored tokens are there."""
    chosen: list[Sequence[int]] = []
    longest = max(len(window) for window in windows)
    count = max(1, min(len(windows), -(-tokens // max(longest - 1, 1))))
    left = tokens
    for i in range(count):
        window = windows[len(windows) * i // count][: left + 1]
        if len(window) > 1:
            chosen.append(window)
            left -= len(window) - 1
        if left <= 0:
            break
    return chosen


def _sensitivities(
    dense: Any,
    predictors: Mapping[Key, LowRankPredictor],
    second_stages: Mapping[Key, SecondStage],
    specs: Mapping[Key, PredictorSpec],
    tensors: Mapping[str, Tensor],
    windows: Sequence[Sequence[int]],
) -> dict[Key, list[float]]:
    """``loss_increase`` over the grid of every spec."""
    probes = {}
    wanted: dict[Key, tuple[float, ...]] = {}
    for key, spec in specs.items():
        wanted[key] = HEAD_PROBES if spec.target == "heads" else CASCADE_PROBES if key in second_stages else MLP_PROBES
        thresholds = [read_curve(spec.curve, density)["threshold"] for density in wanted[key]]
        mean = tensors[tensor_name(*key, "mean")] if spec.replacement == "mean" else None
        probes[key] = SensitivityProbe(
            predictors[key], spec.site, spec.site_layer, thresholds, mean, second_stages.get(key)
        )
    measured = loss_increases(dense, probes, windows)
    for (layer, target), losses in measured.items():
        if not np.isfinite(losses).all():
            raise UserError(
                f"{target} of layer {layer}: the loss of the sparse model is not finite; check the model's weights, or"
                " calibrate with --collect.dtype float32"
            )
    return {key: spread_loss(wanted[key], losses, specs[key].curve["density"]) for key, losses in measured.items()}


def choose_densities(
    bundle: Bundle, config: CalibrateConfig, unions: Mapping[Key, Sequence[float]] | None = None
) -> dict[Key, float]:
    """A density for every spec of an uncalibrated bundle, as ``config`` asks.

    Raises:
        UserError: a budget below what predictors and the smallest densities read.
    """
    densities: dict[Key, float] = {}
    if config.budget is not None:
        return _within_budget(bundle, config, unions or {})
    for target, mean in (("mlp", config.mlp_density), ("heads", config.head_density)):
        layers = {layer: spec for (layer, t), spec in bundle.specs.items() if t == target}
        if not layers:
            if mean < 1.0 and target == "heads":
                raise UserError(f"calibrate.head_density {mean:g} needs head predictors; train them or ask for 1.0")
            continue
        if target == "mlp" and config.retained_mass is not None:
            shares = {
                layer: 1.0 if spec.keep_dense else density_for_mass(spec.curve, config.retained_mass)
                for layer, spec in layers.items()
            }
        else:
            shares = allocate(layers, mean)
        densities |= {(layer, target): share for layer, share in shares.items()}
    return densities


def _within_budget(bundle: Bundle, config: CalibrateConfig, unions: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Densities over layers and both targets by loss saved per byte; a layer that saves nothing stays dense.

    A dense layer reads no predictor, so density 1 is one more choice, not the end of the curve.
    """
    budget = parse_budget(config.budget or "")
    shape = bundle.shape
    choices: dict[Key, list[OperatingPoint]] = {}
    cascades = {key for key, spec in bundle.specs.items() if spec.kind == "cascade"}
    for key, spec in bundle.specs.items():
        if "loss_increase" not in spec.curve:
            raise UserError("calibrate.budget needs sensitivities; set calibrate.sensitivity_tokens above 0")
        dense_cost = unit_bytes(spec, shape, 1.0, 1.0)
        points = [OperatingPoint(dense_cost, 0.0, 1.0, whole=True)]
        if not spec.keep_dense:
            for i, density in enumerate(spec.curve["density"]):
                read = unions[key][i] if key in unions else density
                passed = union_density(spec.curve["selected"][i], config.batch_size) if key in cascades else None
                cost = predictor_bytes(spec) + unit_bytes(spec, shape, read, spec.curve["recall"][i], passed)
                if cost < dense_cost and density < 1.0:  # density 1 is the dense layer, which has no second stage
                    points.append(OperatingPoint(cost, spec.curve["loss_increase"][i], density))
        choices[key] = points
    for target in ("mlp", "heads"):
        if (0, target) not in bundle.specs:
            one = mlp_bytes(1.0, 1.0, 1.0, shape.d_ffn, shape.d_model) if target == "mlp" else 8.0 * shape.d_model**2
            choices[-1, target] = [OperatingPoint(one * shape.n_layers, 0.0, 1.0)]
    if budget.bytes_per_token is not None:
        chosen = spend(choices, budget.bytes_per_token)
    else:
        assert budget.perplexity_increase is not None
        chosen = least_cost(choices, float(np.log1p(budget.perplexity_increase)))
    return {key: point.density for key, point in chosen.items() if key in bundle.specs}
