"""Predict and select against the plain-torch reference: sets, lists, counts, bits."""

import pytest
import torch
from predictor_helpers import predict_select, predictor_of, products_of, quantized

from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights
from dejavu_train.kernels.stages.select import predict_reference, select, top_k_mask


def make_predictor(n, d, rank, device, dtype=torch.float32, relu=False, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, d, generator=g) / d**0.5
    up = torch.randn(n, rank, generator=g) / rank**0.5
    offset = torch.randn(n, generator=g) * 0.1 if bias else None
    parts = (down.to(dtype), up.to(dtype), offset)
    return PredictorWeights(*(None if t is None else t.to(device) for t in parts), relu=relu)


def poisoned(n, device, block=64):
    out = Selection.empty(n, device, block)
    for tensor in (out.ids, out.counts, out.row_bits):
        tensor.fill_(-77)
    return out


def check(out, mask, logits, threshold, band=1e-4):
    """The set equals the reference's but for logits within `band` of the threshold. List, counts and bits agree."""
    got = out.to_mask(mask.shape[0])
    doubtful = (logits - threshold).abs() < band
    assert not ((got != mask) & ~doubtful).any()
    union = got.any(0)
    assert torch.equal(out.indices(), union.nonzero().flatten())  # ascending, each once
    assert int(out.counts.sum()) == int(union.sum())


def second_half(weights, hidden, threshold, out):
    threshold = torch.tensor([threshold], device=hidden.device)
    return Predictor(weights, threshold, out, hidden, products_of(weights, len(hidden)))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_nan_is_not_selected(batch, device):
    n, rank = 150, 16
    predictor = make_predictor(n, 8, rank, device)
    hidden = torch.randn(batch, rank).to(device)
    out = poisoned(n, device)
    hidden[0, 3] = float("nan")  # a NaN logit is never selected
    select(second_half(predictor, hidden, float("-inf"), out))
    assert not out.to_mask(batch)[0].any() and out.to_mask(batch)[1:].all()


def test_top_k_is_exact(device):
    n, d = 130, 16
    predictor = make_predictor(n, d, 8, device)
    x = torch.randn(2, d).to(device)
    for k in (0, 1, 17, n):
        out = poisoned(n, device)
        predict_select(x, predictor_of(predictor, 0.0, out, 2, top_k=k))
        assert (out.to_mask(2).sum(1) == k).all()
        if k == 17:
            want = top_k_mask(predict_reference(x, predictor), k)
            assert (out.to_mask(2) == want).float().mean() > 0.99


def test_selection_from_mask_round_trip(device):
    mask = torch.rand(32, 77).to(device) < 0.2
    selection = Selection.from_mask(mask, block=16)
    assert torch.equal(selection.to_mask(32), mask)
    assert torch.equal(selection.indices(), mask.any(0).nonzero().flatten())


def test_errors_name_the_number(device):
    predictor = make_predictor(100, 16, 8, device)
    x = torch.randn(1, 16).to(device)
    ln, wide = (LayerNormWeights(torch.ones(d, device=device), torch.zeros(d, device=device)) for d in (16, 17))
    with pytest.raises(ValueError, match="99 rows, the predictor has 100"):
        predict_select(x, predictor_of(predictor, 0.0, Selection.empty(99, device)), ln)
    with pytest.raises(ValueError, match="batch of 33"):
        predict_select(torch.randn(33, 16).to(device), predictor_of(predictor, 0.0, Selection.empty(100, device)))
    with pytest.raises(ValueError, match=r"weight: expected shape \(8, 17\)"):
        predict_select(torch.randn(1, 17).to(device), predictor_of(predictor, 0.0, Selection.empty(100, device)), wide)
    with pytest.raises(ValueError, match="top_k must be between 0 and 100, got 101"):
        predict_select(x, predictor_of(predictor, 0.0, Selection.empty(100, device), top_k=101), ln)


@pytest.mark.gpu
@pytest.mark.parametrize("d,n,rank", [(4096, 16384, 256), (9216, 36864, 576), (12288, 49152, 768)])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_real_shapes(d, n, rank, batch, dtype):
    predictor = make_predictor(n, d, rank, "cuda", torch.float16)
    if dtype == torch.bfloat16:
        predictor = make_predictor(n, d, rank, "cuda", dtype)
    elif dtype != torch.float16:
        predictor = quantized(predictor)
    x = torch.randn(batch, d, device="cuda")
    ln = LayerNormWeights(torch.rand(d, device="cuda").half() + 0.5, torch.randn(d, device="cuda").half())
    out, again = poisoned(n, "cuda"), poisoned(n, "cuda")
    predict_select(x, predictor_of(predictor, 1.28, out, batch), ln, pdl=True)
    want = predict_reference(x, predictor, ln)
    check(out, want > 1.28, want, 1.28, band=0.05)  # LN(x) is rounded to 16 bits on the way
    predict_select(x, predictor_of(predictor, 1.28, again, batch), ln, pdl=False)
    assert torch.equal(out.to_mask(batch), again.to_mask(batch))
