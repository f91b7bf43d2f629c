"""What a bundle reads per token, in bytes: predictors, the planes of a cascade, and the rows that are selected.

Weights count 16 bits. fc2 rows are read of neurons that are selected and truly active. Counts are either expectations
from the calibration curves (``entry_bytes``, ``mlp_share``) or taken from scored text (``measured_mlp_share``).
"""

from collections.abc import Mapping

import torch

from dejavu_train.allocate import cascade_bytes, head_bytes, mlp_bytes, read_curve
from dejavu_train.bundle import Bundle
from dejavu_train.entry import Entry, Key
from dejavu_train.metrics import SelectionSums
from dejavu_train.opt_model import OPTShape, torch_dtype


def predictor_bytes(entry: Entry) -> float:
    """Bytes of one predictor in its deployed dtype, scales included."""
    weights = entry.rank * (entry.d_in + entry.n_out)
    bias = 2 * entry.n_out if entry.bias else 0
    if entry.dtype == "int8":
        return float(weights + 4 * (entry.rank + entry.n_out) + bias)
    if entry.dtype == "int4":
        nibbles = entry.rank * ((entry.d_in + 1) // 2) + entry.n_out * ((entry.rank + 1) // 2)
        return float(nibbles + 2 * (entry.rank + entry.n_out) + bias)
    size = torch.empty(0, dtype=torch_dtype(entry.dtype)).element_size()
    return float(size * (weights + (entry.n_out if entry.bias else 0)))


def unit_bytes(entry: Entry, shape: OPTShape, density: float, recall: float, selected: float | None = None) -> float:
    """Bytes of the model's weights at ``density``; ``selected``: what passes the second test of a cascade."""
    if entry.target == "heads":
        return head_bytes(density, shape.n_heads, shape.head_dim, shape.d_model)
    active = 1.0 if density == 1.0 else (entry.active_density or 1.0)
    if selected is not None:
        return cascade_bytes(density, min(selected, density), recall, active, shape.d_ffn, shape.d_model)
    return mlp_bytes(density, recall, active, shape.d_ffn, shape.d_model)


def entry_bytes(entry: Entry, shape: OPTShape) -> float:
    """Bytes of one (layer, target) as calibrated, its predictor included; of all its weights where it is dense."""
    if entry.dense:
        return unit_bytes(entry, shape, 1.0, 1.0)
    selected = read_curve(entry.curve, entry.density)["selected"] if entry.kind == "cascade" else None
    return predictor_bytes(entry) + unit_bytes(entry, shape, entry.density, entry.recall, selected)


def mlp_share(bundle: Bundle) -> float:
    """Bytes of all MLPs with their predictors as calibrated, over those of the dense ones."""
    shape = bundle.shape
    one = mlp_bytes(1.0, 1.0, 1.0, shape.d_ffn, shape.d_model)
    read = (
        entry_bytes(bundle.entries[i, "mlp"], shape) if (i, "mlp") in bundle.entries else one
        for i in range(shape.n_layers)
    )
    return sum(read) / (one * shape.n_layers)


def measured_mlp_share(
    bundle: Bundle, sums: Mapping[Key, SelectionSums], candidates: Mapping[int, int] | None = None
) -> float:
    """Bytes of all MLPs with their predictors as counted on scored text, over those of the dense ones.

    Args:
        bundle: at the densities that were scored.
        sums: by (layer, ``mlp``) what was selected, and which of it was active, on the scored positions.
        candidates: by layer how many neurons passed the first stage of its cascade, over the same positions.
    """
    shape = bundle.shape
    one = mlp_bytes(1.0, 1.0, 1.0, shape.d_ffn, shape.d_model)
    read = 0.0
    for layer in range(shape.n_layers):
        entry, counted = bundle.entries.get((layer, "mlp")), sums[layer, "mlp"]
        if entry is None or entry.dense or not int(counted.units):
            read += one
            continue
        # The formulas take shares of all neurons; recall x active share is the share that is selected and active.
        selected, recall, active = counted.density, counted.recall, counted.active_density
        if entry.kind == "cascade":
            share = (candidates or {})[layer] / float(counted.units)
            rows = cascade_bytes(share, selected, recall, active, shape.d_ffn, shape.d_model)
        else:
            rows = mlp_bytes(selected, recall, active, shape.d_ffn, shape.d_model)
        read += predictor_bytes(entry) + rows
    return read / (one * shape.n_layers)
