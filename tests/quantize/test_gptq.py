"""GPTQ against a plain loop that inverts the second moments anew for every column, on each of the three grids."""

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.gptq import InputGroups, OutputGroups, inverse_factor, quantise_columns
from dejavu_train.quantize.layer import Moments
from dejavu_train.quantize.rounding import best_scales, group_scales, round_nearest, round_to

GROUP = 32
DAMPING = QuantizeConfig(damp_mean=0.01)


def problem(n=64, m=96, tokens=1500, dead=None):
    generator = torch.Generator().manual_seed(0)
    mixed = torch.eye(m) + 0.3 * torch.randn(m, m, generator=generator)
    inputs = torch.randn(tokens, m, generator=generator) @ mixed
    if dead is not None:
        inputs[:, dead] = 0
    return torch.randn(n, m, generator=generator), inputs


def damped(hessian):
    hessian = hessian.double().clone()
    return hessian + DAMPING.damp_mean * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def plain(weight, hessian, scales_of):
    """The columns of weight one by one. scales_of(weights as they are, index) gives (n,) or (1,)."""
    hessian = damped(hessian)
    weight, codes = weight.double().clone(), torch.zeros(weight.shape)
    for i in range(weight.shape[1]):
        inverse = torch.linalg.inv(hessian[i:, i:])
        scales = scales_of(weight.float(), i).double()
        codes[:, i] = (weight[:, i] / scales).round().clamp(-8, 7)
        error = (weight[:, i] - codes[:, i] * scales) / inverse[0, 0]
        weight[:, i:] -= error[:, None] * inverse[0]
    return codes


def output_error(weight, made, inputs):
    return float((inputs @ (weight - made).T).square().sum())


def test_the_factor_is_that_of_the_inverse():
    _, inputs = problem()
    hessian = inputs.T @ inputs
    factor = inverse_factor(hessian.clone(), DAMPING)
    assert not factor.tril(-1).any()
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped(hessian)).float(), rtol=1e-2, atol=1e-6)


def agree(found, expected):
    """Nearly all codes: sums in another order put a few weights on the other side of a half."""
    assert (found.float() != expected).float().mean() < 0.01


def test_groups_of_inputs():
    weight, inputs = problem()
    grid = InputGroups(*weight.shape, GROUP)
    codes = quantise_columns(weight.clone(), inputs.T @ inputs, grid, DAMPING)
    kept = {}

    def scales_of(now, index):
        start = index // GROUP * GROUP
        if index == start:
            group = slice(start, start + GROUP)
            kept[start] = group_scales(now[:, group].contiguous(), GROUP)[:, 0]
        return kept[start]

    agree(codes, plain(weight, inputs.T @ inputs, scales_of))
    made = codes * grid.scales.repeat_interleave(GROUP, 1)
    nearest, scales = round_nearest(weight, GROUP)
    assert output_error(weight, made, inputs) < 0.75 * output_error(
        weight, nearest * scales.float().repeat_interleave(GROUP, 1), inputs
    )


def test_groups_of_outputs_choose_a_columns_grid_when_it_is_reached():
    weight, inputs = problem()
    grid = OutputGroups(*weight.shape, GROUP)
    codes = quantise_columns(weight.clone(), inputs.T @ inputs, grid, DAMPING)

    def scales_of(now, index):
        return best_scales(now[:, index].reshape(-1, GROUP))[:, 0].repeat_interleave(GROUP)

    agree(codes, plain(weight, inputs.T @ inputs, scales_of))
    made = codes * grid.scales.repeat_interleave(GROUP, 1).T
    nearest, scales = round_nearest(weight.T.contiguous(), GROUP)
    rounded = (nearest * scales.float().repeat_interleave(GROUP, 1)).T
    assert output_error(weight, made, inputs) < 0.75 * output_error(weight, rounded, inputs)


def test_inputs_that_never_came_keep_the_nearest_codes():
    dead = [3, 40, 95]
    weight, inputs = problem(dead=dead)
    grid = OutputGroups(*weight.shape, GROUP)
    codes = quantise_columns(weight.clone(), inputs.T @ inputs, grid, DAMPING)
    nearest, scales = round_nearest(weight.T.contiguous(), GROUP)
    torch.testing.assert_close(codes[:, dead], nearest.T[:, dead], rtol=0, atol=0)
    torch.testing.assert_close(grid.scales[dead], scales.float()[dead], rtol=0, atol=0)
    assert codes[:, dead].any() and not torch.equal(codes, nearest.T)


def test_codes_and_scales_are_what_4_bits_hold():
    weight, inputs = problem()
    grid = InputGroups(*weight.shape, GROUP)
    codes = quantise_columns(weight.clone(), inputs.T @ inputs, grid, DAMPING)
    assert codes.dtype == torch.int8 and codes.min() >= -8 and codes.max() <= 7
    torch.testing.assert_close(grid.scales.half().float(), grid.scales, rtol=0, atol=0)
    assert round_to(torch.tensor([1e9]), torch.tensor([1.0])) == 7


def test_moments_that_cannot_be_factorised_are_one_line():
    with pytest.raises(UserError, match="damp_mean"):
        inverse_factor(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), QuantizeConfig(damp_mean=0))


def test_moments_of_inputs_far_from_zero():
    """Where means are many times the deviations, second moments of many tokens are those of float64."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.eye(24) + 0.3 * torch.randn(24, 24, generator=generator)
    means = 200 * torch.randn(24, generator=generator)
    moments, every = Moments(), []
    for _ in range(40):
        inputs = 0.1 * torch.randn(8, 250, 24, generator=generator) @ mixed + means
        inputs[..., 5] = 0
        moments.add(inputs, torch.ones(8, 250, dtype=torch.bool))
        every.append(inputs.flatten(0, 1).double())
    rows = torch.cat(every)
    centred = moments.centred()
    expected = (rows - rows.mean(0)).T @ (rows - rows.mean(0))
    expected.diagonal().clamp_(min=1e-6 * rows.square().sum(0))
    torch.testing.assert_close(centred.double(), expected, rtol=1e-3, atol=0.5)
    torch.testing.assert_close(moments.products().double(), rows.T @ rows, rtol=1e-5, atol=1.0)
    torch.testing.assert_close(moments.mean.double(), rows.mean(0), rtol=1e-5, atol=1e-5)
    assert not centred[5].any() and not moments.products()[5].any()
    inverse_factor(centred, DAMPING)
