"""Attention over groups of heads that share K and V, and with a slope a head, against float64 and transformers."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.positions import Alibi
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.lookahead.attend_pack import attend_pack
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.stages.attend import (
    BLOCK,
    AttendSettings,
    AttentionScratch,
    flash_decode,
    flash_decode_reference,
)
from dejavu_train.kernels.stages.predictor import head_selection

NAN = float("nan")


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20, 72, 112])
def test_slopes_are_those_of_transformers(n_heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32).view(n_heads, 1, 2)[:, 0, 1]
    torch.testing.assert_close(Alibi.of(n_heads, "cpu").slopes, theirs, atol=0, rtol=1e-6)


def case(device, batch, n_groups, share, head_dim, density, alibi, capacity=2 * BLOCK + 7):
    """Tensors as a step leaves them: what lies beyond a row's position was never written."""
    n_heads = n_groups * share
    q = torch.randn(batch, n_heads, head_dim, device=device)
    k, v = (torch.randn(batch, n_groups, capacity, head_dim, device=device) for _ in range(2))
    position = torch.tensor([capacity - 1, 0, BLOCK - 1][:batch], dtype=torch.int32, device=device)
    for b in range(batch):
        for tensor in (k, v):
            tensor[b, :, int(position[b]) + 1 :] = NAN
    selection = None
    if density is not None:
        selection = head_selection(n_groups, device)
        selection.set_mask(torch.rand(batch, n_groups, device=device) < density)
    marks = torch.full((batch, n_groups), -5, dtype=torch.int32, device=device)
    slopes = Alibi.of(n_heads, device) if alibi else None
    return q, KvCache(k, v, q[:, :0], marks, slopes), selection, position


def poisoned(batch, n_heads, head_dim, capacity, device):
    scratch = AttentionScratch.empty(batch, n_heads, head_dim, capacity, device)
    for tensor in (scratch.partial, scratch.largest, scratch.total):
        tensor.fill_(NAN)
    return scratch


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(
    ("batch", "n_groups", "share", "head_dim", "density", "settings"),
    [
        (1, 2, 4, 32, 0.6, None),
        (3, 2, 3, 16, 0.5, None),
        (2, 1, 5, 80, None, AttendSettings(64, 2, 3)),
        (1, 1, 7, 16, None, AttendSettings(32, 1, 7)),
        (1, 3, 1, 64, 1.0, None),
        (3, 3, 1, 128, 0.5, None),
        (2, 3, 1, 32, None, None),
        (2, 2, 2, 16, 0.7, None),
        (1, 2, 8, 16, 0.0, None),
    ],
)
def test_groups_and_slopes(device, batch, n_groups, share, head_dim, density, settings, alibi):
    q, cache, selection, position = case(device, batch, n_groups, share, head_dim, density, alibi)
    n_heads, marks = n_groups * share, cache.watermark.clone()
    mean = torch.randn(n_heads, head_dim, device=device)
    out = torch.full((batch, n_heads * head_dim), NAN, device=device)
    exact = torch.full_like(out, NAN, dtype=torch.float64)
    scratch = poisoned(batch, n_heads, head_dim, cache.capacity, device)
    flash_decode_reference(HeadStep(q.double(), cache, position, selection), exact, mean=mean)
    wanted = cache.watermark.clone()
    for _ in range(2):  # a second run with the same scratch is the same
        cache.watermark.copy_(marks)
        with nullcontext() if settings is None else settings.in_use():
            flash_decode(HeadStep(q, cache, position, selection), out, scratch, mean=mean)
        torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
        assert torch.equal(cache.watermark, wanted) and not scratch.tickets.any()


