"""The paired error of two scorings of the same rows."""

import math

import pytest
import torch

from benchmarks.cpu_extra import paired


def test_a_constant_difference_has_no_error_and_one_row_carries_its_share():
    rows = [torch.rand(n) for n in (5, 50, 20)]
    value, error = paired([row + 0.01 for row in rows], rows)
    assert value == pytest.approx(100 * math.expm1(0.01), rel=1e-4) and error < 1e-4
    value, error = paired([rows[0], rows[1] + 0.03, rows[2]], rows)
    mean = 0.03 * 50 / 75
    apart = math.sqrt((0.03 * 50 - mean * 50) ** 2 + (mean * 5) ** 2 + (mean * 20) ** 2) / 75
    assert value == pytest.approx(100 * math.expm1(mean), rel=1e-4) and error == pytest.approx(100 * apart, rel=1e-3)
