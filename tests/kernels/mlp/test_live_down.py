"""The map out of the neurons over those that are not zero, one to eight tokens, against float64 and itself."""

from contextlib import nullcontext

import pytest
import torch

from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.mlp import live_down as module
from dejavu_train.kernels.mlp.live_down import LiveDownSettings, live_down, live_down_reference

NAN = float("nan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(device, n, d, batch, live, dtype):
    torch.manual_seed(n + d)
    h = (torch.randn(batch, n, device=device) * (torch.rand(batch, n, device=device) < live)).to(dtype)
    weight = Rows((torch.randn(n, d, device=device) * n**-0.5).to(dtype))
    return h, weight, torch.randn(d, device=device).to(dtype), torch.randn(batch, d, device=device)


def run(h, weight, bias, residual, **options):
    out = torch.full_like(residual, NAN)
    live_down(h, weight, bias, residual, out, partial_sums(out.shape[1], out.device).fill_(NAN), **options)
    return out


def check(device, n, d, batch, live, dtype=torch.float32, **options):
    h, weight, bias, residual = problem(device, n, d, batch, live, dtype)
    want = torch.empty(batch, d, dtype=torch.float64, device=device)
    live_down_reference(h, weight, bias, residual, want)
    out = run(h, weight, bias, residual, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(out, run(h, weight, bias, residual, every=True, **options))  # what is left out is zero
    return out


@pytest.mark.parametrize(
    ("n", "d", "batch", "live", "settings"),
    [
        (71, 256, 1, 0.1, None),
        (129, 96, 1, 0.0, None),
        (40, 100, 1, 1.0, LiveDownSettings(64, 4, 2, 1)),
        (300, 128, 2, 0.06, LiveDownSettings(128, 2, 1, 1)),
        (131, 80, 3, 0.3, None),
        (67, 64, 5, 0.05, LiveDownSettings(16, 8, 1, 2)),
        (38, 48, 8, 0.5, LiveDownSettings(64, 16, 1, 1)),
    ],
)
def test_live_down(device, n, d, batch, live, settings, monkeypatch):
    monkeypatch.setattr(module, "n_sms", lambda _: 1)  # ranges of more neurons than a step has rows
    with nullcontext() if settings is None else settings.in_use():
        check(device, n, d, batch, live)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(device, dtype):
    check(device, 90, 96, 1, 0.1, dtype)
    check(device, 90, 96, 4, 0.1, dtype)


def test_a_token_has_the_same_bits_whatever_its_neighbours_are(device):
    h, weight, bias, residual = problem(device, 150, 96, 8, 0.1, torch.float32)
    whole = run(h, weight, bias, residual)
    torch.manual_seed(0)
    for slot in range(8):
        other = torch.randn_like(h) * (0.0, 1.0, 1e4)[slot % 3] * (torch.rand_like(h) < 0.5)
        other[slot] = h[slot]
        assert torch.equal(run(other, weight, bias, residual)[slot], whole[slot])


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_no_token_needs_are_not_read(device, batch):
    h, weight, bias, residual = problem(device, 70, 64, batch, 1.0, torch.float32)
    weight.numbers[11] = NAN
    for value, whole in ((0.0, True), (-0.0, True), (1e-30, False)):
        h[:, 11] = 0.0
        h[-1, 11] = value
        assert bool(run(h, weight, bias, residual).isfinite().all()) == whole


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_nan_is_never_left_out_and_stays_in_its_row(device, batch):
    h, weight, bias, residual = problem(device, 64, 64, batch, 0.0, torch.float32)
    h[-1, 50] = NAN
    out = run(h, weight, bias, residual)
    assert out[:-1].isfinite().all() and out[-1].isnan().all()


def test_hidden_values_stored_times_a_unit(device):
    h, weight, bias, residual = problem(device, 64, 64, 2, 0.3, torch.float32)
    torch.testing.assert_close(
        run(h * 2**-6, weight, bias, residual, unit=2**-6), run(h, weight, bias, residual), rtol=1e-6, atol=1e-6
    )


def test_what_does_not_fit_is_refused(device):
    h, weight, bias, residual = problem(device, 32, 64, 9, 0.5, torch.float32)
    with pytest.raises(ValueError, match="9 tokens, expected 1 to 8"):
        run(h, weight, bias, residual)
    h, residual = h[:2], residual[:2]
    with pytest.raises(ValueError, match="weight: expected shape"):
        run(h, Rows(weight.numbers[:31]), bias, residual)
    with pytest.raises(ValueError, match="bias: expected shape"):
        run(h, weight, bias[:3], residual)
    codes = Int4Rows(torch.zeros(32, 8, dtype=torch.int32, device=device), torch.ones(32, 2, device=device).half())
    with pytest.raises(ValueError, match="weight: expected a matrix of numbers"):
        run(h, codes, bias, residual)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d"), [(4096, 1024), (8192, 2048), (18432, 2560), (16384, 4096), (28672, 7168), (36864, 9216)]
)
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("pdl", [False, True])
def test_true_widths(n, d, batch, pdl):
    for dtype in DTYPES:
        check("cuda", n, d, batch, 0.06, dtype, pdl=pdl)
