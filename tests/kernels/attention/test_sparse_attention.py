"""Stages of attention at true shapes against plain torch, and refusals. Small ones: stages/test_positions.py."""

import dataclasses

import pytest
import torch

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.attend import (
    AttendSettings,
    AttentionScratch,
    flash_decode,
    flash_decode_reference,
)
from dejavu_train.kernels.stages.predictor import head_selection
from dejavu_train.kernels.stages.qkv import qkv, qkv_reference

NAN = float("nan")


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
