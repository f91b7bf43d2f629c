"""From a scorer to thresholds for a budget of bytes, on ``calibration`` documents only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.score import layer_losses
from benchmarks.frontier_methods.select import WEIGHT_BYTES, Gates, mlp_parts
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.bundle.allocation import OperatingPoint, in_proportion, read_curve, spend
from dejavu_train.calibration.curves import MLP_GRID, LogitHistogram, spread_loss
from dejavu_train.errors import UserError

PROBES = (0.004, 0.012, 0.03, 0.08, 0.2, 0.5)


class _Counting:
    """A dense edit that counts a scorer's scores, layer by layer."""

    def __init__(self, model: PlainOPT, scorer: Any) -> None:
        self.model, self.scorer = model, scorer
        self.tallies = [LogitHistogram() for _ in range(model.n_layers)]
        self.filters = [LogitHistogram() for _ in range(model.n_layers)]
        self.frequency = torch.zeros(model.n_layers, model.f, dtype=torch.float64, device=model.device)
        self.rows = 0
        self.scored = torch.empty(0)

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        values = activation[self.scored]
        self.frequency[layer] += (values > 0).double().sum(0)
        if self.scorer is not None:
            scores = self.scorer.scores(layer, sites, activation)[self.scored]
            live = values > 0
            if hasattr(self.scorer, "counted"):  # a curve over what the filter lets through
                passed, scores = self.scorer.passed[self.scored], self.scorer.filter_scores[self.scored]
                self.filters[layer].add(scores, passed, passed.float())
                live = live & passed
            self.tallies[layer].add(scores, live, values * self.model.layers[layer].fc2_norm)
        return activation

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None


@dataclass
class Plan:
    """Curves and losses of one scorer; gives thresholds for a budget."""

    model: PlainOPT
    scorer: Any
    curves: list[dict[str, list[float]]]
    active: list[float]
    survivors: list[float]

    def cost(self, layer: int, density: float) -> float:
        """Bytes of a layer at a density."""
        f = self.model.f
        read = read_curve(self.curves[layer], density)
        hits = min(density, read["recall"] * self.active[layer]) * f
        selected, survivors = density * f, self.survivors[layer]
        if "selected" in read:  # the density of a cascade is that of its filter
            selected, survivors = read["selected"] * f, density * f
        return sum(mlp_parts(self.model, self.scorer, layer, selected, hits, survivors).values())

    def total(self, densities: Sequence[float]) -> float:
        return sum(self.cost(layer, density) for layer, density in enumerate(densities))

    def densities(self, share: float, how: str) -> list[float]:
        """Densities whose bytes are ``share`` of the dense MLP's.

        Args:
            how: ``measured`` (loss saved per byte), ``proportional`` (to true density), ``uniform``, or ``global``
                (one threshold for all layers).

        Raises:
            UserError: a share below what the predictors read.
        """
        budget = share * 2 * WEIGHT_BYTES * self.model.d * self.model.f * self.model.n_layers
        n = self.model.n_layers
        if how == "measured":
            choices: dict[int, list[OperatingPoint]] = {
                layer: [
                    OperatingPoint(self.cost(layer, d), loss, d)
                    for d, loss in zip(curve["density"], curve["loss_increase"], strict=True)
                    # what the filter of a cascade lets through bounds what the second stage can select
                    if not self.survivors[layer] or d * self.model.f <= self.survivors[layer]
                ]
                for layer, curve in enumerate(self.curves)
            }
            chosen = spend(choices, budget)
            return [chosen[layer].density for layer in range(n)]
        families: dict[str, Callable[[float], list[float]]] = {
            "uniform": lambda s: [s] * n,
            "proportional": lambda s: list(in_proportion(dict(enumerate(self.active)), s, {}).values()),
            "global": lambda s: self._above(s),
        }
        if how not in families:
            raise UserError(f"unknown sharing {how}; it is measured, {', '.join(families)}")
        low, high = 1e-4, 1.0
        if self.total(families[how](low)) > budget:
            raise UserError(f"a budget of {share:.1%} cannot be met: the predictors alone read more")
        for _ in range(40):
            middle = (low * high) ** 0.5
            if self.total(families[how](middle)) <= budget:
                low = middle
            else:
                high = middle
        return families[how](low)

    def _above(self, mean: float) -> list[float]:
        """Densities of the layers under the one threshold that gives ``mean``."""
        low = min(curve["threshold"][-1] for curve in self.curves)
        high = max(curve["threshold"][0] for curve in self.curves)
        shares: list[float] = []
        for _ in range(40):
            middle = (low + high) / 2
            shares = [density_above(curve, middle) for curve in self.curves]
            if sum(shares) / len(shares) > mean:
                low = middle
            else:
                high = middle
        return shares

    def price(self, share: float) -> float:
        """Nats per token that one dense MLP's bytes are worth at ``share``: the slope of the summed loss."""
        here, there = (
            sum(
                read_curve(curve, density)["loss_increase"]
                for curve, density in zip(self.curves, self.densities(at, "measured"), strict=True)
            )
            for at in (share, 1.15 * share)
        )
        return max((here - there) / (0.15 * share), 1e-3)

    def thresholds(self, densities: Sequence[float]) -> list[float | None]:
        # at density 1 everything is selected, for a cascade everything that passes its second stage; fc2 rows of
        # inactive neurons are still not read
        everything = -1e3 if hasattr(self.scorer, "counted") else -1e9
        return [
            everything if density >= 1.0 else read_curve(curve, density)["threshold"]
            for curve, density in zip(self.curves, densities, strict=True)
        ]


