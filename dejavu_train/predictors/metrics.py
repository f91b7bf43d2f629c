"""Counts and sums of selections: ratios are taken last, so that batches, ranks and documents weigh as they should.

Pure torch, shared by training, calibration and evaluation. Booleans go in, and everything is micro-averaged.
"""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

N_BINS = 4096
BIN_LIMIT = 16.0  # logits beyond +-16 fall into the outer bins


def _ratio(part: Tensor, whole: Tensor, empty: float) -> float:
    return float(part / whole) if float(whole) > 0 else empty


@dataclasses.dataclass
class SelectionSums:
    """Sums over rows of one selection.

    ``tp``, ``fp``, ``fn``, ``units`` are int64 counts. ``kept``, ``mass`` float64 sums of contribution.

    >>> sums = SelectionSums()
    >>> active = torch.tensor([[True, False, True]])
    >>> sums.update(torch.tensor([[True, True, False]]), active, torch.tensor([[3.0, 0.0, 1.0]]))
    >>> sums.recall, sums.precision, sums.retained_mass
    (0.5, 0.5, 0.75)
    """

    tp: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    fp: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    fn: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    units: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    kept: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    mass: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def update(self, selected: Tensor, active: Tensor, contribution: Tensor | None = None) -> None:
        """Add rows: ``selected``, ``active`` (..., n) bool, ``contribution`` (..., n) float."""
        assert selected.dtype == active.dtype == torch.bool, "selections are booleans, not logits"
        self.tp += (selected & active).sum().cpu()
        self.fp += (selected & ~active).sum().cpu()
        self.fn += (~selected & active).sum().cpu()
        self.units += selected.numel()
        if contribution is not None:
            self.kept += (contribution * selected).sum(dtype=torch.float64).cpu()
            self.mass += contribution.sum(dtype=torch.float64).cpu()

    @property
    def recall(self) -> float:
        """Selected and active / active. 1 when nothing is active."""
        return _ratio(self.tp, self.tp + self.fn, 1.0)

    @property
    def precision(self) -> float:
        """Selected and active / selected. 1 when nothing is selected."""
        return _ratio(self.tp, self.tp + self.fp, 1.0)

    @property
    def density(self) -> float:
        """Selected / all."""
        return _ratio(self.tp + self.fp, self.units, 0.0)

    @property
    def active_density(self) -> float:
        """Active / all."""
        return _ratio(self.tp + self.fn, self.units, 0.0)

    @property
    def retained_mass(self) -> float:
        """Share of the summed contribution that the selection keeps. 1 when there is none."""
        return _ratio(self.kept, self.mass, 1.0)


def total(parts: Iterable[SelectionSums]) -> SelectionSums:
    """The sums of several layers. Of layers equally wide the density is the mean of theirs."""
    added = SelectionSums()
    for part in parts:
        for field in dataclasses.fields(SelectionSums):
            setattr(added, field.name, getattr(added, field.name) + getattr(part, field.name))
    return added


def logit_histograms(logits: Tensor, active: Tensor, contribution: Tensor) -> Tensor:
    """Sums per logit bin, from which every threshold's ratios follow.

    Args: ``logits`` (B, n) float, ``active`` (B, n) bool, ``contribution`` (B, n) float.
    Returns: (3, N_BINS) float64: units, active units, contribution, of bins from low to high logits.
    """
    scale = N_BINS / (2 * BIN_LIMIT)
    bins = ((logits.float() + BIN_LIMIT) * scale).long().clamp_(0, N_BINS - 1).flatten()
    units = torch.bincount(bins, minlength=N_BINS)
    # Few units are active, and only they have a contribution (heads: all do, but there are few heads).
    place = (active | (contribution > 0)).flatten().nonzero(as_tuple=True)[0]
    chosen = bins[place]
    positives = torch.bincount(chosen, weights=active.flatten()[place].double(), minlength=N_BINS)
    mass = torch.bincount(chosen, weights=contribution.flatten()[place].double(), minlength=N_BINS)
    return torch.stack([units.double(), positives.double(), mass.double()])


def at_density(histograms: Tensor, density: float) -> dict[str, float]:
    """Recall, precision, retained mass and threshold where ``density`` of the units are selected.

    Args: ``histograms``: (3, N_BINS), sums of :func:`logit_histograms`. Linear within a bin.
    """
    units, positives, mass = torch.flip(histograms, [1]).cumsum(1)
    total = histograms.sum(1)
    count = density * float(total[0])
    place = int(torch.searchsorted(units, count).clamp_max(N_BINS - 1))
    before = [float(part[place - 1]) if place else 0.0 for part in (units, positives, mass)]
    after = [float(part[place]) for part in (units, positives, mass)]
    share = (count - before[0]) / max(after[0] - before[0], 1e-12)
    kept = [low + share * (high - low) for low, high in zip(before, after, strict=True)]
    width = 2 * BIN_LIMIT / N_BINS
    return {
        "recall": kept[1] / float(total[1]) if float(total[1]) else 1.0,
        "precision": kept[1] / kept[0] if kept[0] else 1.0,
        "retained_mass": kept[2] / float(total[2]) if float(total[2]) else 1.0,
        "density": density,
        "threshold": BIN_LIMIT - (place + share) * width,
    }


def top_units(contribution: Tensor, count: int) -> Tensor:
    """(..., n) bool: the ``count`` units of largest contribution in each row. The label of heads."""
    chosen = contribution.topk(min(count, contribution.shape[-1]), dim=-1).indices
    return torch.zeros_like(contribution, dtype=torch.bool).scatter_(-1, chosen, True)
