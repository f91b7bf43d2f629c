"""The look-ahead kernels against their plain-torch references, with poisoned outputs."""

import pytest
import torch
from mlp_helpers import norm
from predictor_helpers import products_of

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.lookahead.attend_pack import attend_pack
from dejavu_train.kernels.lookahead.qkv_select import qkv_select, qkv_select_reference
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode_reference
from dejavu_train.kernels.stages.predict import site_predict, site_predict_reference
from dejavu_train.kernels.stages.predictor import (
    HeadPredictor,
    HeadSite,
    Predictor,
    PredictorWeights,
    head_selection,
)
from dejavu_train.kernels.stages.select import select
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles, quantise_rows

NAN = float("nan")


def in_grid(weights):
    """How the grid of q/k/v multiplies a predictor's second half."""
    products = products_of(weights)
    return Products.ROW_TILES if products is Products.REGISTERS else products


@pytest.mark.parametrize("state", [0, 1, 2])
@pytest.mark.parametrize(
    ("n_heads", "head_dim", "d", "rank", "n", "relu", "stored"),
    [
        (3, 16, 48, 7, 70, False, None),
        (2, 32, 64, 16, 128, True, torch.int8),
        (2, 32, 64, 15, 70, True, torch.uint8),
        (2, 32, 64, 72, 70, True, torch.uint8),  # whole words: nine, of which no two lie at a multiple of 8 bytes
    ],
)
def test_lookahead(device, state, n_heads, head_dim, d, rank, n, relu, stored):
    """All three stages in turn, the kernels' chain against the references' chain."""
    capacity, last = 70, 66
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    predictor, bias = torch.randn(n_heads, d, device=device), torch.randn(n_heads, device=device)
    halves = [(torch.randn(rank, d, device=device), None), (torch.randn(n, rank, device=device), None)]
    if stored == torch.int8:
        halves = [quantise_rows(weight) for weight, _ in halves]
    elif stored == torch.uint8:  # nibbles
        halves = [(pack_nibbles(codes), scale.float()) for codes, scale in (int4_rows(weight) for weight, _ in halves)]
    (down, down_scale), (up, up_scale) = halves
    mlp = PredictorWeights(down, up, torch.randn(n, device=device), down_scale, up_scale, relu)
    zero = torch.zeros(1, device=device)
    position = torch.tensor([last], dtype=torch.int32, device=device)
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    kept, mean = torch.randn(1, capacity, d, device=device), torch.randn(n_heads, head_dim, device=device)
    weight = torch.randn(n_heads, 3, head_dim, d, device=device) / d**0.5
    weights = Linear.of(weight, torch.randn(n_heads, 3, head_dim, device=device))
    caches = [torch.randn(1, n_heads, capacity, head_dim, device=device) for _ in range(2)]
    for cache in caches:
        cache[:, :, last - 1 :] = NAN  # not yet valid: must be filled in, or not read
    made = []
    for kernels in (True, False):
        attn_in, watermark = kept.clone(), torch.full((1, n_heads), last - 1, dtype=torch.int32, device=device)
        heads, neurons = head_selection(n_heads, device), Selection.empty(n, device)
        heads.row_bits.fill_(-1)
        neurons.counts.fill_(9)
        hidden = torch.full((1, rank), NAN, device=device)
        q, out = (
            torch.full((1, n_heads, head_dim), NAN, device=device),
            torch.full((1, n_heads * head_dim), NAN, device=device),
        )
        k, v = (cache.clone() for cache in caches)
        scratch = AttentionScratch.empty(1, n_heads, head_dim, capacity, device)
        packed = PackedSelection.empty(n, device)
        packed.count.fill_(-1)
        cache = KvCache(k, v, attn_in, watermark)
        own = HeadPredictor(predictor, bias, zero, heads)
        in_use = Predictor(mlp, zero, neurons, hidden, in_grid(mlp))
        site = (x, HeadSite.of(own, ln, row_state), position, attn_in, in_use)
        step = HeadStep(q, cache, position, heads)
        rows = (weights, step, in_use, row_state)
        attention = (step, out, scratch)
        if kernels:
            site_predict(*site)
            qkv_select(*rows)
            attend_pack(*attention, (neurons, packed), mean=mean)
            listed = packed.ids[: int(packed.count)].long()
        else:
            site_predict_reference(*site)
            qkv_select_reference(*rows)
            flash_decode_reference(*attention, mean=mean)
            listed = neurons.indices()
        made.append((attn_in, hidden, heads.row_bits, watermark, out, listed, neurons.row_bits))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def random_attention(device, h, hd, d):
    weights = Linear.of(torch.randn(h, 3, hd, d, device=device), torch.zeros(h, 3, hd, device=device))
    k, v = (torch.zeros(1, h, 4, hd, device=device) for _ in range(2))
    marks = torch.zeros(1, h, dtype=torch.int32, device=device)
    return weights, KvCache(k, v, torch.randn(1, 4, d, device=device), marks)