@pytest.mark.parametrize("alibi", [False, True])
def test_beside_a_list_that_is_packed(device, alibi):
    q, cache, selection, position = case(device, 1, 2, 3, 16, 0.9, alibi)
    neurons, packed = Selection.empty(70, device), PackedSelection.empty(70, device)
    neurons.set_mask(torch.rand(1, 70, device=device) < 0.4)
    out, exact = torch.full((1, 96), NAN, device=device), torch.empty(1, 96, dtype=torch.float64, device=device)
    scratch = poisoned(1, 6, 16, cache.capacity, device)
    flash_decode_reference(HeadStep(q.double(), cache, position, selection), exact)
    attend_pack(HeadStep(q, cache, position, selection), out, scratch, (neurons, packed))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.ids[: int(packed.count)].long(), neurons.indices())


@pytest.mark.parametrize("padding", [0, 3])
def test_blooms_attention_with_padding_before_the_text(device, padding):
    """A row begins at its first token: what transformers masks before it was never there."""
    n_heads, head_dim, length = 12, 16, 9
    total = length + padding
    q = torch.randn(n_heads, 1, head_dim, dtype=torch.float64, device=device)
    k, v = (torch.randn(n_heads, total, head_dim, dtype=torch.float64, device=device) for _ in range(2))
    mask = torch.ones(1, total, device=device)
    mask[:, :padding] = 0
    bias = build_alibi_tensor(mask, n_heads, torch.float64)
    scores = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=head_dim**-0.5)
    scores = scores.masked_fill(mask[:, None] == 0, torch.finfo(torch.float64).min)
    theirs = (scores.softmax(-1) @ v).view(1, -1)
    cache = KvCache(
        *(x[None, :, padding:].float().contiguous() for x in (k, v)),
        q[:1, :0].float(),
        positions=Alibi.of(n_heads, device),
    )
    out = torch.full((1, n_heads * head_dim), NAN, device=device)
    position = torch.tensor([length - 1], dtype=torch.int32, device=device)
    scratch = poisoned(1, n_heads, head_dim, length, device)
    own = q.float().view(1, n_heads, head_dim)
    flash_decode(HeadStep(own, cache, position), out, scratch)
    torch.testing.assert_close(out.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [300, 2100])
@pytest.mark.parametrize(
    ("batch", "n_groups", "share", "head_dim", "alibi"),
    [
        (1, 4, 5, 128, False),
        (1, 8, 6, 128, False),
        (3, 8, 4, 128, False),
        (1, 112, 1, 128, True),
        (1, 64, 1, 64, False),
    ],
)
def test_at_true_shapes(batch, n_groups, share, head_dim, alibi, capacity):
    """Caches in fp16. With dependent launches and without: the same, bit for bit."""
    q, cache, selection, position = case("cuda", batch, n_groups, share, head_dim, 0.7, alibi, capacity=capacity)
    cache = dataclasses.replace(cache, k=cache.k.half(), v=cache.v.half())
    made, marks = [], cache.watermark.clone()
    exact = torch.empty(len(q), n_groups * share * head_dim, dtype=torch.float64, device="cuda")
    flash_decode_reference(HeadStep(q.double(), cache, position, selection), exact)
    scratch = poisoned(len(q), n_groups * share, head_dim, capacity, "cuda")
    for pdl in (False, True):
        cache.watermark.copy_(marks)
        made.append(torch.full(exact.shape, NAN, device="cuda"))
        flash_decode(HeadStep(q, cache, position, selection), made[-1], scratch, pdl=pdl)
    torch.testing.assert_close(made[0].double(), exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(*made)


def test_mistakes_are_one_line(device):
    q, cache, _, position = case(device, 1, 2, 3, 16, None, True)
    scratch, out = poisoned(1, 6, 16, cache.capacity, device), torch.zeros(1, 96, device=device)
    with pytest.raises(ValueError, match="2 heads of K and V do not divide 5 heads"):
        flash_decode(HeadStep(q[:, :5].contiguous(), cache, position), out, scratch)
    cache = dataclasses.replace(cache, positions=Alibi.of(5, device))
    with pytest.raises(ValueError, match="slopes: expected shape"):
        flash_decode(HeadStep(q, cache, position), out, scratch)
