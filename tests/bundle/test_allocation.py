"""Sharing a budget: hand-countable cases, and that the result is the optimum that brute force finds."""

import itertools
from dataclasses import dataclass, field

import pytest

from dejavu_train.bundle import allocation as al
from dejavu_train.ground.errors import UserError
from dejavu_train.models.weight_format import UnitBytes


@dataclass
class Layer:
    curve: dict = field(default_factory=dict)
    active_density: float | None = None
    keep_dense: bool = False


def curve(losses, grid=(0.1, 0.2, 0.4, 0.8, 1.0), measured=True):
    values = {name: list(grid) for name in ("density", "threshold", "recall", "precision")}
    values["retained_mass"] = [1.0 - loss for loss in losses]
    if measured:
        values["loss_increase"] = list(losses)
    return values


def test_spend_finds_the_optimum_of_brute_force_on_hull_points():
    points = {
        "a": [
            al.OperatingPoint(1, 8, 0.1),
            al.OperatingPoint(2, 3, 0.2),
            al.OperatingPoint(4, 1, 0.4),
            al.OperatingPoint(8, 0, 1.0),
        ],
        "b": [
            al.OperatingPoint(1, 2, 0.1),
            al.OperatingPoint(2, 1.5, 0.2),
            al.OperatingPoint(4, 0.8, 0.4),
            al.OperatingPoint(8, 0, 1.0),
        ],
    }
    for budget in (3, 5, 6):
        best = min(
            sum(point.loss for point in pair)
            for pair in itertools.product(*points.values())
            if sum(point.cost for point in pair) <= budget
        )
        chosen = al.spend(points, budget)
        assert sum(point.cost for point in chosen.values()) <= budget + 1e-9
        assert sum(point.loss for point in chosen.values()) <= best + 1e-9  # parts of a step may beat the grid


def test_spend_below_the_least_is_one_line_that_names_it():
    with pytest.raises(UserError, match="cannot be met: the least that can be read is 2;"):
        al.spend({"a": [al.OperatingPoint(2.0, 1.0, 0.1)]}, 1.0)


def test_a_whole_step_is_taken_in_full_or_not_at_all():
    points = {"a": [al.OperatingPoint(1, 1, 0.5), al.OperatingPoint(4, 0, 1.0, whole=True)]}
    assert al.spend(points, 3.9)["a"].density == 0.5
    assert al.spend(points, 4.0)["a"].density == 1.0


def test_least_cost_meets_the_allowance_at_the_smallest_cost():
    points = {
        "a": [al.OperatingPoint(1, 1, 0.1), al.OperatingPoint(3, 0, 1.0)],
        "b": [al.OperatingPoint(1, 0.2, 0.1), al.OperatingPoint(3, 0, 1.0)],
    }
    chosen = al.least_cost(points, 0.7)
    assert sum(p.loss for p in chosen.values()) == pytest.approx(0.7, abs=1e-6)
    assert sum(p.cost for p in chosen.values()) == pytest.approx(3.0, abs=1e-6)
    assert chosen["b"].density == 0.1


def test_hull_drops_points_that_buy_less():
    hull = al.lower_hull(
        [
            al.OperatingPoint(1, 4, 0.1),
            al.OperatingPoint(2, 3.9, 0.2),
            al.OperatingPoint(3, 1, 0.3),
            al.OperatingPoint(4, 1, 0.4),
        ]
    )
    assert [p.cost for p in hull] == [1, 3]


def test_measured_losses_move_density_to_where_it_counts_and_keep_the_mean():
    specs = {0: Layer(curve([0.9, 0.5, 0.1, 0.01, 0.0])), 1: Layer(curve([0.01, 0.005, 0.002, 0.001, 0.0]))}
    shares = al.allocate(specs, 0.3)
    assert shares[0] > 0.4 > shares[1]
    assert sum(shares.values()) / 2 == pytest.approx(0.3)


