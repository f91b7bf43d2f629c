"""fc1 and fc2 over a packed list as two kernels with 4-bit weights, each against float64."""

import pytest
import torch
from int4_helpers import random_rows, with_outliers

from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.dense.dense_gemv import Int4RowSettings
from kernels.mlp.int4_fc1 import int4_fc1_list, int4_fc1_list_reference
from kernels.mlp.int4_fc2 import Int4Fc2Settings, int4_fc2_list, int4_fc2_list_reference
from kernels.mlp.sparse_fc2 import PackedSelection, partial_sums

NAN = float("nan")


def listed(device, n, count):
    """A list of `count` rows in an order of its own, behind it old entries."""
    rows = PackedSelection.empty(n, device)
    rows.ids.copy_(torch.randperm(n, device=device))
    rows.values.fill_(NAN)
    rows.count.fill_(count)
    return rows, rows.ids[:count].long()


def check_fc1(device, n, d, group, count, norm, early=False, pdl=False, settings=None):
    torch.manual_seed(n + d + count)
    weight, bias = random_rows(device, n, d, group=group, size=0.05), torch.randn(n, device=device)
    rows, ids = listed(device, n, count)
    x, ln = with_outliers(torch.randn(1, d, device=device)), None
    if norm:
        ln = LayerNormWeights(torch.randn(d, device=device).half(), torch.randn(d, device=device).half())
    else:
        x = x.half()
    int4_fc1_list(x, ln, weight, bias, rows, early, pdl, settings)
    got = rows.values.clone()
    int4_fc1_list_reference(x if norm else x.double(), ln, weight, bias, rows)
    # Products are exact; LayerNorm in fp32 and in fp64 may round to neighbouring fp16 numbers.
    given = x.double() if ln is None else layer_norm_reference(x, ln, torch.float16).double()
    size = (given.abs() @ weight.dequantised(torch.float64).abs().T)[0, ids] + 1
    assert ((got[:count] - rows.values[:count]).abs() <= 2**-11 * size).all()
    assert got[count:].isnan().all()
    return got[:count]


@pytest.mark.parametrize(
    ("n", "d", "group", "count", "norm"), [(40, 128, 128, 21, True), (40, 192, 64, 0, True), (33, 96, 32, 33, False)]
)
def test_fc1_of_a_list(device, n, d, group, count, norm):
    check_fc1(device, n, d, group, count, norm, early=not norm, settings=Int4RowSettings(1, 2, 2))


def test_fc1_keeps_a_nan(device):
    rows, _ = listed(device, 20, 3)
    weight, zero = random_rows(device, 20, 64, group=32), torch.zeros(20, device=device)
    int4_fc1_list(torch.full((1, 64), NAN, device=device).half(), None, weight, zero, rows)
    assert rows.values[:3].isnan().all()
    with pytest.raises(ValueError, match="x: expected float16, got float32"):
        int4_fc1_list(torch.zeros(1, 64, device=device), None, weight, zero, rows)


def check_fc2(device, n, d, group, count, live, pdl=False, settings=None):
    torch.manual_seed(n + d + count)
    weight = random_rows(device, n, d, group=group, size=0.02)  # |h * scale| stays below 127
    rows, ids = listed(device, n, count)
    values = with_outliers(torch.randn(1, max(1, count), device=device))[0, :count].abs()
    rows.values[:count] = values * (torch.rand(count, device=device) < live)
    bias, residual = torch.randn(d, device=device), torch.randn(1, d, device=device)
    out, partials = torch.full((1, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    unread = torch.ones(n, dtype=torch.bool, device=device)
    unread[ids] = False
    scales = weight.scales.clone()
    weight.scales[unread] = NAN
    int4_fc2_list(rows, weight, bias, residual, out, partials, pdl, settings)
    weight.scales.copy_(scales)
    h, want = rows.to_dense().double(), torch.empty(1, d, dtype=torch.float64, device=device)
    int4_fc2_list_reference(rows, weight, bias.double(), residual.double(), want)
    size = h @ weight.dequantised(torch.float64).abs() + bias.abs() + residual.abs()
    assert ((out - want).abs() <= 2**-9 * size).all()  # h * scale and each product are rounded to fp16
    return out


@pytest.mark.parametrize(
    ("n", "d", "group", "count", "live", "settings"),
    [
        (70, 256, 128, 37, 0.6, None),
        (40, 192, 32, 0, 1.0, None),
        (80, 1088, 32, 80, 0.6, Int4Fc2Settings(2, 2, 4, 16)),
    ],
)
def test_fc2_of_a_list(device, n, d, group, count, live, settings):
    check_fc2(device, n, d, group, count, live, settings=settings)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 7168, 9216, 12288])
def test_at_true_shapes(d):
    for count in (d // 3 + 5, 4 * d):
        for norm in (False, True):
            plain, dependent = (check_fc1("cuda", 4 * d, d, 128, count, norm, norm, pdl) for pdl in (False, True))
            torch.testing.assert_close(plain, dependent, atol=0, rtol=0)
        plain, dependent = (check_fc2("cuda", 4 * d, d, 128, count, 0.6, pdl) for pdl in (False, True))
        torch.testing.assert_close(plain, dependent, atol=0, rtol=0)
