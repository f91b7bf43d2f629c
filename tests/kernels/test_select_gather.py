"""Select and fc1 in one kernel: the same rows and values as the two kernels it stands for."""

import pytest
import torch

from kernels.gather_gemv import LiveRows
from kernels.launch import select_gather_settings
from kernels.select import PredictorWeights, Selection
from kernels.select_gather import select_gather, select_gather_reference, select_gather_rows


def case(n, d, rank, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, x = torch.randn(1, rank, generator=g), torch.randn(1, d, generator=g).to(dtype)
    up = torch.randn(n, rank, generator=g).to(dtype) / rank**0.5
    weight, bias = torch.randn(n, d, generator=g).to(dtype) / d**0.5, torch.randn(n, generator=g).to(dtype)
    predictor = PredictorWeights(torch.empty(rank, d), up.to(device), torch.randn(n, generator=g).to(device) * 0.1)
    live = select_gather_rows(n, d, device)
    live.values.fill_(float("nan"))
    live.ids.fill_(-77)
    live.counts.fill_(-77)
    return hidden.to(device), predictor, x.to(device), weight.to(device), bias.to(device), live


def listed(live):
    slots = torch.arange(live.slots, device=live.ids.device)[None, :] < live.counts[:, None]
    return live.ids[slots.flatten()]


@pytest.mark.parametrize("n,d,rank", [(200, 64, 32), (64, 33, 7), (1, 100, 64), (131, 160, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_its_reference(n, d, rank, dtype, device):
    hidden, predictor, x, weight, bias, live = case(n, d, rank, dtype, device)
    block = select_gather_settings(d).block
    for threshold in (float("inf"), 1.0, 0.0, float("-inf")):
        selection = Selection.empty(n, device, block)
        select_gather(hidden, predictor, threshold, x, weight, bias, live, selection)
        want = select_gather_reference(hidden.double(), predictor, threshold, x.double(), weight, bias)
        torch.testing.assert_close(live.to_dense().double(), want, atol=3e-3, rtol=1e-3)
        assert torch.equal(listed(live).long(), want[0].nonzero().flatten())
        assert set(listed(live).tolist()) <= set(selection.indices().tolist())


def test_quantised_predictor_state_and_nan(device):
    hidden, predictor, x, weight, bias, live = case(150, 64, 48, torch.float16, device)
    stored = PredictorWeights(torch.randn(48, 64).to(device), predictor.up, predictor.bias).quantized(torch.int8)
    select_gather(hidden, stored, 0.5, x, weight, bias, live)
    want = select_gather_reference(hidden.double(), stored, 0.5, x.double(), weight, bias)
    torch.testing.assert_close(live.to_dense().double(), want, atol=3e-3, rtol=1e-3)
    for value, count in ((0, 0), (2, int((select_gather_reference(
            hidden, predictor, float("-inf"), x, weight, bias) != 0).sum()))):  # fmt: skip
        state = torch.tensor([value], dtype=torch.int32, device=device)
        select_gather(hidden, predictor, 0.5, x, weight, bias, live, row_state=state)
        assert listed(live).numel() == count
    hidden[0, 5] = float("nan")
    select_gather(hidden, predictor, float("-inf"), x, weight, bias, live)
    assert listed(live).numel() == 0


def test_errors_name_the_number(device):
    hidden, predictor, x, weight, bias, live = case(100, 32, 16, torch.float32, device)
    with pytest.raises(ValueError, match="take batch 1, got 2"):
        select_gather(hidden.repeat(2, 1), predictor, 0.0, x, weight, bias, live)
    with pytest.raises(ValueError, match="the live rows are 7 ranges of 15"):
        select_gather(hidden, predictor, 0.0, x, weight, bias, LiveRows.empty(100, 1, device, 7))
    with pytest.raises(ValueError, match=r"x must have shape \(1, 32\), got \(1, 31\)"):
        select_gather(hidden, predictor, 0.0, x[:, :31].contiguous(), weight, bias, live)


@pytest.mark.gpu
@pytest.mark.parametrize("d,rank", [(2048, 128), (4096, 256), (5120, 320), (7168, 448), (9216, 576), (12288, 768)])
def test_real_shapes(d, rank):
    hidden, predictor, x, weight, bias, live = case(4 * d, d, rank, torch.float16, "cuda")
    want = select_gather_reference(hidden, predictor, 1.28, x, weight, bias)
    first = None
    for pdl in (False, True):
        select_gather(hidden, predictor, 1.28, x, weight, bias, live, pdl=pdl)
        got = live.to_dense()
        wrong = ~torch.isclose(got, want, atol=1e-2, rtol=1e-2)
        assert wrong.sum() <= 2  # a logit at the threshold may fall on either side
        assert first is None or torch.equal(got, first)
        first = got