def density_above(curve: dict[str, list[float]], threshold: float) -> float:
    """The density that ``threshold`` selects, read from a curve."""
    import numpy as np

    falling = np.asarray(curve["threshold"])
    return float(np.interp(-threshold, -falling, np.asarray(curve["density"])))


@torch.no_grad()
def make_plan(
    model: PlainOPT,
    scorer: Any,
    parts: Sequence[Batch],
    probe_parts: Sequence[Batch],
    survivors: Sequence[float] | None = None,
    losses: bool = True,
    gates: Gates | None = None,
) -> Plan:
    """Count scores on ``parts``, measure every layer's loss on ``probe_parts`` (both of the calibration set)."""
    counting = count(model, scorer, parts)
    curves = [tally.curve(MLP_GRID) for tally in counting.tallies]
    active = (counting.frequency.mean(1) / counting.rows).tolist()
    if hasattr(scorer, "counted"):
        for layer, curve in enumerate(curves):
            filtered = counting.filters[layer]
            share = float(filtered.active.sum() / filtered.all.sum())
            curve["selected"] = [share * kept for kept in filtered.curve(MLP_GRID)["recall"]]
            active[layer] = float(counting.tallies[layer].active.sum() / counting.tallies[layer].all.sum())
    plan = Plan(model, scorer, curves, active, list(survivors or [0.0] * model.n_layers))
    if losses:
        # a cascade loses something even when its filter lets everything through
        probes = (*PROBES, 0.999) if hasattr(scorer, "counted") else PROBES
        thresholds = [[read_curve(curve, density)["threshold"] for density in probes] for curve in curves]
        gates = gates or Gates(model, mlp=scorer)
        measured = layer_losses(model, probe_parts, gates, "mlp", thresholds)
        for curve, row in zip(curves, measured, strict=True):
            curve["loss_increase"] = spread_loss(probes, row, curve["density"])
    return plan


@torch.no_grad()
def count(model: PlainOPT, scorer: Any, parts: Sequence[Batch]) -> _Counting:
    """Tallies and frequencies of a scorer over ``parts``; without a scorer the frequencies only."""
    counting = _Counting(model, scorer)
    for part in parts:
        part = part.to(model.device)
        counting.scored = part.scored
        counting.rows += int(part.scored.sum())
        if scorer is not None:
            scorer.begin(part, model)
        model.blocks(model.start(part.ids), counting)
    return counting
