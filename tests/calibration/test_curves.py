"""Curves: streamed counts equal direct ones, and hand-countable cases."""

import itertools

import pytest
import torch

from dejavu_train.calibration import curves as cal


def test_fp16_codes_are_ordered_and_invert():
    values = torch.tensor([-70000.0, -3.5, -1e-3, 0.0, 1e-3, 2.0, 70000.0])
    codes = cal.fp16_codes(values)
    assert (codes.diff() > 0).all()
    assert cal._fp16_value(int(codes[1])) == -3.5
    assert cal._fp16_value(int(codes[5])) == 2.0


def test_the_streamed_curve_equals_a_direct_count():
    torch.manual_seed(0)
    logits, active = torch.randn(400, 32).half().float(), torch.rand(400, 32) < 0.2
    contribution = torch.rand(400, 32) * active
    histogram = cal.LogitHistogram()
    for start in range(0, 400, 100):
        part = slice(start, start + 100)
        histogram.add(logits[part], active[part], contribution[part])
    curve = histogram.curve((0.05, 0.3, 1.0))
    for i, density in enumerate(curve["density"]):
        keep = logits > curve["threshold"][i]
        assert float(keep.float().mean()) == pytest.approx(density, abs=0.003)
        assert curve["recall"][i] == pytest.approx(float((keep & active).sum() / active.sum()))
        assert curve["precision"][i] == pytest.approx(float((keep & active).sum() / keep.sum()))
        assert curve["retained_mass"][i] == pytest.approx(
            float(contribution[keep].sum() / contribution.sum()), rel=1e-5
        )


def test_head_recall_counts_the_overlap_with_the_largest():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    contribution = torch.tensor([[4.0, 1.0, 3.0, 0.5]])
    curve = cal.head_curve(logits, contribution, (0.5, 1.0))
    assert curve["recall"] == [0.5, 1.0]  # selected 0 and 1; the two largest are 0 and 2
    assert curve["retained_mass"] == pytest.approx([5 / 8.5, 1.0])


def test_unions_of_a_batch():
    logits = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    assert cal.union_densities(logits, [0.0], 1) == [0.25]
    assert cal.union_densities(logits, [0.0], 4) == [1.0]


def test_losses_between_measured_densities():
    grid = [0.01, 0.1, 0.2, 0.4, 0.7, 1.0]
    losses = cal.spread_loss([0.1, 0.4], [0.4, 0.1], grid)
    assert losses[1] == pytest.approx(0.4) and losses[3] == pytest.approx(0.1)
    assert losses[2] == pytest.approx(0.2) and losses[0] == pytest.approx(4.0)
    assert losses[4] == pytest.approx(0.05) and losses[5] == 0.0
    assert all(a >= b for a, b in itertools.pairwise(losses))


def test_a_loss_of_nearly_nothing_is_not_extrapolated_without_bounds():
    losses = cal.spread_loss([0.25, 0.5], [1e-2, 1e-8], [0.025, 0.25, 1.0])
    assert losses[0] == pytest.approx(1e-2 * 1e3)
