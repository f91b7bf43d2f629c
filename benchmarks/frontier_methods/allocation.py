"""Shares a budget out over more than densities: the ranks of the layers, and the union of what a batch selects.

Letters: L layers, N rows, n neurons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier_methods.plain_opt import PlainOPT, Sites
from benchmarks.frontier_methods.plan import Plan
from benchmarks.frontier_methods.predictors import Predictors
from benchmarks.frontier_methods.select import WEIGHT_BYTES, mlp_parts
from benchmarks.frontier_methods.sets import Batch
from dejavu_train.bundle.allocation import OperatingPoint, read_curve, spend
from dejavu_train.calibration.curves import union_densities


def ranks_and_densities(plans: Mapping[int, Plan], share: float) -> tuple[list[int], list[float]]:
    """For every layer the rank and the density that save most loss for ``share`` of the dense MLP's bytes.

    Args:
        plans: rank -> the plan of predictors of that rank in all layers.

    Raises:
        UserError: a share below what the smallest predictors read.
    """
    model = next(iter(plans.values())).model
    choices: dict[int, list[OperatingPoint]] = {}
    rank_of: dict[tuple[int, float, float], int] = {}
    for layer in range(model.n_layers):
        points = []
        for rank, plan in plans.items():
            curve = plan.curves[layer]
            for density, loss in zip(curve["density"], curve["loss_increase"], strict=True):
                # whole: there is nothing between two ranks
                point = OperatingPoint(plan.cost(layer, density), loss, density, whole=True)
                rank_of[layer, point.cost, point.density] = rank
                points.append(point)
        choices[layer] = points
    chosen = spend(choices, share * 2 * WEIGHT_BYTES * model.d * model.f * model.n_layers)
    densities = [chosen[layer].density for layer in range(model.n_layers)]
    return [rank_of[layer, chosen[layer].cost, density] for layer, density in enumerate(densities)], densities


@torch.no_grad()
def of_ranks(model: PlainOPT, trained: Mapping[int, Predictors], ranks: Sequence[int]) -> Predictors:
    """Predictors that take each layer from the set of its rank."""
    first = trained[ranks[0]]
    made = Predictors(model, first.target, ranks, first.kind, nonlinearity=first.nonlinearity)
    made.sites = list(first.sites)
    for layer, rank in enumerate(ranks):
        made.down[layer, :rank] = trained[rank].down[layer]
        made.up[layer, :, :rank] = trained[rank].up[layer]
        made.bias[layer] = trained[rank].bias[layer]
    return made.requires_grad_(False)


@dataclass
class BatchPlan(Plan):
    """A plan whose bytes are those of a batch that is decoded together: every row that one of its tokens selects.

    ``selected`` and ``hits`` (L lists over the curve's densities): share of neurons in the union, and of those that are
    active for a token that selects them. Losses are those of the single tokens, which keep their own masks.
    """

    batch: int = 1
    selected: list[list[float]] = field(default_factory=list)
    hits: list[list[float]] = field(default_factory=list)

    def cost(self, layer: int, density: float) -> float:
        grid = self.curves[layer]["density"]
        found = read_curve({"density": grid, "selected": self.selected[layer], "hits": self.hits[layer]}, density)
        f = self.model.f
        return sum(mlp_parts(self.model, self.scorer, layer, found["selected"] * f, found["hits"] * f).values())


class _Keep:
    """A dense edit that keeps a scorer's scores, and the activations, at scored positions."""

    def __init__(self, model: PlainOPT, scorer: Any) -> None:
        self.scorer, self.scored = scorer, torch.empty(0)
        self.scores: list[list[Tensor]] = [[] for _ in model.layers]
        self.live: list[list[Tensor]] = [[] for _ in model.layers]

    def heads(self, layer: int, sites: Sites, out: Tensor) -> Tensor:
        return out

    def mlp(self, layer: int, sites: Sites, activation: Tensor) -> Tensor:
        self.scores[layer].append(self.scorer.scores(layer, sites, activation)[self.scored].half())
        self.live[layer].append(activation[self.scored] > 0)
        return activation

    def offset(self, layer: int, target: str) -> Tensor | None:
        return None


@torch.no_grad()
def batch_plan(plan: Plan, parts: Sequence[Batch], batch: int) -> BatchPlan:
    """The same curves and losses, with the bytes of ``batch`` tokens of different places in ``parts``."""
    model, keep = plan.model, _Keep(plan.model, plan.scorer)
    for part in parts:
        part = part.to(model.device)
        keep.scored = part.scored
        plan.scorer.begin(part, model)
        model.blocks(model.start(part.ids), keep)
    selected, hits = [], []
    for layer, curve in enumerate(plan.curves):
        scores, live = torch.cat(keep.scores[layer]).float(), torch.cat(keep.live[layer])
        selected.append(union_densities(scores, curve["threshold"], batch))
        hits.append(union_densities(scores.masked_fill(~live, -torch.inf), curve["threshold"], batch))
    return BatchPlan(model, plan.scorer, plan.curves, plan.active, plan.survivors, batch, selected, hits)
