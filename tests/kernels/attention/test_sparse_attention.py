"""Head selection, q/k/v with back-fill, flash-decoding against their plain-torch references, with poisoned outputs."""

import dataclasses

import pytest
import torch
from mlp_helpers import norm

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.dense.dense_rows import qkv_dense, qkv_dense_reference
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.attend import (
    AttendSettings,
    AttentionScratch,
    flash_decode,
    flash_decode_reference,
)
from dejavu_train.kernels.stages.predict import site_predict, site_predict_reference
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, head_selection
from dejavu_train.kernels.stages.qkv import QkvSettings, qkv, qkv_reference

NAN = float("nan")


@pytest.mark.parametrize(("batch", "d", "n_heads"), [(1, 96, 3), (3, 80, 5), (1, 64, 2), (33 // 2, 40, 4)])
def test_a_site_without_an_mlps_predictor(device, batch, d, n_heads):
    capacity = 6
    x = torch.randn(batch, d, device=device) * 3 + 1
    predictor = torch.randn(n_heads, d, device=device) / d**0.5
    bias = torch.randn(n_heads, device=device)
    bias[0] = NAN  # a NaN logit is never selected
    threshold = torch.zeros(1, device=device)
    position = torch.randint(0, capacity, (batch,), dtype=torch.int32, device=device)
    row_state = torch.randint(0, 3, (batch,), dtype=torch.int32, device=device)
    made, ln = [], norm(d, device)
    for function in (site_predict, site_predict_reference):
        attn_in = torch.full((batch, capacity, d), NAN, device=device)
        selection = head_selection(n_heads, device)
        selection.row_bits.fill_(-1)
        heads = HeadSite(HeadPredictor(predictor, bias, threshold, selection), ln, row_state)
        function(x, heads, position, attn_in)
        made.append((attn_in, selection))
    torch.testing.assert_close(made[0][0], made[1][0], equal_nan=True, atol=1e-5, rtol=1e-5)
    assert torch.equal(made[0][1].row_bits, made[1][1].row_bits)


def attention_case(batch, n_heads, head_dim, d, capacity, device, dtype=torch.float32, density=0.5):
    weight = (torch.randn(n_heads, 3, head_dim, d, device=device) / d**0.5).to(dtype)
    bias = torch.randn(n_heads, 3, head_dim, device=device).to(dtype)
    attn_in = torch.randn(batch, capacity, d, device=device).to(dtype)
    position = torch.randint(capacity // 2, capacity, (batch,), dtype=torch.int32, device=device)
    for b in range(batch):
        attn_in[b, int(position[b]) + 1 :] = NAN
    watermark = (torch.rand(batch, n_heads, device=device) * (position[:, None] + 1)).to(torch.int32)
    selection = head_selection(n_heads, device)
    selection.set_mask(torch.rand(batch, n_heads, device=device) < density)
    return Linear.of(weight, bias), attn_in, position, watermark, selection


@pytest.mark.parametrize(
    ("batch", "n_heads", "head_dim", "d", "density"),
    [
        (1, 3, 16, 48, 0.5),
        (2, 2, 80, 40, 0.5),
        (1, 2, 32, 64, 0.0),
        (1, 2, 16, 64, 1.0),
        (3, 5, 16, 24, 0.3),
        (11, 3, 32, 40, 0.6),
    ],
)
def test_qkv(device, batch, n_heads, head_dim, d, density):
    capacity = 9
    weights, attn_in, position, watermark, selection = attention_case(
        batch, n_heads, head_dim, d, capacity, device, density=density
    )
    made = []
    for function in (qkv, qkv_reference):
        q = torch.full((batch, n_heads, head_dim), NAN, device=device)
        k, v = (torch.full((batch, n_heads, capacity, head_dim), NAN, device=device) for _ in range(2))
        marks = watermark if density < 1 else None  # of heads that are always selected nothing is missing
        function(weights, HeadStep(q, KvCache(k, v, attn_in, marks), position, selection))
        made.append((q, k, v))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("pairs", "wide"), [(8, 8), (8, 16), (4, 2)])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_head_idle_for_long_is_shared_out(device, batch, pairs, wide):
    """More groups of missing positions than the grid has programs, beside a head that lacks the present one only."""
    n_heads, head_dim, d, capacity = 3, 16, 32, 90
    weights, attn_in, position, watermark, selection = attention_case(
        batch, n_heads, head_dim, d, capacity, device, density=1.0
    )
    watermark[:, 0], watermark[:, 1], watermark[:, 2] = 0, position, position - 20
    made = []
    for call in (qkv, qkv_reference):
        q = torch.full((batch, n_heads, head_dim), NAN, device=device)
        k, v = (torch.full((batch, n_heads, capacity, head_dim), NAN, device=device) for _ in range(2))
        step = HeadStep(q, KvCache(k, v, attn_in, watermark), position, selection)
        with QkvSettings(16, pairs, 64, 2, 1, wide).in_use():
            call(weights, step)
        made.append((q, k, v))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "n_heads", "head_dim", "d"), [(1, 3, 32, 96), (1, 2, 80, 48), (2, 2, 16, 64)])
def test_qkv_dense(device, batch, n_heads, head_dim, d):
    capacity = 5
    weights, _, position, _, _ = attention_case(batch, n_heads, head_dim, d, capacity, device)
    x, ln = torch.randn(batch, d, device=device) * 2 + 1, norm(d, device)
    made = []
    for function in (qkv_dense, qkv_dense_reference):
        q = torch.full((batch, n_heads, head_dim), NAN, device=device)
        k, v = (torch.full((batch, n_heads, capacity, head_dim), NAN, device=device) for _ in range(2))
        function(x, ln, weights, HeadStep(q, KvCache(k, v, x[:, :0]), position))
        made.append((q, k, v))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "n_heads", "d"), [(1, 32, 4096), (1, 72, 9216), (4, 40, 5120)])
