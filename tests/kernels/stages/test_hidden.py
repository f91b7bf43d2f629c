"""Hidden values in front of down: every activation and gate, of one row and of several, against float64."""

import pytest
import torch
from int4_helpers import random_rows

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.dense.dense_batch import dense_add, hidden_products
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
from dejavu_train.kernels.mlp.int4_fc2 import int4_fc2
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.hidden import hidden_row, hidden_tokens, kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference

CASES = [
    (False, Hidden("relu", 0.5)), (False, Hidden("relu2")), (False, Hidden("gelu")), (True, Hidden("silu")),
    (True, Hidden("relu", both=True)), (True, Hidden("relu2")),
]  # fmt: skip


def problem(device, packed, n, d, gated, hidden, dtype=torch.float16, size=1.0, group=64):
    torch.manual_seed(n)

    def linear(scale, n_biases):
        bias, scale = torch.randn(n_biases, device=device).to(dtype), scale * d**-0.5
        if packed:
            return Linear(random_rows(device, n, d, group=group, size=0.3 * scale), bias)
        return Linear.of((torch.randn(n, d, device=device) * scale).to(dtype), bias)

    return MlpWeights(linear(size, n), linear(1 / size, d), linear(1.0, n) if gated else None, hidden)


def check(y, n, weights, mask=None, share=2e-3):
    want = hidden_reference(n.double(), weights)
    if mask is not None:
        want = torch.where(mask, want, 0.0)
    torch.testing.assert_close(y.double() / kept_unit(weights, y.dtype), want, atol=share * 5, rtol=share)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("gated", "hidden"), CASES, ids=str)
def test_one_row(device, packed, gated, hidden):
    weights, x = problem(device, packed, 30, 128, gated, hidden), torch.randn(1, 128, device=device) + 1
    ln = LayerNormWeights(torch.rand(128, device=device) + 0.5, None, kind=NormKind.RMS_NORM)
    out = torch.full((1, 30), float("nan"), device=device)
    hidden_row(x, ln, weights, out)
    check(out, layer_norm_reference(x.double(), ln, torch.float16), weights)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("gated", "hidden"), CASES, ids=str)
def test_several_rows_of_four_bits(device, listed, gated, hidden):
    weights = problem(device, True, 40, 128, gated, hidden)
    x, mask = torch.randn(3, 128, device=device).half(), torch.rand(3, 40, device=device) < 0.4
    given = None
    if listed:
        selection, rows = Selection.from_mask(mask), PackedSelection.empty(40, device)
        pack(selection, rows)
        given = rows, selection.row_bits
        for linear in (weights.up, weights.gate):
            if linear is not None:
                linear.weight.scales[~mask.any(0)] = float("nan")
    y = hidden_tokens(x, weights, given)
    for linear in (weights.up, weights.gate):
        if linear is not None:
            linear.weight.scales.nan_to_num_(0.0)
    check(y, x, weights, mask if listed else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("gated", "hidden"), CASES, ids=str)
def test_products_of_several_rows(device, dtype, gated, hidden):
    weights = problem(device, False, 30, 96, gated, hidden, dtype)
    x, ln = torch.randn(9, 96, device=device), LayerNormWeights(torch.ones(96, device=device), None)
    y = hidden_products(x, ln, weights)
    assert y.dtype == dtype
    check(y, layer_norm_reference(x.double(), ln, dtype), weights, share=5e-3)


@pytest.mark.parametrize(("packed", "rows", "size"), [(True, 1, 20.0), (True, 3, 20.0), (False, 9, 150.0)])
def test_squares_of_large_values_through_down(device, packed, rows, size):
    """From 256 on the square of a value is no fp16 number."""
    weights = problem(device, packed, 40, 256, False, Hidden("relu2"), size=size, group=128)
    x, ln = torch.randn(rows, 256, device=device), LayerNormWeights(torch.ones(256, device=device), None)
    out, residual = torch.full((rows, 256), float("nan"), device=device), torch.randn(rows, 256, device=device)
    if rows == 1:
        h = torch.empty(1, 40, device=device)
        hidden_row(x, ln, weights, h)
    else:
        h = hidden_products(x, ln, weights)
    unit, down = kept_unit(weights, h.dtype), weights.down
    if packed:
        int4_fc2(h, down.weight, down.bias, residual, out, unit=unit)
    else:
        dense_add(h, down.weight, down.bias, residual, out, transposed=True, unit=unit)
    n = layer_norm_reference(x.double(), ln, torch.float16).double()
    want = hidden_reference(n, weights) @ down.weight.dense(torch.float64) + down.bias.double() + residual
    sums = hidden_reference(n, weights).abs() @ down.weight.dense(torch.float64).abs()
    assert ((out - want).abs() <= 4e-3 * (sums + 1)).all()
    assert 65504 < float(hidden_reference(n, weights).max()) < 65504 / unit
