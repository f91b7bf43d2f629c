"""fc2 over all neurons with 4-bit weights, one to eight tokens, against float64."""

import pytest
import torch
from int4_helpers import random_rows, with_outliers

from kernels.mlp.int4_fc2_batch import Int4Fc2BatchSettings, int4_fc2_batch, int4_fc2_batch_reference, takes
from kernels.mlp.sparse_fc2 import partial_sums

NAN = float("nan")


def check(device, n, d, group, live, pdl=False, settings=None, batch=1):
    torch.manual_seed(n + d)
    weight = random_rows(device, n, d, group=group, size=n**-0.5)
    h = with_outliers(torch.randn(batch, n, device=device)).abs() * (torch.rand(batch, n, device=device) < live)
    if batch > 1:  # fp16 in front of rows that nothing may read
        h = torch.cat((h.half(), torch.full_like(h, NAN).half()))[:batch]
    bias, residual = torch.randn(d, device=device), torch.randn(batch, d, device=device)
    out, partials = torch.full((batch, d), NAN, device=device), partial_sums(d, device).fill_(NAN)
    int4_fc2_batch(h, weight, bias, residual, out, partials, pdl, settings)
    want = torch.empty(batch, d, dtype=torch.float64, device=device)
    int4_fc2_batch_reference(h.double(), weight, bias, residual, want)
    size = h.double() @ weight.dequantised(torch.float64).abs() + bias.abs() + residual.abs()
    assert ((out - want).abs() <= 2**-10 * size).all()  # h * scale is rounded to fp16, products are exact
    return out


@pytest.mark.parametrize(
    ("n", "d", "group", "live", "settings"),
    [(70, 256, 128, 0.6, None), (129, 192, 32, 0.0, None), (200, 576, 32, 1.0, Int4Fc2BatchSettings(2, 4, 6, 128))],
)
def test_int4_fc2_batch(device, n, d, group, live, settings):
    check(device, n, d, group, live, settings=settings)


@pytest.mark.parametrize(
    ("n", "d", "group", "batch", "settings"),
    [(70, 256, 128, 2, None), (200, 384, 64, 2, Int4Fc2BatchSettings(1, 4, 2, 168)), (38, 512, 128, 7, None)],
)
def test_several_tokens(device, n, d, group, batch, settings):
    check(device, n, d, group, 0.6, batch=batch, settings=settings)


def test_rows_of_zero_are_not_read(device):
    weight = random_rows(device, 100, 128, group=64)
    weight.scales[70] = NAN  # not among the rows on their way before h is known
    h, zero = torch.ones(1, 100, device=device), torch.zeros(1, 128, device=device)
    out = torch.empty(1, 128, device=device)
    for value, whole in ((0.0, True), (1.0, False)):
        h[0, 70] = value
        int4_fc2_batch(h, weight, zero[0], zero, out, settings=Int4Fc2BatchSettings(1, 2, 1, 128))
        assert bool(out.isfinite().all()) == whole


def test_a_nan_stays(device):
    weight = random_rows(device, 64, 128, group=64)
    h, zero = torch.zeros(1, 64, device=device), torch.zeros(1, 128, device=device)
    h[0, 50] = NAN
    out = torch.empty(1, 128, device=device)
    int4_fc2_batch(h, weight, zero[0], zero, out)
    assert out.isnan().all()


def test_groups_that_do_not_fit_are_refused(device):
    for d, group in ((128, 128), (160, 32)):
        weight = random_rows(device, 64, d, group=group)
        assert not takes(weight)
        zero = torch.zeros(1, d, device=device)
        with pytest.raises(ValueError, match=f"groups of {group} of {d} columns"):
            int4_fc2_batch(torch.zeros(1, 64, device=device), weight, zero[0], zero, zero.clone())


def test_what_several_tokens_need(device):
    odd, narrow = random_rows(device, 33, 256, group=128), random_rows(device, 32, 256, group=64)
    assert takes(odd) and not takes(odd, 2)
    assert takes(narrow, 2) and not takes(narrow, 3)
    assert not takes(random_rows(device, 32, 256, group=128), 9)
    h, zero = torch.zeros(9, 32, device=device), torch.zeros(9, 256, device=device)
    with pytest.raises(ValueError, match="9 tokens, expected at most 8"):
        int4_fc2_batch(h.half(), narrow, zero[0], zero, zero.clone())
    with pytest.raises(ValueError, match="h: expected float16, got float32"):
        int4_fc2_batch(h[:2], narrow, zero[0], zero[:2], zero[:2].clone())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [768, 2048, 2560, 4096, 7168, 9216, 12288])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_at_true_shapes(d, batch):
    plain, dependent = (check("cuda", 4 * d, d, 128, 0.6, pdl, batch=batch) for pdl in (False, True))
    torch.testing.assert_close(plain, dependent, atol=0, rtol=0)
