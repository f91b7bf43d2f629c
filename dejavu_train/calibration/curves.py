"""Reads logits, labels and contributions, returns curves: for every density its threshold and what it keeps.

The logits of neurons are counted in the values that fp16 has. So memory is the same for any number of rows, and a
quantile is exact to the resolution at which kernels compare. Heads are few, so their logits are kept whole.

Letters: N rows, n units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dejavu_train.bundle.spec import CURVE_COLUMNS
from dejavu_train.calibration.config import LEAST_DENSITY
from dejavu_train.families import Target

# MLP thresholds matter between a tenth of a per cent and a half, heads near 1.
MLP_GRID = tuple(float(x) for x in np.geomspace(LEAST_DENSITY[Target.MLP], 1.0, 61))
HEAD_GRID = tuple(float(x) for x in np.linspace(LEAST_DENSITY[Target.HEADS], 1.0, 48))
# Densities whose loss is measured; between them the loss follows a line in (log density, log loss).
MLP_PROBES = (0.005, 0.015, 0.04, 0.1, 0.25)
CASCADE_PROBES = (*MLP_PROBES, 0.999)  # a cascade loses something even where its filter lets everything through
HEAD_PROBES = (0.085, 0.25, 0.5, 0.7, 0.85, 0.95)


@dataclass
class LogitHistogram:
    """Counts over the fp16 values of the logits: of all units, of the active ones, and of their contribution."""

    all: Tensor = field(default_factory=lambda: torch.zeros(65536, dtype=torch.float64))
    active: Tensor = field(default_factory=lambda: torch.zeros(65536, dtype=torch.float64))
    mass: Tensor = field(default_factory=lambda: torch.zeros(65536, dtype=torch.float64))

    def add(self, logits: Tensor, active: Tensor, contribution: Tensor) -> None:
        """Count a block.

        Args:
            logits: (N, n) fp32.
            active: (N, n) bool.
            contribution: (N, n), zero where inactive.
        """
        codes = fp16_codes(logits)
        self.all += torch.bincount(codes.flatten(), minlength=65536).cpu()
        of_active = codes[active]
        self.active += torch.bincount(of_active, minlength=65536).cpu()
        self.mass += torch.bincount(of_active, weights=contribution[active].double(), minlength=65536).cpu()

    def curve(self, grid: Sequence[float]) -> dict[str, list[float]]:
        """The curve over ``grid``. At density 1 the threshold lies just below the smallest logit."""
        # above[c] = units whose code exceeds c, that is logit > value(c)
        above = {name: _above(getattr(self, name)) for name in ("all", "active", "mass")}
        total = {name: max(float(getattr(self, name).sum()), 1e-300) for name in above}
        lowest = int(torch.nonzero(self.all)[0]) - 1 if bool(self.all.any()) else 0
        rows: dict[str, list[float]] = {name: [] for name in CURVE_COLUMNS}
        for density in grid:
            if density >= 1.0:
                code = max(lowest, 1024)
            else:
                # the first code with at most density * total above it
                code = int(
                    torch.searchsorted(
                        -above["all"], torch.tensor(-density * total["all"], dtype=torch.float32).double()
                    )
                )
            count, hits = float(above["all"][code]), float(above["active"][code])
            rows["density"].append(float(density))
            rows["threshold"].append(_fp16_value(code))
            rows["recall"].append(hits / total["active"])
            rows["precision"].append(hits / max(count, 1.0))
            rows["retained_mass"].append(float(above["mass"][code]) / total["mass"])
        return rows


def fp16_codes(values: Tensor) -> Tensor:
    """Rank of each value among all fp16 numbers: int64 in [0, 65535], rising with the value."""
    bits = values.clamp(-65504, 65504).half().view(torch.int16).long()
    return torch.where(bits >= 0, bits + 32768, -1 - bits)


def _fp16_value(code: int) -> float:
    bits = code - 32768 if code >= 32768 else -1 - code
    return float(torch.tensor([bits], dtype=torch.int16).view(torch.float16))


def _above(counts: Tensor) -> Tensor:
    return counts.flip(0).cumsum(0).flip(0) - counts


def head_curve(logits: Tensor, contribution: Tensor, grid: Sequence[float]) -> dict[str, list[float]]:
    """The curve of heads: recall is the overlap with the same number of largest contributions, row by row.

    Args:
        logits, contribution: (N, n).
        grid: rising densities.
    """
    ranks = contribution.argsort(dim=-1, descending=True).argsort(dim=-1)
    flat = logits.flatten().sort(descending=True).values
    total = float(contribution.double().sum())
    rows: dict[str, list[float]] = {name: [] for name in CURVE_COLUMNS}
    for density in grid:
        count = round(density * flat.numel())
        # between the last that is selected and the first that is not, so that a rounding does not flip it
        threshold = float(flat[-1]) - 1e-3 if count >= flat.numel() else float((flat[count - 1] + flat[count]) / 2)
        if count < 1:
            threshold = float(flat[0])
        keep = logits > threshold
        largest = ranks < keep.sum(-1, keepdim=True)
        recall = float((keep & largest).sum()) / max(float(keep.sum()), 1.0)
        rows["density"].append(float(density))
        rows["threshold"].append(threshold)
        rows["recall"].append(recall)
        rows["precision"].append(recall)
        rows["retained_mass"].append(float((contribution.double() * keep).sum()) / max(total, 1e-300))
    return rows


def spread_blocks(total: int, rows: int, block: int) -> list[tuple[int, int]]:
    """Row ranges of at most ``block`` rows, ``rows`` rows in all, spread evenly over ``total``.

    >>> spread_blocks(100, 20, 10)
    [(0, 10), (50, 60)]
    """
    if rows >= total:
        return [(start, min(start + block, total)) for start in range(0, total, block)]
    count = max(1, -(-rows // block))
    size = -(-rows // count)
    return [(total * i // count, min(total * i // count + size, total)) for i in range(count)]


def union_densities(logits: Tensor, thresholds: Sequence[float], batch: int) -> list[float]:
    """Share of units that at least one of ``batch`` rows selects, at each threshold. Rows far apart form a batch.

    Args:
        logits: (N, n).
    """
    groups = max(1, logits.shape[0] // batch)
    # row i of the batch comes from the i-th part of the rows, so batch mates are of different documents
    grouped = logits[: groups * batch].unflatten(0, (-1, groups)) if logits.shape[0] >= batch else logits[:, None]
    highest = grouped.float().amax(0)
    return [float((highest > threshold).float().mean()) for threshold in thresholds]


def spread_loss(densities: Sequence[float], losses: Sequence[float], grid: Sequence[float]) -> list[float]:
    """Losses on ``grid`` from a few measured ones: falling, straight in (log density, log loss), 0 at density 1.

    Below the lowest measured density the first slope goes on. Above the highest the loss falls in a straight line.
    """
    falling = np.maximum.accumulate(np.maximum(np.asarray(losses, dtype=float)[::-1], 1e-9))[::-1]
    x, y = np.log(np.asarray(densities, dtype=float)), np.log(falling)
    target = np.log(np.asarray(grid, dtype=float))
    inside = np.interp(target, x, y)
    # a loss near zero says little about its slope: beyond the cube the extrapolation would be noise
    slope = max((y[1] - y[0]) / (x[1] - x[0]), -3.0) if len(x) > 1 else -1.0
    values = np.exp(np.where(target < x[0], y[0] + slope * (target - x[0]), inside))
    above = np.asarray(grid) > densities[-1]
    share = (1.0 - np.asarray(grid)) / max(1.0 - densities[-1], 1e-9)
    return [float(v) for v in np.where(above, falling[-1] * share, values)]
