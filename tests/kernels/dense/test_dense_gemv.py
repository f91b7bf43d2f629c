"""The dense row kernels against their plain-torch references, with poisoned outputs."""

import pytest
import torch
from mlp_helpers import norm

from dejavu_train.kernels.dense.dense_rows import (
    WideSettings,
    dense_rows,
    dense_rows_reference,
    dense_wide,
    dense_wide_reference,
)
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.rows import RowSettings

NAN = float("nan")


@pytest.mark.parametrize(
    ("n", "d", "rows", "activation", "bias"),
    [(7, 48, 1, "relu", True), (9, 40, 2, "none", False), (5, 64, 4, "relu", True)],
)
def test_dense_rows(device, n, d, rows, activation, bias):
    x, ln, weight = torch.randn(1, d, device=device) * 2 + 1, norm(d, device), torch.randn(n, d, device=device)
    b = torch.randn(n, device=device) if bias else None
    got, expected = torch.full((1, n), NAN, device=device), torch.empty(1, n, device=device)
    with RowSettings(1, rows, 4).in_use():
        dense_rows(x, ln, Rows(weight), b, activation, got)
    dense_rows_reference(x, ln, Rows(weight), b, activation, expected)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("d", "n", "vector"), [(5, 40, 8), (17, 2100, 8), (5, 300, 1)])
def test_dense_wide(device, d, n, vector):
    y, residual = torch.randn(1, n, device=device), torch.randn(1, d, device=device)
    weight, bias = torch.randn(d, n, device=device), torch.randn(d, device=device)
    out, expected = torch.full((1, d), NAN, device=device), torch.empty(1, d, device=device)
    with WideSettings(4, 512, 4, vector).in_use():
        dense_wide(y, Rows(weight), bias, residual, out)
    dense_wide_reference(y, Rows(weight), bias, residual, expected)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 5120, 7168, 9216])
def test_dense_rows_at_true_shapes(device, d):
    n = 3001
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    weight, bias = (torch.randn(n, d, device=device) / d**0.5).half(), torch.randn(n, device=device).half()
    got, expected = torch.full((1, n), NAN, device=device), torch.empty(1, n, device=device)
    dense_rows(x, ln, Rows(weight), bias, "relu", got, pdl=True)
    dense_rows_reference(x, ln, Rows(weight), bias, "relu", expected)
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
