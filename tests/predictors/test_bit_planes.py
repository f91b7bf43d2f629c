"""fc1 in planes: the weights that come back, the upper plane as a sketch of them, and what passes the second stage."""

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.bit_planes import STEPS, BitPlanes, build_second_stage, choose_grid, input_levels


def planes_of(weight):
    return BitPlanes.of(weight, *choose_grid(weight))


def coarse(planes):
    """The upper plane alone as weights."""
    return planes.codes() * planes.step[:, None]


def test_the_weights_come_back_to_a_fixed_point_of_their_row():
    weight = torch.randn(70, 48)
    weight[3] = 0
    weight[4, 5] = 30.0  # one far off: the others keep a step of their own
    scale, steps = choose_grid(weight)
    back = BitPlanes.of(weight, scale, steps).weight()
    assert ((back - weight).abs() <= 0.51 * scale[:, None]).all()
    assert (scale * (7 * steps + 2047) >= weight.abs().amax(1) * 0.999)[[0, 1, 2, 4]].all()
    assert set(steps.tolist()) <= set(STEPS) and len(set(steps.tolist())) > 1
    assert not back[3].any()


def test_planes_of_planes_are_the_same():
    weight = torch.randn(64, 80)
    scale, steps = choose_grid(weight)
    first = BitPlanes.of(weight, scale, steps)
    again = BitPlanes.of(first.weight(), scale, steps)
    assert torch.equal(first.whole, again.whole)
    halves = BitPlanes.of(weight.half(), scale, steps)  # the model in fp16: its weights, to its rounding
    assert (halves.weight() - weight).abs().max() <= 2**-10 * weight.abs().max()


def test_a_weight_is_a_number_of_each_plane():
    planes = planes_of(torch.randn(5, 64))
    upper, whole = planes.codes(), planes.whole.float()
    lower = whole - upper * planes.steps[:, None]
    assert planes.whole.dtype == torch.int16 and upper.abs().max() == 7 and -2048 <= lower.min() <= lower.max() <= 2047
    torch.testing.assert_close(planes.weight(), planes.scale[:, None] * whole, rtol=1e-6, atol=1e-7)


def test_rows_alone_are_rows_of_the_whole():
    planes = planes_of(torch.randn(9, 16))
    rows = torch.tensor([7, 0, 3])
    assert torch.equal(planes.weight(rows), planes.weight()[rows])
    assert torch.equal(planes.codes(rows), planes.codes()[rows])


def test_the_upper_plane_is_a_sketch():
    weight = torch.randn(200, 256)
    planes = planes_of(weight)
    error = (coarse(planes) - weight).square().mean().sqrt()
    assert error < 0.125  # in units of the weights' deviation; four bits over the whole range lose 0.14
    assert (planes.weight() - weight).abs().max() < 2e-3


def test_what_passes():
    fc1 = torch.nn.Linear(16, 6).double().float()
    scale, steps = choose_grid(fc1.weight.detach())
    stage2_threshold = torch.tensor([0.0, 0.0, 0.0, -1e30, 1e30, 0.3])
    second_stage = build_second_stage(fc1.weight, fc1.bias, scale, steps, stage2_threshold)
    x = torch.randn(2, 5, 16)
    scores = x @ coarse(second_stage.planes).T + fc1.bias
    expected = second_stage.passed(x)
    assert (second_stage.scores(x) - scores).abs().max() < 0.02 * scores.abs().max()
    assert torch.equal(expected[..., :3], second_stage.scores(x)[..., :3] > 0)
    assert expected[..., 3].all() and not expected[..., 4].any()
    rows = torch.tensor([5, 1])
    assert torch.equal(second_stage.passed(x, rows), expected[..., rows])


def test_sums_do_not_depend_on_their_order():
    weight = torch.randn(12, 4096)
    levels, unit = input_levels(torch.randn(3, 4096) * 5)
    assert torch.equal(levels, levels.round()) and levels.abs().max() == 127 and unit.shape == (3, 1)
    codes = planes_of(weight).codes()
    order = torch.randperm(4096)
    assert torch.equal(levels @ codes.T, levels[:, order] @ codes[:, order].T)
    assert torch.equal(levels @ codes.T, (levels.double() @ codes.double().T).float())
    assert not input_levels(torch.zeros(1, 8))[0].any()


def test_another_width_is_refused():
    with pytest.raises(UserError, match="multiple of 8, got 12"):
        planes_of(torch.randn(3, 12))