def test_without_losses_the_mlp_follows_true_densities_and_is_capped_at_one():
    specs = {i: Layer(curve([0.5, 0.4, 0.3, 0.1, 0.0], measured=False), a) for i, a in enumerate((0.02, 0.04, 0.9))}
    shares = al.allocate(specs, 0.5)
    assert shares[2] == 1.0
    assert shares[1] == pytest.approx(2 * shares[0], rel=1e-6)
    assert sum(shares.values()) / 3 == pytest.approx(0.5, rel=1e-6)


def test_heads_without_losses_minimise_the_lost_mass():
    specs = {
        0: Layer(curve([0.8, 0.7, 0.5, 0.2, 0], measured=False)),
        1: Layer(curve([0.1, 0.05, 0, 0, 0], measured=False)),
    }
    shares = al.allocate(specs, 0.5)
    assert shares[0] > shares[1]
    assert sum(shares.values()) / 2 == pytest.approx(0.5)


def test_dense_layers():
    losses = [0.5, 0.4, 0.3, 0.1, 0.0]
    shares = al.allocate({0: Layer(curve(losses), keep_dense=True), 1: Layer(curve(losses))}, 0.7)
    assert shares == {0: 1.0, 1: pytest.approx(0.4)}
    with pytest.raises(UserError, match="dense layers alone ask 0.5"):
        al.allocate({0: Layer(curve(losses), keep_dense=True), 1: Layer(curve(losses))}, 0.3)


@pytest.mark.parametrize("mean", [0.0, -0.1, 1.2])
def test_a_mean_density_outside_its_range_is_refused(mean):
    with pytest.raises(UserError, match="above 0 and at most at 1"):
        al.allocate({0: Layer(curve([0.1] * 5))}, mean)


def test_an_empty_curve_is_named_and_density_one_needs_none():
    assert al.allocate({0: Layer()}, 1.0) == {0: 1.0}
    with pytest.raises(UserError, match="layer 0 has no calibration curve"):
        al.allocate({0: Layer()}, 0.5)


def test_density_for_mass_and_read_curve():
    c = curve([0.5, 0.3, 0.1, 0.05, 0.0])
    assert al.density_for_mass(c, 0.5) == pytest.approx(0.1)
    assert al.density_for_mass(c, 0.8) == pytest.approx(0.3)
    assert al.density_for_mass(c, 1.0) == 1.0
    assert al.read_curve(c, 0.3)["retained_mass"] == pytest.approx(0.8)


def test_bytes_read():
    # 10 % of 8 neurons x 4 wide, of which those active (recall 0.5 x density 0.1) are read of fc2 too, fp16
    unit = UnitBytes(2 * 4, 2 * 4, 0)
    assert al.mlp_bytes(0.1, 0.5, 0.1, 8, unit) == pytest.approx(2 * 4 * 8 * 0.15)
    assert al.mlp_bytes(1.0, 1.0, 1.0, 8, unit) == 2 * 2 * 8 * 4
    # planes have 16 bits whatever fc2 has
    assert al.cascade_bytes(0.5, 0.25, 0.5, 0.5, 8, 16, UnitBytes(9, 9, 0)) == 8 * (0.5 * 16 + 0.25 * 28 + 0.25 * 9)
    assert al.union_density(0.1, 2) == pytest.approx(0.19)


@pytest.mark.parametrize(
    ("text", "bytes_", "increase"),
    [("1%", None, 0.01), ("600kB", 600e3, None), ("1.5MB", 1.5e6, None), (12345, 12345, None), ("2e6", 2e6, None)],
)
def test_parse_budget(text, bytes_, increase):
    budget = al.parse_budget(text)
    assert budget.bytes_per_token == bytes_
    assert budget.perplexity_increase == increase


@pytest.mark.parametrize("text", ["", "much", "-3", "0", "5 apples", "1%%"])
def test_parse_budget_refuses(text):
    with pytest.raises(UserError, match="a budget is a perplexity allowance"):
        al.parse_budget(text)
