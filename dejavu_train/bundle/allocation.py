"""Reads calibration curves, gives a density to every layer: where one more selected unit lowers the loss most.

A curve is a plain dict of equally long lists over a rising grid of densities, as ``bundle.json`` stores it. Its columns
are ``density``, ``threshold``, ``recall``, ``precision`` and ``retained_mass``. Where it was measured,
``loss_increase`` has the nats per token when only this layer and target is sparse. Layers differ by a factor of twenty
in how many neurons are active, so the same density everywhere wastes most of a budget.

Everything here is a pure function of such curves, so inference can move a bundle to another density without shards.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from dejavu_train.ground.errors import UserError
from dejavu_train.models.weight_format import UnitBytes

Curve = Mapping[str, Sequence[float]]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OperatingPoint:
    """One way to run a unit of the budget: what it costs and how much loss it leaves."""

    cost: float
    loss: float
    density: float
    whole: bool = False
    """Reached only in full: there is nothing between the point before and this one (a layer without its predictor)."""


def read_curve(curve: Curve, density: float) -> dict[str, float]:
    """Every column of ``curve`` at ``density``, linear between grid points."""
    grid = np.asarray(curve["density"], dtype=float)
    return {
        name: density if name == "density" else float(np.interp(density, grid, np.asarray(values, dtype=float)))
        for name, values in curve.items()
    }


def density_for_mass(curve: Curve, retained_mass: float) -> float:
    """The smallest density on ``curve`` that keeps ``retained_mass`` of the contribution."""
    mass = np.maximum.accumulate(np.asarray(curve["retained_mass"], dtype=float))
    grid = np.asarray(curve["density"], dtype=float)
    if retained_mass >= mass[-1]:
        return 1.0
    above = int(np.searchsorted(mass, retained_mass))
    if above == 0:
        return float(grid[0])
    share = (retained_mass - mass[above - 1]) / max(mass[above] - mass[above - 1], 1e-12)
    return float(grid[above - 1] + share * (grid[above] - grid[above - 1]))


def lower_hull(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The points worth choosing: from the cheapest on, each step buying less loss per cost than the one before."""
    hull: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, p.loss)):
        if hull and point.loss >= hull[-1].loss:
            continue
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(first: OperatingPoint, second: OperatingPoint) -> float:
    return (first.loss - second.loss) / max(second.cost - first.cost, 1e-12)


def spend(choices: Mapping[Key, Sequence[OperatingPoint]], budget: float) -> dict[Key, OperatingPoint]:
    """Minimise the summed loss within a summed cost: steps of all hulls in order of loss saved per cost.

    This is the Lagrangian solution. The last step is taken in part, between two points of one curve.

    Raises:
        UserError: the cheapest points together cost more than ``budget``.
    """
    hulls = {key: lower_hull(points) for key, points in choices.items()}
    chosen = {key: hull[0] for key, hull in hulls.items()}
    left = budget - sum(point.cost for point in chosen.values())
    if left < -1e-9 * max(1.0, abs(budget)):
        raise UserError(
            f"the budget of {budget:.4g} cannot be met: the least that can be read is {budget - left:.4g};"
            " raise the budget or train predictors of a lower rank"
        )
    steps = [
        (_slope(hull[i], hull[i + 1]), -i, key, hull[i], hull[i + 1])
        for key, hull in hulls.items()
        for i in range(len(hull) - 1)
    ]
    closed: set[Key] = set()
    for _, _, key, here, there in sorted(steps, key=lambda step: step[:2], reverse=True):
        if key in closed:
            continue
        price = there.cost - here.cost
        if price <= left:
            chosen[key] = there
            left -= price
            continue
        if there.whole:
            closed.add(key)
            continue
        share = max(left, 0.0) / price
        chosen[key] = OperatingPoint(
            here.cost + share * price,
            here.loss + share * (there.loss - here.loss),
            here.density + share * (there.density - here.density),
        )
        break
    return chosen


def least_cost(choices: Mapping[Key, Sequence[OperatingPoint]], allowance: float) -> dict[Key, OperatingPoint]:
    """The cheapest choice whose summed loss stays within ``allowance`` nats per token (bisection on the budget)."""
    low = sum(min(point.cost for point in points) for points in choices.values())
    high = sum(max(point.cost for point in points) for points in choices.values())
    for _ in range(50):
        middle = (low + high) / 2
        if sum(point.loss for point in spend(choices, middle).values()) <= allowance:
            high = middle
        else:
            low = middle
    return spend(choices, high)


def in_proportion(active: Mapping[int, float], mean_density: float, floors: Mapping[int, float]) -> dict[int, float]:
    """Densities in proportion to ``active``, none above 1 nor below its floor, with the given mean."""
    low, high = 0.0, 1.0 / max(min(active.values()), 1e-9)

    def at(scale: float) -> dict[int, float]:
        return {layer: min(1.0, max(floors.get(layer, 0.0), scale * share)) for layer, share in active.items()}

    for _ in range(100):
        middle = (low + high) / 2
        if sum(at(middle).values()) / len(active) < mean_density:
            low = middle
        else:
            high = middle
    return at(high)


