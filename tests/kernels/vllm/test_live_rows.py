"""The map out of active neurons that vLLM runs, against float64."""

import pytest
import torch
from dejavu_vllm.kernels.lists import RowsSettings
from dejavu_vllm.kernels.live_rows import live_rows, live_rows_reference

NAN = float("nan")
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def problem(device, tokens, n, d, live, dtype):
    torch.manual_seed(tokens + n)
    h = (torch.randn(tokens, n, device=device) * (torch.rand(tokens, n, device=device) < live)).to(dtype)
    weight = (torch.randn(n, d, device=device) * n**-0.5).to(dtype)
    return h, weight, torch.randn(d, device=device).to(dtype)


@pytest.mark.parametrize(
    ("tokens", "n", "d", "live", "dtype", "settings"),
    [
        (1, 70, 48, 0.1, torch.float32, None),
        (1, 131, 33, 0.4, torch.float16, RowsSettings(32, 4, 16, stages=2)),
        (1, 64, 64, 0.0, torch.float32, None),
        (2, 70, 48, 1.0, torch.float32, RowsSettings(32, 16, 32, stages=2)),
        (8, 131, 80, 0.06, torch.float16, None),
        (1, 131, 80, 0.06, torch.bfloat16, None),
        (17, 100, 32, 0.05, torch.float32, RowsSettings(64, 16, 16, stages=2)),
        (64, 90, 48, 0.3, torch.float16, RowsSettings(64, 16, 32, stages=2)),
    ],
)
def test_live_rows(device, tokens, n, d, live, dtype, settings):
    h, weight, bias = problem(device, tokens, n, d, live, dtype)
    want = h.double() @ weight.double()
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close(live_rows(h, weight, bias, settings).double(), want + bias, **close)
    torch.testing.assert_close(live_rows(h, weight, None, settings).double(), want, **close)
    torch.testing.assert_close(live_rows_reference(h, weight, bias).double(), want + bias, **close)


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_no_token_needs_are_not_read(device, tokens):
    h, weight, bias = problem(device, tokens, 70, 32, 1.0, torch.float32)
    weight[11] = NAN
    for value, whole in ((0.0, True), (-0.0, True), (1e-30, False), (NAN, False)):
        h[:, 11] = 0.0
        h[-1, 11] = value
        for made in (live_rows(h, weight, bias), live_rows_reference(h, weight, bias)):
            assert bool(made.isfinite().all()) is whole


def test_tokens_whose_rows_are_apart(device):
    h, weight, bias = problem(device, 4, 60, 32, 0.2, torch.float32)
    wide = torch.zeros(4, 100, device=device)
    wide[:, :60] = h
    assert torch.equal(live_rows(wide[:, :60], weight, bias), live_rows(h, weight, bias))


def test_refusals(device):
    h, weight, bias = problem(device, 2, 60, 32, 0.2, torch.float32)
    for wrong, words in (
        ((h[:, :59], weight, bias), r"h: expected \(B, 60\)"),
        ((h.repeat(33, 1), weight, bias), "66 tokens, expected 1 to 64"),
        ((h, weight.half(), bias), "weight: expected"),
        ((h, weight, bias[:3]), "bias: expected"),
        ((h.double(), weight, bias), "h: expected float32"),
    ):
        with pytest.raises(ValueError, match=words):
            live_rows(*wrong)
