"""Reads predictors and ``calibration`` shards, returns a bundle: thresholds for a density, a retained mass or a budget.

:func:`measure_curves` does the work, :func:`choose` takes thresholds from its curves and costs nothing.

For every (layer, target) one pass over the rows gives a curve. It has for each density of a grid the logit threshold
that selects it, and what that selection keeps. The pass streams, so memory is the same for any number of rows: logits
are counted in the values that fp16 has. A quantile is exact to the resolution at which kernels compare. Predictors are
rounded to their deployed dtype first, and a cascade's second stage is set before its filter's curve is taken. With
calibration text, head_losses.py fits heads' predictors to what a skip costs. Then sensitivity.py adds what each density
costs in nats, and allocation.py shares the budget out by it.

Letters: N rows, d model width, n units.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from dejavu_train.bundle.allocation import (
    OperatingPoint,
    allocate,
    density_for_mass,
    least_cost,
    parse_budget,
    read_curve,
    spend,
    union_density,
)
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes, unit_bytes
from dejavu_train.bundle.spec import CASCADE_PARTS, PredictorSpec, tensor_name
from dejavu_train.calibration.by_layers import ByLayers, loss_increases_by_layers, measure_heads
from dejavu_train.calibration.config import CalibrateConfig
from dejavu_train.calibration.curves import CASCADE_PROBES, HEAD_PROBES, MLP_PROBES, spread_loss, union_densities
from dejavu_train.calibration.head_losses import measure_whole, refit_heads
from dejavu_train.calibration.scoring import fit_second_stage, row_blocks, score_predictor
from dejavu_train.calibration.sensitivity import SensitivityProbe, loss_increases
from dejavu_train.families import TARGETS, Target, UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import progress
from dejavu_train.models.load import resolve_device
from dejavu_train.models.weight_format import WeightFormat
from dejavu_train.predictors.checkpoint import StoredPredictor, as_stored, read_predictor, stored_tensors
from dejavu_train.predictors.custom import PredictorClass, describe

logger = logging.getLogger(__name__)


def measure_curves(
    predictors_folder: str | Path,
    activations_folder: str | Path,
    config: CalibrateConfig,
    windows: Sequence[Sequence[int]] | None = None,
    load_model: Callable[[], Any] | None = None,
    device: str = "auto",
    targets: Sequence[str] | None = None,
    classes: Mapping[str, PredictorClass] | None = None,
) -> Bundle:
    """Measure what all densities of all predictors in ``predictors_folder`` select, keep and cost, as a dense bundle.

    Args:
        predictors_folder: ``layer_XX/<target>/`` as training writes them. A target for every layer that has it, or for
            none.
        activations_folder: shards, of which those of the ``calibration`` set are read, and each layer's weights.
        config: what to aim at.
        windows: token ids of calibration documents, to measure sensitivities on. None shares out by true density.
        load_model: gives the dense model, wherever its layers lie, or a :class:`ByLayers` of it. Called once, for
            sensitivities and losses of heads.
        device: where the rows are scored, a layer at a time.
        targets: whose predictors are packed. None: of every target that has a folder.
        classes: of custom predictors, by name.

    Raises:
        UserError: a missing predictor, or a value that cannot be meant.
    """
    from dejavu_train.data.shard_reader import ShardReader
    from dejavu_train.data.shards import ActivationManifest, RecordedWeights

    where = resolve_device(device)
    manifest = ActivationManifest.load(activations_folder)
    shape = manifest.shape
    config.check(shape)
    config = config.settled(shape)
    passes = config.cascade
    assert not isinstance(passes, str), "it is settled"
    folder = Path(predictors_folder)
    if targets is None:
        there = {key.target for key in shape.keys if (folder / f"layer_{key.layer:02d}" / key.target).is_dir()}
        targets = [target for target in TARGETS if target in there]
    if not targets:
        raise UserError(f"there is no predictor in {folder}; python train.py trains them")
    specs: dict[UnitKey, PredictorSpec] = {}
    tensors: dict[str, Tensor] = {}
    predictors: dict[UnitKey, nn.Module] = {}
    head_means: dict[int, Tensor] = {}

    def read(layer: int, target: Target) -> StoredPredictor:
        return read_predictor(folder / f"layer_{layer:02d}" / target, classes)

    def pack(layer: int, target: Target, metadata: Mapping[str, Any], trained: nn.Module, weights: Any = None) -> None:
        """Score one predictor and add all that the bundle keeps of it. ``weights`` of the layer, for neurons."""
        stored = stored_tensors(trained, config.dtype_of(target))
        predictor = as_stored(trained, stored).to(where)
        site = ShardReader(activations_folder, metadata["site_layer"], "calibration")
        layer_rows = ShardReader(activations_folder, layer, "calibration")
        blocks = row_blocks(weights, target, metadata["site"], site, layer_rows, config.rows, where)
        second_stage = None
        if target == Target.MLP and passes is not None:
            second_stage, parts = fit_second_stage(weights, blocks(), passes)
            stored |= parts
        try:
            measured = score_predictor(predictor, target, blocks(), config.batch_size > 1, second_stage)
        except UserError as error:
            raise UserError(f"{target} of layer {layer}: {error}") from None
        if config.batch_size > 1:
            thresholds = measured.curve["threshold"]
            measured.curve["union"] = union_densities(measured.logits, thresholds, config.batch_size)
        predictors[UnitKey(layer, target)] = predictor.cpu()  # where all of them have room
        replaced = target == Target.HEADS and bool(head_means[layer].any())  # all zeros: skipped heads are dropped
        specs[UnitKey(layer, target)] = PredictorSpec(
            layer=layer,
            target=target,
            site=metadata["site"],
            site_layer=metadata["site_layer"],
            rank=metadata["rank"],
            d_in=metadata["d_in"],
            n_out=metadata["n_out"],
            nonlinearity=metadata["nonlinearity"],
            bias=metadata["bias"],
            kind=metadata["kind"] if second_stage is None else "cascade",
            class_path=metadata.get("class_path"),
            init_args=metadata.get("init_args", {}),
            tensors=describe(stored),
            replacement="mean" if replaced else "none",
            stage2_retained_mass=None if second_stage is None else passes,
            dtype=config.dtype_of(target),
            keep_dense=layer in config.dense_layers,
            active_density=measured.active_density,
            curve=measured.curve,
        )
        stored |= {"frequency": measured.frequency.float().cpu()}
        if replaced:
            stored |= {"mean": head_means[layer].half().cpu()}
        for name, tensor in stored.items():
            tensors[tensor_name(layer, target, name)] = tensor

    layers = shape.layers_of()
    wanted = shape.layers_of(Target.HEADS) if Target.HEADS in targets else ()
    heads = {layer: read(layer, Target.HEADS) for layer in wanted}
    for layer in progress(layers, "setting thresholds", len(layers), "layer"):
        weights = RecordedWeights.load(activations_folder, layer, manifest.weight_hash)
        if Target.HEADS in shape.targets_of(layer):
            head_means[layer] = weights.head_mean.clone()  # not a view of the whole file
        if Target.MLP in targets and Target.MLP in shape.targets_of(layer):
            pack(layer, Target.MLP, *read(layer, Target.MLP), weights.to(where))
    tokens = learnt = 0
    dense = load_model() if windows and config.sensitivity_tokens and load_model is not None else None
    if dense is not None and heads and config.head_loss_tokens:
        assert windows is not None
        chosen = windows_within(windows, config.head_loss_tokens)
        learnt = sum(len(window) - 1 for window in chosen)
        measure = measure_heads if isinstance(dense, ByLayers) else measure_whole
        dtype = config.dtype_of(Target.HEADS)
        for layer, refitted in refit_heads(dense, heads, head_means, dtype, chosen, measure).items():
            heads[layer] = StoredPredictor(dict(heads[layer].metadata) | {"bias": True}, refitted)
    for layer, (metadata, trained) in heads.items():
        pack(layer, Target.HEADS, metadata, trained)
    if dense is not None:
        assert windows is not None
        chosen = windows_within(windows, config.sensitivity_tokens)
        tokens = sum(len(window) - 1 for window in chosen)
        logger.info("sensitivity of every layer on %d tokens", tokens)
        for key, losses in _sensitivities(dense, predictors, specs, tensors, chosen).items():
            specs[key].curve["loss_increase"] = losses
        if isinstance(dense, ByLayers):
            dense.remove_states()
    metadata_kept = {"text": manifest.text, "calibrate_rows": config.rows, "sensitivity_tokens": tokens}
    metadata_kept["head_loss_tokens"] = learnt
    kept = (metadata_kept, classes or {}, manifest.tokenizer_hash)
    return Bundle(manifest.model, manifest.weight_hash, shape, specs, tensors, *kept)


def choose(measured: Bundle, config: CalibrateConfig, weights: WeightFormat) -> Bundle:
    """A bundle with curves, calibrated or not, at the densities that ``config`` asks for.

    Args:
        weights: format of the model's, which a budget counts bytes in.
    Raises:
        UserError: a budget that cannot be met, or another value that cannot be meant.
    """
    densities = _chosen(measured, config) if config.budget is None else _within_budget(measured, config, weights)
    return measured.with_densities(densities, top_k=config.selection == "top_k")


def windows_within(windows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
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
    predictors: Mapping[UnitKey, nn.Module],
    specs: Mapping[UnitKey, PredictorSpec],
    tensors: Mapping[str, Tensor],
    windows: Sequence[Sequence[int]],
) -> dict[UnitKey, list[float]]:
    """``loss_increase`` over the grid of every spec."""
    probes = {}
    densities: dict[UnitKey, tuple[float, ...]] = {}
    for key, spec in specs.items():
        staged = spec.kind == "cascade"
        cascade = [tensors[tensor_name(*key, part)] for part in CASCADE_PARTS] if staged else None
        densities[key] = HEAD_PROBES if spec.target == Target.HEADS else CASCADE_PROBES if staged else MLP_PROBES
        thresholds = [read_curve(spec.curve, density)["threshold"] for density in densities[key]]
        mean = tensors[tensor_name(*key, "mean")] if spec.replacement == "mean" else None
        probes[key] = SensitivityProbe(predictors[key], spec.reads, thresholds, mean, cascade)
    measure = loss_increases_by_layers if isinstance(dense, ByLayers) else loss_increases
    measured = measure(dense, probes, windows)
    for (layer, target), losses in measured.items():
        if not np.isfinite(losses).all():
            raise UserError(
                f"{target} of layer {layer}: the loss of the sparse model is not finite; check the model's weights, or"
                " calibrate with --collect.dtype float32"
            )
    return {key: spread_loss(densities[key], losses, specs[key].curve["density"]) for key, losses in measured.items()}


def _chosen(bundle: Bundle, config: CalibrateConfig) -> dict[UnitKey, float]:
    """A density for every spec of a bundle with curves, by the means or the retained mass of ``config``."""
    densities: dict[UnitKey, float] = {}
    for target, mean in ((Target.MLP, config.mlp_density), (Target.HEADS, config.head_density)):
        layers = {layer: spec for (layer, t), spec in bundle.specs.items() if t == target}
        if not layers:
            if mean < 1.0 and target == Target.HEADS:
                raise UserError(f"calibrate.head_density {mean:g} needs head predictors; train them or ask for 1.0")
            continue
        if target == Target.MLP and config.retained_mass is not None:
            shares = {
                layer: 1.0 if spec.keep_dense else density_for_mass(spec.curve, config.retained_mass)
                for layer, spec in layers.items()
            }
        else:
            shares = allocate(layers, mean)
        densities |= {UnitKey(layer, target): share for layer, share in shares.items()}
    return densities


def _within_budget(bundle: Bundle, config: CalibrateConfig, weights: WeightFormat) -> dict[UnitKey, float]:
    """Densities over layers and both targets by loss saved per byte. A layer that saves nothing stays dense.

    A dense layer reads no predictor, so density 1 is one more choice, not the end of the curve.
    """
    budget = parse_budget(config.budget or "")
    shape = bundle.shape
    choices: dict[UnitKey, list[OperatingPoint]] = {}
    cascades = {key for key, spec in bundle.specs.items() if spec.kind == "cascade"}
    for key, spec in bundle.specs.items():
        if "loss_increase" not in spec.curve:
            raise UserError("calibrate.budget needs sensitivities; set calibrate.sensitivity_tokens above 0")
        dense_cost = unit_bytes(spec, shape, weights, 1.0, 1.0)
        points = [OperatingPoint(dense_cost, 0.0, 1.0, whole=True)]
        if not spec.keep_dense:
            for i, density in enumerate(spec.curve["density"]):
                read = spec.curve["union"][i] if config.batch_size > 1 else density
                passed = union_density(spec.curve["selected"][i], config.batch_size) if key in cascades else None
                cost = predictor_bytes(spec) + unit_bytes(spec, shape, weights, read, spec.curve["recall"][i], passed)
                if cost < dense_cost and density < 1.0:  # density 1 is the dense layer, which has no second stage
                    points.append(OperatingPoint(cost, spec.curve["loss_increase"][i], density))
        choices[key] = points
    for target in TARGETS:
        if target not in bundle.targets:
            one = weights.unit_bytes(shape).dense(shape, target)
            choices[UnitKey(-1, target)] = [OperatingPoint(one * len(shape.layers_of(target)), 0.0, 1.0)]
    if budget.bytes_per_token is not None:
        chosen = spend(choices, budget.bytes_per_token)
    else:
        assert budget.perplexity_increase is not None
        chosen = least_cost(choices, float(np.log1p(budget.perplexity_increase)))
    return {key: point.density for key, point in chosen.items() if key in bundle.specs}
