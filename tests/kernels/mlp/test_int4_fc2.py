"""fc2 of a dense step with 4-bit weights against float64."""

import pytest
import torch
from int4_helpers import random_rows, with_outliers

from kernels.mlp.int4_fc2 import Int4Fc2Settings, int4_fc2, int4_fc2_reference, takes
from kernels.mlp.sparse_fc2 import partial_sums

NAN = float("nan")


def check(device, n, d, group, live, pdl=False, settings=None):
    torch.manual_seed(n + d)
    weight = random_rows(device, n, d, group=group, size=n**-0.5)
    h = with_outliers(torch.randn(1, n, device=device)).abs() * (torch.rand(1, n, device=device) < live)
    bias, residual = torch.randn(d, device=device), torch.randn(1, d, device=device)
    out, partials = torch.full((1, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    int4_fc2(h, weight, bias, residual, out, partials, pdl, settings)
    want = torch.empty(1, d, dtype=torch.float64, device=device)
    int4_fc2_reference(h.double(), weight, bias, residual, want)
    size = h.double() @ weight.dequantised(torch.float64).abs() + bias.abs() + residual.abs()
    assert ((out - want).abs() <= 2**-9 * size).all()  # h * scale and each product are rounded to fp16
    return out


@pytest.mark.parametrize(
    ("n", "d", "group", "live", "settings"),
    [
        (70, 256, 128, 0.6, None),
        (129, 192, 32, 0.0, None),
        (100, 1088, 32, 1.0, Int4Fc2Settings(2, 4, 4)),
        (203, 128, 32, 0.7, Int4Fc2Settings(1, 3, 2)),  # four rounds of a list
    ],
)
def test_int4_fc2(device, n, d, group, live, settings):
    check(device, n, d, group, live, settings=settings)


def test_rows_of_zero_are_not_read(device):
    weight = random_rows(device, 24, 128, group=64)
    weight.scales[11] = NAN  # of a program's six rows the first four are read before h is known
    h, zero = torch.ones(1, 24, device=device), torch.zeros(1, 128, device=device)
    out = torch.empty(1, 128, device=device)
    for value, whole in ((0.0, True), (1.0, False)):
        h[0, 11] = value
        int4_fc2(h, weight, zero[0], zero, out, settings=Int4Fc2Settings(1, 2, 4))
        assert bool(out.isfinite().all()) == whole


def test_a_nan_stays(device):
    weight = random_rows(device, 64, 128, group=64)
    h, zero = torch.zeros(1, 64, device=device), torch.zeros(1, 128, device=device)
    h[0, 50] = NAN
    out = torch.empty(1, 128, device=device)
    int4_fc2(h, weight, zero[0], zero, out)
    assert out.isnan().all()


def test_groups_that_do_not_fit_are_refused(device):
    for d, group in ((128, 128), (160, 32)):
        weight = random_rows(device, 64, d, group=group)
        assert not takes(weight)
        zero = torch.zeros(1, d, device=device)
        with pytest.raises(ValueError, match=f"groups of {group} of {d} columns"):
            int4_fc2(torch.zeros(1, 64, device=device), weight, zero[0], zero, zero.clone())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 7168, 9216, 12288])
def test_at_true_shapes(d):
    torch.testing.assert_close(
        check("cuda", 4 * d, d, 128, 0.6), check("cuda", 4 * d, d, 128, 0.6, pdl=True), atol=0, rtol=0
    )
