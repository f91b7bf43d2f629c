"""A guard at run time: every N-th token is decoded densely, measures what the predictors keep, and moves thresholds.

Thresholds are constants that were set on one text. On another one the same threshold keeps another share of the
contribution, the retained mass. A dense token shows every activation, so the selection that the predictors make of it
can be judged. It also computes K and V of all heads. Between two dense tokens nothing is measured.

Everything here is tensors on the model's device. Only `GuardState.report` and `GuardState.reset` ask the host, so a
decode engine captures `measure` and `move` in a CUDA graph.

Letters: B batch rows, n units, K predictors (one a layer and target).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import TARGETS, Target, UnitKey
from dejavu_train.ground.errors import UserError

PADDING = 32  # a threshold stands alone in 128 bytes: kernels are compiled for aligned pointers
FIRST = 16  # measured tokens that the calibration counts for: it is not given up for the first few
COUNTS = ("candidates", "selected", "hits", "active", "kept", "mass")


class GuardState:
    """Thresholds and measurements of a model that is guarded. Shared by all that decode for it.

    Args:
        settings: what is asked for.
        specs: of a bundle, by (layer, target). Dense ones are left out.
        device: where the tensors live.
    Raises:
        UserError: a predictor without a curve, one that selects by top_k, or a promise that its curve never reaches,
            where thresholds are to move.
    """

    def __init__(self, settings: Guard, specs: Mapping[UnitKey, PredictorSpec], device: torch.device | str) -> None:
        self.settings = settings
        self.rows = {key: i for i, key in enumerate(key for key, spec in specs.items() if not spec.dense)}
        used = [specs[key] for key in self.rows]
        if not used:
            raise UserError("a guard watches predictors, and this bundle is dense everywhere; leave the guard out")
        laws = [_Law.of(spec, settings) for spec in used]

        def column(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float32, device=device)

        self.units = [spec.n_out for spec in used]
        self.first = column(spec.threshold or 0.0 for spec in used)
        self.promised, self.rate, self.lowest, self.highest = (
            column(getattr(law, name) for law in laws) for name in ("promised", "rate", "lowest", "highest")
        )
        self.thresholds = torch.zeros(len(used), PADDING, device=device, dtype=torch.float32)  # the first column counts
        self.now = torch.zeros(
            len(used), len(COUNTS), device=device, dtype=torch.float32
        )  # of the step that is being measured
        self.sums = torch.zeros(len(used), len(COUNTS), dtype=torch.float64, device=device)
        self.scale = torch.zeros(len(used), device=device, dtype=torch.float32)  # running mean of a token's mass
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = 0
        self.reset()

    def reset(self) -> None:
        """The bundle's thresholds again, nothing measured."""
        self.thresholds[:, 0] = self.first
        for tensor in (self.now, self.sums, self.scale, self.tokens):
            tensor.zero_()
        self.steps = 0

    def tensors(self) -> list[Tensor]:
        """All that `measure` and `move` change."""
        return [self.thresholds, self.now, self.sums, self.scale, self.tokens]

    def threshold(self, key: UnitKey) -> Tensor:
        """(1,) fp32, a view: it changes as the guard moves it."""
        return self.thresholds[self.rows[key], :1]

    def due(self) -> bool:
        """Count a decoding step. Whether it is one of those that are dense."""
        self.steps += 1
        return self.steps % self.settings.every == 0

    def measure(self, key: UnitKey, rows: Tensor, candidates: Tensor, selected: Tensor, contribution: Tensor) -> None:
        """Note what one predictor selects of a dense token.

        Args:
            rows: (B,) bool, those that would be sparse. Others count nothing.
            candidates, selected: (B, n) bool, above the threshold, and of these what a second stage lets through.
            contribution: (B, n), never negative. Of neurons zero where one is inactive.
        """
        mass = torch.where(rows[:, None], contribution.float(), 0.0)
        chosen, active = selected & rows[:, None], mass > 0
        counted = (candidates & rows[:, None], chosen, chosen & active, active, torch.where(chosen, mass, 0.0), mass)
        self.now[self.rows[key]] = torch.stack([part.sum(dtype=torch.float32) for part in counted])

    def move(self, rows: Tensor) -> None:
        """Close a step whose predictors have all been measured: add it to the sums, and move the thresholds.

        Args:
            rows: (B,) bool, as in `measure`.
        """
        number = rows.sum()
        self.sums += torch.where(number > 0, self.now, 0.0)
        self.tokens += number
        kept, mass = self.now[:, 4], self.now[:, 5]
        some = number.clamp_min(1)
        counted = torch.maximum(self.tokens.clamp(max=self.settings.memory).float(), some)
        scale = self.scale + some / counted * (mass / some - self.scale)
        error = (kept - self.promised * mass) / (some * scale).clamp_min(1e-30)
        there = self.thresholds[:, 0]
        # The calibration's threshold counts for FIRST tokens.
        moved = there + some / (counted + FIRST) * self.rate * error
        moved = torch.maximum(torch.minimum(moved, self.highest), self.lowest)
        there.copy_(torch.where(number > 0, moved, there))
        self.scale.copy_(torch.where(number > 0, scale, self.scale))

    def report(self) -> dict[str, Any]:
        """Measurements since the last reset. Asks the device.

        ``guard``: the settings. ``tokens``: measured. With any measured, ``mlp`` and ``heads`` hold shares over all
        layers: ``candidates`` and ``selected`` of the units, ``retained_mass``, and of neurons ``hits`` (selected and
        active, of all) and ``recall``. ``layers`` holds the same for each predictor, with its threshold now and at
        first, and what was promised.
        """
        tokens = int(self.tokens)
        report: dict[str, Any] = {"guard": asdict(self.settings), "tokens": tokens}
        if not tokens:
            return report
        sums = self.sums.tolist()
        for target in TARGETS:
            numbers = [i for key, i in self.rows.items() if key[1] == target]
            if numbers:
                counts = [sum(column) for column in zip(*(sums[i] for i in numbers), strict=True)]
                report[str(target)] = _shares(counts, tokens * sum(self.units[i] for i in numbers), target)
        columns = {"threshold": self.thresholds[:, 0], "first_threshold": self.first, "promised": self.promised}
        values = {name: column.tolist() for name, column in columns.items()}
        report["layers"] = [
            {"layer": layer, "target": str(target), **_shares(sums[i], tokens * self.units[i], target)}
            | {name: column[i] for name, column in values.items()}
            for (layer, target), i in self.rows.items()
        ]
        return report