class LayerFacts(Protocol):
    """Facts that a spec of a bundle knows about its layer."""

    @property
    def curve(self) -> Curve: ...

    @property
    def active_density(self) -> float | None: ...

    @property
    def keep_dense(self) -> bool: ...


def allocate(specs: Mapping[int, LayerFacts], mean_density: float) -> dict[int, float]:
    """Share a mean density over the layers of one target.

    With ``loss_increase`` in every curve the summed loss is minimised. Without it, densities follow the layers' true
    densities or, where those are unknown (heads), minimise the lost share of contribution.

    Args:
        specs: layer -> its curve, true density and whether it is kept dense (density 1).
        mean_density: in (0, 1]. The mean of the result over the layers, dense ones included.

    Raises:
        UserError: a mean density outside (0, 1], below what dense layers alone ask, or an empty curve.
    """
    if not 0.0 < mean_density <= 1.0:
        raise UserError(f"a mean density must lie above 0 and at most at 1, got {mean_density:g}")
    if mean_density == 1.0:
        return dict.fromkeys(specs, 1.0)
    least = {layer: float(spec.keep_dense) for layer, spec in specs.items()}
    if sum(least.values()) > mean_density * len(specs) + 1e-9:
        raise UserError(
            f"a mean density of {mean_density:g} cannot be met: the dense layers alone ask"
            f" {sum(least.values()) / len(specs):.4g}; ask for more, or keep fewer layers dense"
        )
    for layer, spec in specs.items():
        if not spec.curve:
            raise UserError(f"layer {layer} has no calibration curve; calibrate the bundle again")
    measured = all("loss_increase" in spec.curve for spec in specs.values())
    active = {layer: spec.active_density for layer, spec in specs.items() if spec.active_density is not None}
    if not measured and len(active) == len(specs):
        return in_proportion(active, mean_density, least)
    choices = {layer: density_choices(spec.curve, least[layer], measured) for layer, spec in specs.items()}
    floor_cost = sum(min(point.cost for point in points) for points in choices.values())
    chosen = spend(choices, max(mean_density * len(specs), floor_cost))
    return {layer: chosen[layer].density for layer in specs}


def density_choices(curve: Curve, floor: float, measured: bool) -> list[OperatingPoint]:
    """The curve's grid as choices whose cost is the density. Nothing below ``floor``."""
    grid = np.asarray(curve["density"], dtype=float)
    losses = np.asarray(curve["loss_increase"] if measured else curve["retained_mass"], dtype=float)
    if not measured:
        losses = 1.0 - losses
    points = [
        OperatingPoint(float(d), float(loss), float(d)) for d, loss in zip(grid, losses, strict=True) if d > floor
    ]
    if floor >= grid[0]:
        points.append(OperatingPoint(floor, float(np.interp(floor, grid, losses)), floor))
    return points


def mlp_bytes(density: float, recall: float, active_density: float, n_units: int, unit: UnitBytes) -> float:
    """Bytes read per token: ``up`` of selected neurons, ``down`` of those that are also active."""
    return n_units * (density * unit.up + min(density, recall * active_density) * unit.down)


def cascade_bytes(
    density: float, selected: float, recall: float, active_density: float, n_units: int, d_model: int, unit: UnitBytes
) -> float:
    """Bytes of neurons that a cascade reads per token. Its planes of ``up`` have 16 bits, whatever the model has.

    Of the candidates (``density``) it reads the upper four bits of ``up``, with a step and a threshold each. Of what
    passes (``selected``) it reads the other twelve with a scale, and ``down`` as ever.
    """
    upper, rest = plane_bytes(d_model)
    return n_units * (density * upper + selected * rest + min(selected, recall * active_density) * unit.down)


def plane_bytes(d_model: int) -> tuple[float, float]:
    """Bytes of a neuron: the upper plane of ``up`` with a step and a threshold, its lower plane with a scale."""
    return d_model / 2 + 8, 1.5 * d_model + 4


def union_density(density: float, batch: int) -> float:
    """Density of a batch of independent rows: the share of units that at least one row selects."""
    return 1.0 - (1.0 - density) ** batch


@dataclass(frozen=True)
class Budget:
    """Limit of a model's cost: bytes per token, or an increase of perplexity as a fraction. One of them is None."""

    bytes_per_token: float | None
    perplexity_increase: float | None


_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}


def parse_budget(text: str | float) -> Budget:
    """``"1%"`` allows one per cent more perplexity. ``"600kB"``, ``"1.5MB"`` or ``600000`` are bytes per token.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(%|[kKmMgG]?[bB])?\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise UserError(f"a budget is a perplexity allowance such as 1% or bytes per token such as 600kB, got {text!r}")
    value, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        return Budget(None, value / 100)
    return Budget(value * _UNITS[unit], None)
