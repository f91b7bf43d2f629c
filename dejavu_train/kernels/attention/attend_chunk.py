"""Attention of a chunk of a prompt over the K/V cache of its row, which the chunk itself is written into first.

    k_cache[b, g, first + t], v_cache[b, g, first + t] = k[t, g], v[t, g]                        t = 0 .. count - 1
    s[t, j, p] = q[t, j] . k_cache[b, j / r, p] / sqrt(head_dim) + slope[j] (p - first - t)      p = 0 .. first + t
    out[t, j]  = softmax_p(s[t, j, p]) v_cache[b, j / r, p]

T tokens, of which the first `count` are real. r of the h heads share K and V. Shapes: q, out (T, h, head_dim), and k,
v (T, h / r, head_dim). Caches are (B, h / r, capacity, head_dim). chunk is (3,) int32 on the device: b, first, count.
So one recorded launch serves every row, position and length.

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


def attend_chunk_reference(q: Tensor, k: Tensor, v: Tensor, cache: KvCache, chunk: Tensor, out: Tensor) -> None:
    """Plain torch: as `attend_chunk`, called alike."""
    b, first, count = chunk.tolist()
    n, share = first + count, q.shape[1] // k.shape[1]
    cache.k[b, :, first:n], cache.v[b, :, first:n] = k[:count].transpose(0, 1), v[:count].transpose(0, 1)
    keys, values = (each[b, :, :n].float().repeat_interleave(share, 0) for each in (cache.k, cache.v))
    p, t = torch.arange(n, device=q.device), first + torch.arange(count, device=q.device)
    scores = q[:count].float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    if isinstance(cache.positions, Alibi):
        scores += cache.positions.slopes[:, None, None] * (p - t[:, None])
    weights = scores.masked_fill(p > t[:, None], -torch.inf).softmax(2)
    out[:count] = (weights @ values).transpose(0, 1).to(out.dtype)


@triton.jit
def _keep_chunk_kernel(
    k, v, k_cache, v_cache, chunk, capacity, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t < tl.load(chunk + 2):
        c = tl.arange(0, HEAD_TILE)
        group = tl.program_id(1)
        row = tl.load(chunk).to(tl.int64) * GROUPS + group
        to = (row * capacity + tl.load(chunk + 1) + t) * HEAD_DIM + c
        at = (t * GROUPS + group) * HEAD_DIM + c
        tl.store(k_cache + to, tl.load(k + at, mask=c < HEAD_DIM), mask=c < HEAD_DIM)
        tl.store(v_cache + to, tl.load(v + at, mask=c < HEAD_DIM), mask=c < HEAD_DIM)


@triton.jit
def _attend_chunk_kernel(
    q, k_cache, v_cache, chunk, slopes, out, capacity, scale, n_tokens, HEADS: tl.constexpr, SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The last tokens have the longest walks, and begin first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunk + 1), tl.load(chunk + 2)
    kept = tl.load(chunk).to(tl.int64) * (HEADS // SHARE) + head // SHARE
    t, c = block * TOKEN_TILE + tl.arange(0, TOKEN_TILE), tl.arange(0, HEAD_TILE)
    inside = c < HEAD_DIM
    own = first + t
    at_q = (t * HEADS + head)[:, None] * HEAD_DIM + c[None, :]
    queries = tl.load(q + at_q, mask=(t < n_tokens)[:, None] & inside[None, :], other=0.0)
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
    tl.store(out + at_q, mixed, mask=(t < n_tokens)[:, None] & inside[None, :])


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, cache: KvCache, chunk: Tensor, out: Tensor) -> None:
    """Write a chunk's k and v into the cache, and attend over it. See the module's docstring for shapes.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit, or a device without kernels.
    """
    check_device("q", q)
    n_tokens, heads, head_dim = q.shape
    rows, groups, capacity, _ = cache.k.shape
    require(heads % groups == 0, f"{groups} heads of K and V do not divide {heads} heads")
    for name, tensor in (("k", k), ("v", v)):
        check_shape(name, tensor, n_tokens, groups, head_dim)
    for name, tensor in (("k_cache", cache.k), ("v_cache", cache.v)):
        check_shape(name, tensor, rows, groups, capacity, head_dim)
    for name, tensor in (("q", q), ("out", out)):
        check_shape(name, tensor, n_tokens, heads, head_dim)
    check_shape("chunk", chunk, 3)
    require(q.dtype == k.dtype == cache.k.dtype, f"q, k and caches differ: {q.dtype}, {k.dtype}, {cache.k.dtype}")
    slopes = cache.positions.slopes if isinstance(cache.positions, Alibi) else None
    tile, tokens = max(16, triton.next_power_of_2(head_dim)), TOKENS if n_tokens > LEAST else LEAST
    _keep_chunk_kernel[(n_tokens, groups)](
        k, v, cache.k, cache.v, chunk, capacity, GROUPS=groups, HEAD_DIM=head_dim, HEAD_TILE=tile, num_warps=1
    )
    _attend_chunk_kernel[(triton.cdiv(n_tokens, tokens), heads)](
        q, cache.k, cache.v, chunk, slopes, out, capacity, head_dim**-0.5, n_tokens, HEADS=heads,
        SHARE=heads // groups, HEAD_DIM=head_dim, HEAD_TILE=tile, TOKEN_TILE=tokens, BLOCK=POSITIONS, num_warps=4,
    )  # fmt: skip
