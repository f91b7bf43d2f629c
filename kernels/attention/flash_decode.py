"""Attention of one decoding step over the selected heads only, split over the context (flash-decoding).

    out[b, i] = softmax_p(q[b, i] . k_cache[b, i, p] / sqrt(head_dim)) v_cache[b, i, p]     p = 0 .. position[b]

for the heads i that row b selects. Zeros for the others, whose K/V are not read. A program owns one (row, head) and one
range of POSITIONS positions. The grid is fixed by the capacity, programs beyond the position leave. The last program of
a head to finish (an integer ticket) combines the partial results in order of their index: bitwise deterministic. It
also sets watermark[b, i] = position[b] + 1. Positions that were never written ("stale") are skipped through `valid`.
Position, watermark and selection are older than the launch before this one, and so are the K/V below the watermark:
they are read before the wait for it, while q/k/v are still computed. It triggers before that wait: what follows may
read early only what is older than q/k/v.
Where a mean (h, head_dim) stands in for skipped heads, it is taken off the selected ones: W (out - mean) + b + W mean.
q (B, h, head_dim) fp32. Caches (B, h, T, head_dim). `out` (B, h * head_dim) fp32, or rounded to fp16.
Watermark (B, h) int32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_cache, check_device, check_head_dim, check_shape, require
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.launch import start_dependents_and_wait, use_pdl
from dejavu_train.kernels.common.selection import Selection

BLOCK = 32  # the fewest positions of a program; scratch is made for them
WARPS = {32: 2, 64: 2, 128: 4}  # of a program, for one row
COMBINED = 16  # partial results combined at a time


def block_positions(capacity: int, heads: int) -> int:
    """Positions of a program, swept alone: few heads leave room for many programs."""
    return BLOCK if capacity <= 1024 and heads <= 40 else 2 * BLOCK


def program_of_several_rows(capacity: int) -> tuple[int, int]:
    """(positions, warps) of a program of a batch. 72 heads of 128 columns on one H200, at position 150: 5.1 us with 2
    rows and 16.7 with 8 where 64 positions and two warps take 5.5 and 21.2. At 500 of 1048 54.1 and 51.4, at 1000 83.5
    and 86.0, at 2000 165.9 and 161.9."""
    return (BLOCK, 1) if capacity <= 1024 else (2 * BLOCK, 2)


@dataclass(frozen=True)
class AttentionScratch:
    """Partial outputs (B*h, splits, head_dim), maxima and sums (B*h, splits) fp32, tickets (B*h), else zero."""

    partial: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def empty(
        cls, batch: int, n_heads: int, head_dim: int, capacity: int, device: torch.device | str
    ) -> "AttentionScratch":
        splits = triton.cdiv(capacity, BLOCK)
        rows = batch * n_heads
        partial = torch.zeros(rows, splits, head_dim, device=device, dtype=torch.float32)
        largest, total = (torch.zeros(rows, splits, device=device, dtype=torch.float32) for _ in range(2))
        return cls(partial, largest, total, torch.zeros(rows, dtype=torch.int32, device=device))


def flash_decode_reference(
    q: Tensor,
    cache: KvCache,
    selection: Selection | None,
    position: Tensor,
    out: Tensor,
    scratch: AttentionScratch | None = None,
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Plain torch over the whole capacity, masked. No host synchronisation."""
    batch, n_heads, capacity, head_dim = cache.k.shape
    seen = torch.arange(capacity, device=q.device)[None] <= position[:, None]
    seen = seen[:, None, :].expand(batch, n_heads, capacity)
    if cache.valid is not None:
        seen = seen & (cache.valid > 0)
    k = torch.where(seen[..., None], cache.k.float(), 0.0)
    v = torch.where(seen[..., None], cache.v.float(), 0.0)
    scores = (k @ q.float()[..., None])[..., 0] * head_dim**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    result = (weights[:, :, None, :] @ v)[:, :, 0]
    chosen = torch.ones(batch, n_heads, dtype=torch.bool, device=q.device)
    if selection is not None:
        chosen = selection.to_mask(batch)
    if mean is not None:
        result = result - mean
    out.copy_(torch.where(chosen[..., None], result, 0.0).reshape(batch, -1))
    if cache.watermark is not None:
        cache.watermark.copy_(torch.where(chosen, position[:, None] + 1, cache.watermark))


