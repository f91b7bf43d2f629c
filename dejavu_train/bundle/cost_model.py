"""Bytes that a bundle reads per token: predictors, the planes of a cascade, and the rows that are selected.

Weights count in the format that they have. ``down`` is read of neurons that are selected and truly active. Counts are
either expectations from the calibration curves (``spec_bytes``, ``mlp_share``) or taken from scored text
(``measured_mlp_share``).
"""

import math
from collections.abc import Mapping

from dejavu_train.bundle.allocation import cascade_bytes, mlp_bytes, read_curve
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.spec import PredictorSpec, predictor_layout
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.families.dims import SMOOTH
from dejavu_train.models.weight_format import UnitBytes, WeightFormat
from dejavu_train.predictors.metrics import SelectionSums

PREDICTOR_SHARE = 0.04  # bytes of predictors over those of the dense MLP, as of rank d / 16 in the weights' format


def predictor_bytes(spec: PredictorSpec) -> float:
    """Bytes of one predictor in its deployed dtype, scales included. Of a custom one those of its ``state_dict``."""
    return float(sum(dtype.itemsize * math.prod(shape) for shape, dtype in predictor_layout(spec).values()))


def unit_bytes(
    spec: PredictorSpec,
    shape: ModelDims,
    weights: WeightFormat,
    density: float,
    recall: float,
    selected: float | None = None,
) -> float:
    """Bytes of the model's weights at ``density``. ``selected``: what passes the second stage of a cascade."""
    unit = weights.unit_bytes(shape)
    if spec.target == Target.HEADS:
        return density * unit.dense(shape, Target.HEADS)
    active = 1.0 if density == 1.0 else (spec.active_density or 1.0)
    passed = density if selected is None else min(selected, density)
    if shape.activation in SMOOTH:  # all that is selected is read
        recall, active = 1.0, passed
    if selected is not None:
        return cascade_bytes(density, passed, recall, active, shape.d_ffn, shape.d_model, unit)
    return mlp_bytes(density, recall, active, shape.d_ffn, unit)


def spec_bytes(spec: PredictorSpec, shape: ModelDims, weights: WeightFormat) -> float:
    """Bytes of one (layer, target) as calibrated, its predictor included. Of all its weights where it is dense."""
    if spec.dense:
        return unit_bytes(spec, shape, weights, 1.0, 1.0)
    selected = read_curve(spec.curve, spec.density)["selected"] if spec.kind == "cascade" else None
    return predictor_bytes(spec) + unit_bytes(spec, shape, weights, spec.density, spec.recall, selected)


def exact_bytes(shape: ModelDims, weights: WeightFormat, active: float) -> float:
    """Bytes of a layer's weights in a step without predictors, which leaves rows of silent neurons out.

    active: the share of the neurons that are not zero.
    """
    unit = weights.unit_bytes(shape)
    live = 1.0 if shape.activation in SMOOTH else active
    return unit.dense(shape, Target.HEADS) + exact_mlp_bytes(live, shape, unit)


def exact_mlp_bytes(live: float, shape: ModelDims, unit: UnitBytes) -> float:
    """Bytes of its MLP. Behind a gate the second map's rows are read for active neurons alone."""
    gate = unit.up / 2 if shape.gated else unit.up
    return shape.d_ffn * (gate + live * (unit.up - gate + unit.down))


def selected_bytes(shape: ModelDims, weights: WeightFormat, active: float, density: float) -> float:
    """Bytes of a layer's weights in a step that reads all heads and the neurons that are selected.

    density: the share of the neurons that is selected. Active ones are among them.
    Predictors take `PREDICTOR_SHARE` of the dense MLP's bytes.
    """
    unit = weights.unit_bytes(shape)
    mlp = density * exact_mlp_bytes(active / density, shape, unit)
    return unit.dense(shape, Target.HEADS) + mlp + PREDICTOR_SHARE * unit.dense(shape, Target.MLP)


def mlp_share(bundle: Bundle, weights: WeightFormat) -> float:
    """Bytes of all MLPs with their predictors as calibrated, over those of the dense ones."""
    shape = bundle.shape
    one = weights.unit_bytes(shape).dense(shape, Target.MLP)
    specs = [bundle.specs.get(UnitKey(layer, Target.MLP)) for layer in shape.layers_of(Target.MLP)]
    return sum(one if spec is None else spec_bytes(spec, shape, weights) for spec in specs) / (one * len(specs))


def measured_mlp_share(
    bundle: Bundle,
    sums: Mapping[UnitKey, SelectionSums],
    weights: WeightFormat,
    candidates: Mapping[int, int] | None = None,
) -> float:
    """Bytes of all MLPs with their predictors as counted on scored text, over those of the dense ones.

    Args:
        bundle: at the densities that were scored.
        sums: by (layer, ``mlp``) what was selected, and which of it was active, on the scored positions.
        weights: format of the model's.
        candidates: by layer how many neurons passed the first stage of its cascade, over the same positions.
    """
    shape, unit = bundle.shape, weights.unit_bytes(bundle.shape)
    one = unit.dense(shape, Target.MLP)
    read = 0.0
    layers = shape.layers_of(Target.MLP)
    for layer in layers:
        spec, counted = bundle.specs.get(UnitKey(layer, Target.MLP)), sums[UnitKey(layer, Target.MLP)]
        if spec is None or spec.dense or not int(counted.units):
            read += one
            continue
        # The formulas take shares of all neurons; recall x active share is the share that is selected and active.
        selected, recall, active = counted.density, counted.recall, counted.active_density
        if shape.activation in SMOOTH:
            recall, active = 1.0, selected
        if spec.kind == "cascade":
            share = (candidates or {})[layer] / float(counted.units)
            rows = cascade_bytes(share, selected, recall, active, shape.d_ffn, shape.d_model, unit)
        else:
            rows = mlp_bytes(selected, recall, active, shape.d_ffn, unit)
        read += predictor_bytes(spec) + rows
    return read / (one * len(layers))
