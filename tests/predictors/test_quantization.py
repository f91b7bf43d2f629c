"""Rounded weights: packed and back, scales that fit, and gradients that pass."""

import pytest
import torch

from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import (
    as_trained,
    int4_rows,
    pack_nibbles,
    row_codes,
    stored_rows,
    unpack_nibbles,
)


@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_nibbles_come_back(columns):
    codes = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.shape == (5, (columns + 1) // 2) and packed.dtype == torch.uint8
    torch.testing.assert_close(unpack_nibbles(packed, columns), codes, rtol=0, atol=0)
    half = (columns + 1) // 2
    torch.testing.assert_close((packed & 15).short() - 8, codes[:, :half].short(), rtol=0, atol=0)  # as kernels read it


def test_int4_scales_have_less_error_than_the_whole_range():
    weight = torch.randn(40, 96)
    weight[3] = 0
    codes, scale = int4_rows(weight)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 7 and scale.dtype == torch.float16
    assert not codes[3].any() and torch.isfinite(scale).all()
    error = (codes * scale.float()[:, None] - weight).square().sum(1)
    step = weight.abs().amax(1, keepdim=True).clamp_min(1e-5) / 7
    whole = ((weight / step).round() * step - weight).square().sum(1)
    assert (error <= whole * 1.01 + 1e-9).all() and error.sum() < 0.95 * whole.sum()


def test_tiny_weights_keep_a_finite_scale():
    codes, scale = int4_rows(torch.full((2, 4), 1e-9))
    assert torch.isfinite(codes * scale.float()[:, None]).all() and (scale > 0).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_training_sees_what_is_stored(dtype):
    predictor = LowRankPredictor(12, 5, 20)
    exact = predictor(torch.ones(1, 12))
    predictor.rounded_to = dtype
    x = torch.randn(6, 12)
    stored = {name: stored_rows(getattr(predictor, name).detach(), dtype) for name in ("down", "up")}
    down, up = (row_codes(codes, getattr(predictor, name).shape[1]) * scale.float()[:, None]
                for name, (codes, scale) in stored.items())  # fmt: skip
    torch.testing.assert_close(predictor(x), x @ down.T @ up.T + predictor.bias, rtol=1e-5, atol=1e-5)
    assert not torch.equal(predictor(torch.ones(1, 12)), exact)
    predictor(x).sum().backward()
    assert predictor.down.grad.abs().sum() > 0 and predictor.up.grad.abs().sum() > 0


def test_gradients_pass_as_if_nothing_was_rounded():
    weight = torch.randn(3, 8, requires_grad=True)
    as_trained(weight, "int4").backward(factor := torch.randn(3, 8))
    torch.testing.assert_close(weight.grad, factor)