@triton.jit
def _partial_results(partial, largest, first, some, n_live, c, inside, HEAD_DIM: tl.constexpr):
    """(outputs (PARTS, HEAD_TILE), maxima (PARTS,)) of the ranges `some` of the head whose first slot is given."""
    there = some < n_live
    mask = there[:, None] & inside[None, :]
    at = (first + some)[:, None] * HEAD_DIM + c[None, :]
    parts = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
    return parts, tl.load(largest + first + some, mask=there, other=-1e30, cache_modifier=".cg")


@triton.jit
def attend(
    pair,
    split,
    q,
    k_cache,
    v_cache,
    row_bits,
    position,
    watermark,
    valid,
    mean,
    out,
    partial,
    largest,
    total,
    tickets,
    capacity,
    scale,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ALL: tl.constexpr,
    HAS_WATERMARK: tl.constexpr,
    STALE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, head) and one range of positions, as a function: look-ahead gives the grid other programs too."""
    b = pair // H
    head = pair % H
    c = tl.arange(0, HEAD_TILE)
    inside = c < HEAD_DIM
    usual = tl.zeros([HEAD_TILE], tl.float32)
    if HAS_MEAN:
        usual = tl.load(mean + head * HEAD_DIM + c, mask=inside, other=0.0)
    last = tl.load(position + b, cache_modifier=".cg")
    first = split * POSITIONS
    p = first + tl.arange(0, POSITIONS)
    at = (pair.to(tl.int64) * capacity + p)[:, None] * HEAD_DIM + c[None, :]
    if ALL:
        selected = last >= 0
    else:
        selected = ((tl.load(row_bits + head, cache_modifier=".cg") >> b) & 1) != 0
    ready = last  # positions below were filled in by an earlier step
    if HAS_WATERMARK:
        ready = tl.minimum(last, tl.load(watermark + pair, cache_modifier=".cg"))
    early = (p < tl.where(selected, ready, 0))[:, None] & inside[None, :]
    k_early = tl.load(k_cache + at, mask=early, other=0.0, cache_modifier=".cg")
    v_early = tl.load(v_cache + at, mask=early, other=0.0, cache_modifier=".cg")
    start_dependents_and_wait(PDL)
    if selected:
        if first <= last:
            query = tl.load(q + pair * HEAD_DIM + c, mask=inside, other=0.0) * scale
            seen = p <= last
            late = (seen & (p >= ready))[:, None] & inside[None, :]
            k = tl.load(k_cache + at, mask=late, other=k_early, cache_modifier=".cg").to(tl.float32)
            v = tl.load(v_cache + at, mask=late, other=v_early, cache_modifier=".cg").to(tl.float32)
            if STALE:
                seen = seen & (tl.load(valid + pair * capacity + p, mask=seen, other=0) != 0)
                v = tl.where(seen[:, None], v, 0.0)
            scores = tl.where(seen, tl.sum(k * query[None, :], 1), float("-inf"))
            # A range whose positions are all missing must not give NaN: its weight below is exactly zero.
            top = tl.maximum(tl.max(scores, 0), -1e30)
            weights = tl.exp(scores - top)
            mixed = tl.sum(weights[:, None] * v, 0)
            mass = tl.sum(weights)
            n_live = last // POSITIONS + 1
            arrived = 0
            if n_live > 1:
                slot = pair * SPLITS + split
                tl.store(partial + slot * HEAD_DIM + c, mixed, mask=inside)
                tl.store(largest + slot, top)
                tl.store(total + slot, mass)
                tl.debug_barrier()
                arrived = tl.atomic_add(tickets + pair, 1, sem="acq_rel")
            if n_live == 1:
                tl.store(out + pair * HEAD_DIM + c, mixed / mass - usual, mask=inside)
                if HAS_WATERMARK:
                    tl.store(watermark + pair, last + 1)
            elif arrived == n_live - 1:
                tl.debug_barrier()
                # Everything is asked for before the first value is used: the ways to the L2 are what takes time here.
                some = tl.arange(0, PARTS)
                s = tl.arange(0, SPLIT_TILE)
                live = s < n_live
                parts, heights = _partial_results(partial, largest, pair * SPLITS, some, n_live, c, inside, HEAD_DIM)
                tops = tl.load(largest + pair * SPLITS + s, mask=live, other=-1e30, cache_modifier=".cg")
                sums = tl.load(total + pair * SPLITS + s, mask=live, other=0.0, cache_modifier=".cg")
                highest = tl.max(tops, 0)
                result = tl.zeros([HEAD_TILE], tl.float32)
                for part in range(0, n_live, PARTS):
                    result += tl.sum(parts * tl.exp(heights - highest)[:, None], 0)
                    parts, heights = _partial_results(
                        partial, largest, pair * SPLITS, part + PARTS + some, n_live, c, inside, HEAD_DIM
                    )
                result = result / tl.sum(sums * tl.exp(tops - highest))
                tl.store(out + pair * HEAD_DIM + c, result - usual, mask=inside)
                tl.store(tickets + pair, 0)
                if HAS_WATERMARK:
                    tl.store(watermark + pair, last + 1)
    else:
        if split == 0:
            tl.store(out + pair * HEAD_DIM + c, tl.zeros([HEAD_TILE], tl.float32), mask=inside)


@triton.jit
def _flash_decode_kernel(
    q,
    k_cache,
    v_cache,
    row_bits,
    position,
    watermark,
    valid,
    mean,
    out,
    partial,
    largest,
    total,
    tickets,
    capacity,
    scale,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ALL: tl.constexpr,
    HAS_WATERMARK: tl.constexpr,
    STALE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    PDL: tl.constexpr,
):
    attend(
        tl.program_id(0), tl.program_id(1), q, k_cache, v_cache, row_bits, position, watermark, valid, mean, out,
        partial, largest, total, tickets, capacity, scale, H, HEAD_DIM, HEAD_TILE, SPLITS, SPLIT_TILE, PARTS, POSITIONS,
        ALL, HAS_WATERMARK, STALE, HAS_MEAN, PDL,
    )  # fmt: skip


def attention_launch(
    q: Tensor,
    cache: KvCache,
    selection: Selection | None,
    position: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    mean: Tensor | None,
    positions: int,
    pdl: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of `attend`, the same in every grid that carries it, checked."""
    check_device("q", q)
    batch, n_heads, head_dim = q.shape
    check_head_dim(head_dim)
    capacity = cache.capacity
    check_shape("q", q, batch, n_heads, head_dim)
    check_cache(cache, batch, n_heads, head_dim)
    check_shape("out", out, batch, n_heads * head_dim)
    check_shape("position", position, batch)
    if mean is not None:
        check_shape("mean", mean, n_heads, head_dim)
    require(positions in WARPS, f"a program has {', '.join(map(str, WARPS))} positions, not {positions}")
    blocks = triton.cdiv(capacity, BLOCK)
    check_shape("scratch.partial", scratch.partial, batch * n_heads, blocks, head_dim)
    for name in ("largest", "total"):
        check_shape(f"scratch.{name}", getattr(scratch, name), batch * n_heads, blocks)
    check_shape("scratch.tickets", scratch.tickets, batch * n_heads)
    splits = triton.cdiv(capacity, positions)
    arguments = (
        q,
        cache.k,
        cache.v,
        position if selection is None else selection.row_bits,
        position,
        position if cache.watermark is None else cache.watermark,
        position if cache.valid is None else cache.valid,
        out if mean is None else mean,
        out,
        scratch.partial,
        scratch.largest,
        scratch.total,
        scratch.tickets,
        capacity,
        head_dim**-0.5,
    )
    constants = {
        "H": n_heads,
        "HEAD_DIM": head_dim,
        "HEAD_TILE": triton.next_power_of_2(head_dim),
        "SPLITS": splits,
        "SPLIT_TILE": triton.next_power_of_2(splits),
        "PARTS": COMBINED,
        "POSITIONS": positions,
        "ALL": selection is None,
        "HAS_WATERMARK": cache.watermark is not None,
        "STALE": cache.valid is not None,
        "HAS_MEAN": mean is not None,
        "PDL": pdl,
    }
    return arguments, constants


def flash_decode(
    q: Tensor,
    cache: KvCache,
    selection: Selection | None,
    position: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    pdl: bool = False,
    mean: Tensor | None = None,
    positions: int | None = None,
    warps: int | None = None,
) -> None:
    """See the module's formula. Selection None = all heads. positions: of a program, 32, 64 or 128.

    Errors: shapes, head dims, a CPU tensor.
    """
    batch, n_heads, _ = q.shape
    capacity = cache.capacity
    if batch > 1 and positions is None:
        positions, own = program_of_several_rows(capacity)
        warps = warps or own
    positions = positions or block_positions(capacity, n_heads)
    pdl = use_pdl(pdl, q.device)
    arguments, constants = attention_launch(q, cache, selection, position, out, scratch, mean, positions, pdl)
    _flash_decode_kernel[(batch * n_heads, constants["SPLITS"])](
        *arguments, **constants, num_warps=warps or WARPS[positions], launch_pdl=pdl
    )