def test_attention_stages_at_true_shapes(device, dtype, batch, n_heads, d):
    head_dim, capacity = 128, 300
    weights, attn_in, position, watermark, selection = attention_case(
        batch, n_heads, head_dim, d, capacity, device, dtype
    )
    watermark.copy_(torch.maximum(watermark, position[:, None] - 40))  # few positions to fill in, and many
    watermark[:, ::2] = (position - 2)[:, None].int()
    made = []
    for run_qkv, run_decode in ((qkv, flash_decode), (qkv_reference, flash_decode_reference)):
        q = torch.full((batch, n_heads, head_dim), NAN, device=device)
        k, v = (torch.randn(batch, n_heads, capacity, head_dim, device=device) for _ in range(2))
        generator = torch.Generator(device).manual_seed(0)
        k, v = (tensor.normal_(generator=generator).to(dtype) for tensor in (k, v))
        marks = watermark.clone()
        cache = KvCache(k, v, attn_in, marks)
        run_qkv(weights, HeadStep(q, cache, position, selection))
        out = torch.full((batch, n_heads * head_dim), NAN, device=device)
        scratch = AttentionScratch.empty(batch, n_heads, head_dim, capacity, device)
        run_decode(HeadStep(q, cache, position, selection), out, scratch)
        made.append((k, v, out, marks))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_mistakes_are_one_line(device):
    weights, attn_in, position, watermark, selection = attention_case(1, 2, 16, 32, 5, device)
    q = torch.zeros(1, 2, 16, device=device)
    k = torch.zeros(1, 2, 5, 16, device=device)
    cache = KvCache(k, k, attn_in, watermark)
    with pytest.raises(ValueError, match=r"k_cache: expected shape \(1, 2, 4, 16\), got \(1, 2, 5, 16\)|attn_in"):
        qkv(weights, HeadStep(q, dataclasses.replace(cache, attn_in=attn_in[:, :4].contiguous()), position, selection))
    with pytest.raises(ValueError, match="head dim 24 is not supported"):
        q24 = torch.zeros(1, 2, 24, device=device)
        scratch = AttentionScratch.empty(1, 2, 24, 5, device)
        flash_decode(HeadStep(q24, cache, position, selection), q, scratch)
    scratch, out = AttentionScratch.empty(1, 2, 16, 5, device), torch.zeros(1, 32, device=device)
    short = scratch._replace(tickets=scratch.tickets[:1])
    for wrong, given in (
        ("watermark", (watermark[:, :1].contiguous(), scratch)),
        (r"scratch\.tickets", (watermark, short)),
    ):
        with pytest.raises(ValueError, match=f"{wrong}: expected shape"):
            flash_decode(HeadStep(q, KvCache(k, k, attn_in, given[0]), position, selection), out, given[1])
    with pytest.raises(ValueError, match="32, 64, 128 positions, not 48"), AttendSettings(48, 2).in_use():
        flash_decode(HeadStep(q, cache, position, selection), out, scratch)
