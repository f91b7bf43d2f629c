"""Two to eight inputs with 4-bit rows; what lies beyond a matrix or a batch is poisoned by NaN."""

import pytest
import torch
from int4_helpers import assert_rounded_products, random_rows, with_outliers

from kernels.common.int4 import Int4Rows
from kernels.dense.int4_batch import (
    int4_by_head,
    int4_by_head_reference,
    int4_linear,
    int4_linear_reference,
)


def inputs(device, batch, n):
    """(B, n) fp16 in front of rows that nothing may read."""
    whole = torch.full((batch + 9, n), float("nan"), dtype=torch.float16, device=device)
    whole[:batch] = with_outliers(torch.randn(batch, n, device=device)).half()
    return whole[:batch]


def magnitudes(weight):
    return Int4Rows(weight.words, weight.scales).dequantised(torch.float64).abs()


@pytest.mark.parametrize(("n", "d", "group", "batch"), [(40, 640, 128, 2), (16, 96, 32, 8), (37, 192, 64, 5)])
def test_int4_linear(device, n, d, group, batch):
    x, weight = inputs(device, batch, d), random_rows(device, n, d, group=group)
    bias, activation = (torch.randn(n, device=device).half(), "relu") if n % 2 else (None, "none")
    got = int4_linear(x, weight, bias, activation)
    want = int4_linear_reference(x.double(), weight, bias, activation)
    assert_rounded_products(got, want, x.double().abs() @ magnitudes(weight).T + 1)


@pytest.mark.parametrize(("n_heads", "d", "head_dim", "batch"), [(3, 40, 32, 2), (9, 17, 16, 8), (2, 24, 80, 3)])
def test_int4_by_head(device, n_heads, d, head_dim, batch):
    x = inputs(device, batch, n_heads * head_dim)
    weight = random_rows(device, n_heads, d, head_dim, group=head_dim)
    want = int4_by_head_reference(x.double(), weight)
    sums = torch.einsum("bhj,hij->bi", x.double().abs().view(batch, n_heads, head_dim), magnitudes(weight))
    assert_rounded_products(int4_by_head(x, weight), want, sums, 2**-10)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 7168, 9216])
def test_at_true_shapes(device, d):
    x, weight = inputs(device, 4, d), random_rows(device, d, d)
    want = int4_linear_reference(x.double(), weight, None, "none")
    assert_rounded_products(int4_linear(x, weight), want, x.double().abs() @ magnitudes(weight).T + 1)
    heads = random_rows(device, d // 128, d, 128, group=128)
    sums = torch.einsum("bhj,hij->bi", x.double().abs().view(4, -1, 128), magnitudes(heads))
    assert_rounded_products(int4_by_head(x, heads), int4_by_head_reference(x.double(), heads), sums, 2**-10)


def test_errors_name_what_does_not_fit(device):
    weight = random_rows(device, 32, 64, group=32)
    with pytest.raises(ValueError, match="9 inputs, expected at most 8"):
        int4_linear(torch.zeros(9, 64, device=device).half(), weight)
    with pytest.raises(ValueError, match="weight has 8 rows, expected at least 16"):
        int4_linear(torch.zeros(2, 64, device=device).half(), random_rows(device, 8, 64, group=32))
    with pytest.raises((ValueError, TypeError), match="x"):
        int4_linear(torch.zeros(2, 64, device=device), weight)