@pytest.mark.parametrize(("batch", "stored"), [(1, None), (1, torch.uint8), (2, None)])
def test_hidden_values_beyond_fp16(device, batch, stored):
    """A hidden value above 65504 is no infinity: its neurons are selected as by the reference."""
    n, rank, h, hd, d = 70, 16, 2, 16, 32
    up = (torch.rand(n, rank, device=device) - 0.5).half()
    scale = None
    if stored is not None:
        codes, scale = int4_rows(up.float())
        up, scale = pack_nibbles(codes), scale.float()
    hidden = torch.randn(batch, rank, device=device)
    hidden[0, 3], hidden[-1, 5] = 1.2e5, -7e4
    predictor = PredictorWeights(torch.eye(rank, device=device), up, up_scale=scale)
    numbers = up.float() if stored is None else codes.float() * scale[:, None]
    neurons, wanted = Selection.empty(n, device), Selection.empty(n, device)
    zero, row_state = torch.zeros(1, device=device), torch.ones(batch, dtype=torch.int32, device=device)
    wanted.set_mask(hidden @ numbers.T > 0)
    if batch > 1:
        select(Predictor(predictor, zero, neurons, hidden, Products.TILES), row_state)
    else:
        heads = head_selection(h, device)
        position = torch.tensor([1], dtype=torch.int32, device=device)
        weights, cache = random_attention(device, h, hd, d)
        q = torch.zeros(1, h, hd, device=device)
        mlp = Predictor(predictor, zero, neurons, hidden, in_grid(predictor))
        qkv_select(weights, HeadStep(q, cache, position, heads), mlp, row_state)
    assert torch.equal(neurons.to_mask(batch), wanted.to_mask(batch)) and 0 < len(wanted.indices())


@pytest.mark.parametrize("stored", [None, torch.uint8])
def test_all_heads(device, stored):
    """Without rows of heads: K/V of all heads at the present position only, whatever the selection's state."""
    capacity, last, n_heads, head_dim, d, rank, n = 6, 4, 2, 16, 48, 7, 70
    x, ln = torch.randn(1, d, device=device) * 2 + 1, norm(d, device)
    halves = [(torch.randn(rank, d, device=device), None), (torch.randn(n, rank, device=device), None)]
    if stored is not None:
        halves = [(pack_nibbles(codes), scale.float()) for codes, scale in (int4_rows(weight) for weight, _ in halves)]
    (down, down_scale), (up, up_scale) = halves
    mlp = PredictorWeights(down, up, torch.randn(n, device=device), down_scale, up_scale)
    zero, state = torch.zeros(1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    position = torch.tensor([last], dtype=torch.int32, device=device)
    weight, bias = torch.randn(n_heads, 3, head_dim, d, device=device), torch.randn(n_heads, 3, head_dim, device=device)
    before = [torch.randn(1, n_heads, capacity, head_dim, device=device) for _ in range(2)]
    every = head_selection(n_heads, device)
    every.set_mask(torch.ones(1, n_heads, dtype=torch.bool, device=device))
    made = []
    for kernels in (True, False):
        inputs = torch.full((1, capacity, d), NAN, device=device)
        hidden, q = torch.full((1, rank), NAN, device=device), torch.full((1, n_heads, head_dim), NAN, device=device)
        out, (k, v) = torch.full((1, n_heads * head_dim), NAN, device=device), (each.clone() for each in before)
        neurons, packed = Selection.empty(n, device), PackedSelection.empty(n, device)
        in_use = Predictor(mlp, zero, neurons, hidden, in_grid(mlp))
        site = (x, HeadSite(HeadPredictor(None, None, None, every), ln, state), position, inputs, in_use)
        cache = KvCache(k, v, inputs)
        rows = (Linear.of(weight, bias), HeadStep(q, cache, position, every), in_use, state)
        attention = (HeadStep(q, cache, position), out)
        if kernels:
            site_predict(*site)
            qkv_select(*rows)
            attend_pack(*attention, AttentionScratch.empty(1, n_heads, head_dim, capacity, device), (neurons, packed))
            listed = packed.ids[: int(packed.count)].long()
        else:
            site_predict_reference(*site)
            qkv_select_reference(*rows)
            flash_decode_reference(*attention)
            listed = neurons.indices()
        assert every.row_bits.eq(1).all()
        made.append((inputs, hidden, k, v, out, listed))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("bias", 10, "predictor.bias"), ("up_scale", 10, "predictor.up_scale"), ("hidden", 2, "hidden")],
)
def test_a_second_half_that_does_not_fit_is_refused(device, name, size, message):
    n, rank, h, hd, d = 70, 16, 2, 16, 32
    given = {"bias": n, "up_scale": n, "hidden": 1} | {name: size}
    up = torch.zeros(n, rank, dtype=torch.int8, device=device)
    bias, scale = (torch.ones(given[each], device=device) for each in ("bias", "up_scale"))
    predictor = PredictorWeights(torch.eye(rank, device=device), up, bias, up_scale=scale)
    zero, state = torch.zeros(1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    hidden = torch.zeros(given["hidden"], rank, device=device)
    mlp = Predictor(predictor, zero, Selection.empty(n, device), hidden, Products.ROW_TILES)
    weights, cache = random_attention(device, h, hd, d)
    step = HeadStep(torch.zeros(1, h, hd, device=device), cache, state, head_selection(h, device))
    with pytest.raises(ValueError, match=message):
        qkv_select(weights, step, mlp, state)
