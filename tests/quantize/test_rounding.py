"""The best scale of a group is found, of either sign, and is a number of fp16."""

import torch

from dejavu_train.quantize.rounding import RANGES, best_scales, round_nearest, round_to


def test_the_scale_is_the_best_of_those_tried():
    groups = torch.randn(7, 32)
    found = best_scales(groups)
    for row, scale in zip(groups, found, strict=True):
        errors = {}
        for factor in (sign * share / 8 for share in RANGES for sign in (1, -1)):
            tried = (row.abs().max() * factor).half().float()
            errors[float(tried)] = float(((row / tried).round().clamp(-8, 7) * tried - row).square().sum())
        assert errors[float(scale)] <= min(errors.values()) * (1 + 1e-5)


def test_a_larger_positive_extreme_gets_a_negative_scale():
    groups = torch.tensor([[8.0, -1.0, 3.0, 5.0], [-8.0, 1.0, -3.0, -5.0]])
    scales = best_scales(groups)
    assert scales[0] < 0 < scales[1]
    torch.testing.assert_close(round_to(groups, scales) * scales, groups, rtol=0, atol=0)


def test_zeros_and_tiny_weights_come_back_finite():
    rows = torch.zeros(3, 64)
    rows[1], rows[2, 5] = 1e-9, 60000.0
    codes, scales = round_nearest(rows, 32)
    made = codes.view(3, 2, 32) * scales.float()[..., None]
    assert torch.isfinite(made).all() and not made[0].any() and (scales != 0).all()
    torch.testing.assert_close(made.flatten(1)[2, 5], torch.tensor(60000.0), rtol=0.07, atol=0)
