"""fc2 over all neurons with 4-bit weights, two to eight tokens, against float64."""

import pytest
import torch
from int4_helpers import random_rows, with_outliers

from kernels.mlp.int4_fc2 import int4_fc2_reference
from kernels.mlp.int4_fc2_batch import Int4Fc2BatchSettings, int4_fc2_batch, takes
from kernels.mlp.sparse_fc2 import partial_sums

NAN = float("nan")


def check(device, n, d, group, batch, pdl=False, settings=None):
    torch.manual_seed(n + d)
    weight = random_rows(device, n, d, group=group, size=n**-0.5)
    h = with_outliers(torch.randn(batch, n, device=device)).abs() * (torch.rand(batch, n, device=device) < 0.6)
    h = torch.cat((h.half(), torch.full_like(h, NAN).half()))[:batch]  # behind it, what nothing may read
    bias, residual = torch.randn(d, device=device), torch.randn(batch, d, device=device)
    out, partials = torch.full((batch, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    int4_fc2_batch(h, weight, bias, residual, out, partials, pdl, settings)
    want = torch.empty(batch, d, dtype=torch.float64, device=device)
    int4_fc2_reference(h.double(), weight, bias, residual, want)
    size = h.double() @ weight.dequantised(torch.float64).abs() + bias.abs() + residual.abs()
    assert ((out - want).abs() <= 2**-10 * size).all()  # h * scale is rounded to fp16, products are exact
    return out


@pytest.mark.parametrize(
    ("n", "d", "group", "batch", "settings"),
    [
        (70, 256, 128, 2, None),
        (130, 640, 64, 2, Int4Fc2BatchSettings(4, 4, 2, 128)),  # a program's columns beyond the row's end
        (38, 512, 128, 7, None),
    ],
)
def test_int4_fc2_batch(device, n, d, group, batch, settings):
    check(device, n, d, group, batch, settings=settings)


def test_a_nan_stays_in_its_row(device):
    weight = random_rows(device, 64, 256, group=128)
    h, zero = torch.zeros(2, 64, device=device).half(), torch.zeros(2, 256, device=device)
    h[1, 50] = NAN
    out = torch.empty(2, 256, device=device)
    int4_fc2_batch(h, weight, zero[0], zero, out)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_what_does_not_fit_is_refused(device):
    odd, narrow = random_rows(device, 33, 256, group=128), random_rows(device, 32, 256, group=64)
    assert not takes(odd, 2)
    assert takes(narrow, 2) and not takes(narrow, 3) and not takes(narrow, 1)
    assert not takes(random_rows(device, 32, 256, group=128), 9)
    assert not takes(random_rows(device, 32, 128, group=128), 2)
    h, zero = torch.zeros(9, 32, device=device), torch.zeros(9, 256, device=device)
    for batch in (1, 9):
        with pytest.raises(ValueError, match=f"{batch} tokens, expected 2 to 8"):
            int4_fc2_batch(h[:batch].half(), narrow, zero[0], zero[:batch], zero[:batch].clone())
    with pytest.raises(ValueError, match="groups of 64 of 256 columns: an even number of neurons is expected"):
        int4_fc2_batch(h[:3].half(), narrow, zero[0], zero[:3], zero[:3].clone())
    with pytest.raises(ValueError, match="h: expected float16, got float32"):
        int4_fc2_batch(h[:2], narrow, zero[0], zero[:2], zero[:2].clone())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 7168, 9216, 12288])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_at_true_shapes(d, batch):
    plain, dependent = (check("cuda", 4 * d, d, 128, batch, pdl) for pdl in (False, True))
    torch.testing.assert_close(plain, dependent, atol=0, rtol=0)
