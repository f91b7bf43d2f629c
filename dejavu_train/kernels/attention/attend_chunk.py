"""Attention of a chunk of a prompt over the K/V cache of its row, which the chunk itself is written into first.

    k_cache[b, g, first + t], v_cache[b, g, first + t] = rows[t, g, r], rows[t, g, r + 1]        t = 0 .. count - 1
    s[t, j, p] = rows[t, j / r, j % r] . k_cache[b, j / r, p] / sqrt(head_dim) + slope[j] (p - first - t)
    out[t, j]  = softmax_p(s[t, j, p]) v_cache[b, j / r, p]                                      p = 0 .. first + t

T tokens, of which the first `count` are real. r heads of q share a group of K and V, and h = g r. rows are
(T, g, r + 2, head_dim), as q/k/v gives them, out (T, h, head_dim), caches (B, g, capacity, head_dim). chunk is (3,)
int32 on the device: b, first, count. So one recorded launch serves every row, position and length.

A program owns one head and TOKENS tokens, and walks over the positions up to its last one. Positions at and behind
first + count are never read, so what stands there may be anything. Nobody reads what tokens from `count` on get.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.positions import Alibi

TOKENS = 64
POSITIONS = 64
LEAST = 16  # rows of a product on tensor cores


def attend_chunk_reference(rows: Tensor, cache: KvCache, chunk: Tensor, out: Tensor) -> None:
    """Plain torch: as `attend_chunk`, called alike."""
    b, first, count = chunk.tolist()
    n, share, given = first + count, rows.shape[2] - 2, rows[:count].transpose(0, 1)
    cache.k[b, :, first:n], cache.v[b, :, first:n] = given[:, :, share], given[:, :, share + 1]
    keys, values = (each[b, :, :n].float().repeat_interleave(share, 0) for each in (cache.k, cache.v))
    p, t = torch.arange(n, device=rows.device), first + torch.arange(count, device=rows.device)
    q = given[:, :, :share].transpose(1, 2).flatten(0, 1).float()
    scores = q @ keys.transpose(1, 2) * rows.shape[3] ** -0.5
    if isinstance(cache.positions, Alibi):
        scores += cache.positions.slopes[:, None, None] * (p - t[:, None])
    weights = scores.masked_fill(p > t[:, None], -torch.inf).softmax(2)
    out[:count] = (weights @ values).transpose(0, 1).to(out.dtype)


@triton.jit
def _keep_chunk_kernel(
    rows, k_cache, v_cache, chunk, capacity, GROUPS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t < tl.load(chunk + 2):
        c = tl.arange(0, HEAD_TILE)
        group = tl.program_id(1)
        row = tl.load(chunk).to(tl.int64) * GROUPS + group
        to = (row * capacity + tl.load(chunk + 1) + t) * HEAD_DIM + c
        at = rows + ((t * GROUPS + group) * (SHARE + 2) + SHARE) * HEAD_DIM + c
        tl.store(k_cache + to, tl.load(at, mask=c < HEAD_DIM), mask=c < HEAD_DIM)
        tl.store(v_cache + to, tl.load(at + HEAD_DIM, mask=c < HEAD_DIM), mask=c < HEAD_DIM)


@triton.jit
def _attend_chunk_kernel(
    rows, k_cache, v_cache, chunk, slopes, out, capacity, scale, n_tokens, HEADS: tl.constexpr, SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The last tokens have the longest walks, and begin first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunk + 1), tl.load(chunk + 2)
    kept = tl.load(chunk).to(tl.int64) * (HEADS // SHARE) + head // SHARE
    t, c = block * TOKEN_TILE + tl.arange(0, TOKEN_TILE), tl.arange(0, HEAD_TILE)
    inside = c < HEAD_DIM
    own = first + t
    there = (t < n_tokens)[:, None] & inside[None, :]
    at_q = ((t * (HEADS // SHARE) + head // SHARE) * (SHARE + 2) + head % SHARE)[:, None] * HEAD_DIM + c[None, :]
    queries = tl.load(rows + at_q, mask=there, other=0.0)
    best = tl.full((TOKEN_TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((TOKEN_TILE,), tl.float32)
    sums = tl.zeros((TOKEN_TILE, HEAD_TILE), tl.float32)
    end = tl.minimum(first + count, first + (block + 1) * TOKEN_TILE)
    for begin in range(0, end, BLOCK):
        p = begin + tl.arange(0, BLOCK)
        at = (kept * capacity + p)[:, None] * HEAD_DIM + c[None, :]
        read = (p < end)[:, None] & inside[None, :]
        keys = tl.load(k_cache + at, mask=read, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if slopes is not None:
            scores += tl.load(slopes + head) * (p[None, :] - own[:, None]).to(tl.float32)
        scores = tl.where((p[None, :] <= own[:, None]) & (p < end)[None, :], scores, float("-inf"))
        most = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - most)
        weights = tl.exp(scores - most[:, None])
        values = tl.load(v_cache + at, mask=read, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        weight = weight * shrink + tl.sum(weights, 1)
        best = most
    mixed = (sums / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + (t * HEADS + head)[:, None] * HEAD_DIM + c[None, :], mixed, mask=there)


def attend_chunk(rows: Tensor, cache: KvCache, chunk: Tensor, out: Tensor) -> None:
    """Write a chunk's k and v into the cache, and attend over it. See the module's docstring for shapes.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit, or a device without kernels.
    """
    check_device("rows", rows)
    n_tokens, groups, parts, head_dim = rows.shape
    n_rows, capacity, share = len(cache.k), cache.capacity, parts - 2
    check_shape("rows", rows, n_tokens, groups, parts, head_dim)
    for name, tensor in (("k_cache", cache.k), ("v_cache", cache.v)):
        check_shape(name, tensor, n_rows, groups, capacity, head_dim)
    check_shape("out", out, n_tokens, groups * share, head_dim)
    check_shape("chunk", chunk, 3)
    require(rows.dtype == cache.k.dtype, f"rows and caches differ: {rows.dtype}, {cache.k.dtype}")
    slopes = cache.positions.slopes if isinstance(cache.positions, Alibi) else None
    tile, tokens = max(16, triton.next_power_of_2(head_dim)), TOKENS if n_tokens > LEAST else LEAST
    _keep_chunk_kernel[(n_tokens, groups)](
        rows, cache.k, cache.v, chunk, capacity, GROUPS=groups, SHARE=share, HEAD_DIM=head_dim, HEAD_TILE=tile,
        num_warps=1,
    )  # fmt: skip
    _attend_chunk_kernel[(triton.cdiv(n_tokens, tokens), groups * share)](
        rows, cache.k, cache.v, chunk, slopes, out, capacity, head_dim**-0.5, n_tokens, HEADS=groups * share,
        SHARE=share, HEAD_DIM=head_dim, HEAD_TILE=tile, TOKEN_TILE=tokens, BLOCK=POSITIONS, num_warps=4,
    )  # fmt: skip