@dataclass(frozen=True)
class _Law:
    """How one threshold moves: rate = change of the threshold for too much retained mass, 0 where it stays."""

    promised: float
    rate: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, spec: PredictorSpec, settings: Guard) -> "_Law":
        where = f"the {spec.target} predictor of layer {spec.layer}"
        promised = spec.retained_mass if settings.retained_mass is None else settings.retained_mass
        threshold = spec.threshold or 0.0
        if spec.target != Target.MLP or not settings.control:
            return cls(promised, 0.0, threshold, threshold)
        if spec.top_k is not None:
            raise UserError(
                f"a guard moves thresholds, and {where} selects by top_k; calibrate with thresholds, or set"
                " guard.control false"
            )
        if not spec.curve:
            raise UserError(f"a guard needs calibration curves, and {where} has none; calibrate the bundle again")
        most = spec.curve["retained_mass"][-1]
        if promised > most:
            raise UserError(
                f"guard.retained_mass {promised:g} is more than {where} ever keeps ({most:g}, all candidates)"
            )
        # The slope over a factor of two around the operating point, whose own grid cells are too small to be smooth.
        near = [read_curve(spec.curve, min(1.0, spec.density * factor)) for factor in (0.5, 2.0)]
        threshold_fall, mass_rise = (abs(near[0][name] - near[1][name]) for name in ("threshold", "retained_mass"))
        limits = spec.curve["threshold"]
        return cls(promised, threshold_fall / max(mass_rise, 1e-6), min(*limits, threshold), max(*limits, threshold))


def _shares(counts: Sequence[float], units: int, target: Target) -> dict[str, float]:
    candidates, selected, hits, active, kept, mass = counts
    shares = {"candidates": candidates / units, "selected": selected / units}
    shares["retained_mass"] = kept / mass if mass else 1.0
    if target == Target.MLP:
        shares |= {"hits": hits / units, "recall": hits / active if active else 1.0}
    return shares
