"""Attention of one decoding step over the selected heads only, split over the context (flash-decoding).

    s[b, j, p] = q[b, j] . k_cache[b, i, p] / sqrt(head_dim) + slope[j] (p - position[b])       p = 0 .. position[b]
    out[b, j]  = softmax_p(s[b, j, p]) v_cache[b, i, p]                                         j = i r .. i r + r - 1

Heads of K and V, i, are shared by r heads of q each: a group, which row b selects as a whole. Zeros for others, whose
K/V are not read. Slopes (`positions.Alibi`) are zero where there are none. A program owns a unit and one range of
POSITIONS positions. A unit is a (row, group) with at most QUERIES of its heads of q. Programs beyond the position
leave. The last program of a unit to finish (an integer ticket) combines the partial results in order of their index:
bitwise deterministic. A group's first unit also sets watermark[b, i] = position[b] + 1. Position, watermark, selection
and the K/V below the watermark are older than the launch before this one. They are read before the wait for it, while
q/k/v are still computed. Where a mean (h, head_dim) stands in for skipped heads, it is taken off the selected ones: W
(out - mean) + b + W mean.

q (B, h, head_dim) fp32. Caches (B, g, T, head_dim), h = g r. `out` (B, h * head_dim) fp32, or rounded to fp16.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_attention, check_shape, require
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.launch import as_dependent, constant_fields, start_dependents_and_wait
from dejavu_train.kernels.common.positions import Alibi, alibi_bias, no_bias
from dejavu_train.kernels.common.settings import Settings

BLOCK = 32  # the fewest positions of a program
POSITIONS = (32, 64, 128)
COMBINED = 16  # partial results combined at a time


@dataclass(frozen=True)
class AttendSettings(Settings, stage="attend"):
    """positions: of a program, one of `POSITIONS`. warps: of one. queries: heads of q of one that share K/V, at most.

    A program multiplies its keys with one query after another. Few queries leave many programs, that read K/V once
    each. Many read them once.
    """

    positions: int
    warps: int
    queries: int = 1


class AttentionScratch(NamedTuple):
    """Partial outputs (B*h, splits, head_dim), maxima and sums (B*h, splits) fp32, tickets (B*h), else zero."""

    partial: Tensor
    largest: Tensor
    total: Tensor
    tickets: Tensor

    @classmethod
    def empty(
        cls, batch: int, n_heads: int, head_dim: int, capacity: int, device: torch.device | str, block: int = BLOCK
    ) -> "AttentionScratch":
        """block: the fewest positions of a program."""
        splits = triton.cdiv(capacity, block)
        rows = batch * n_heads
        partial = torch.zeros(rows, splits, head_dim, device=device, dtype=torch.float32)
        largest, total = (torch.zeros(rows, splits, device=device, dtype=torch.float32) for _ in range(2))
        return cls(partial, largest, total, torch.zeros(rows, dtype=torch.int32, device=device))


def flash_decode_reference(
    step: HeadStep, out: Tensor, scratch: AttentionScratch | None = None, mean: Tensor | None = None
) -> None:
    """Plain torch over the whole capacity, masked, in fp64 where q is. No host synchronisation."""
    q, cache, position = step.q, step.cache, step.position
    batch, n_groups, capacity, head_dim = cache.k.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    own = q.to(wide).view(batch, n_groups, -1, head_dim)
    p = torch.arange(capacity, device=q.device)
    seen = (p <= position[:, None])[:, None, :].expand(batch, n_groups, capacity)
    k = torch.where(seen[..., None], cache.k.to(wide), 0.0)
    v = torch.where(seen[..., None], cache.v.to(wide), 0.0)
    scores = own @ k.transpose(-1, -2) * head_dim**-0.5
    if isinstance(cache.positions, Alibi):
        slopes = cache.positions.slopes.to(wide).view(n_groups, -1, 1)
        scores = scores + slopes * (p - position[:, None])[:, None, None, :]
    weights = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
    result = weights @ v
    chosen = torch.ones(batch, n_groups, dtype=torch.bool, device=q.device)
    if step.selection is not None:
        chosen = step.selection.to_mask(batch)
    if mean is not None:
        result = result - mean.view(n_groups, -1, head_dim)
    out.copy_(torch.where(chosen[..., None, None], result, 0.0).reshape(batch, -1))
    if cache.watermark is not None:
        cache.watermark.copy_(torch.where(chosen, position[:, None] + 1, cache.watermark))


class CacheReads(NamedTuple):
    """Reads of attention beside q. row_bits None: all groups. watermark may be None as well."""

    k_cache: Any
    v_cache: Any
    row_bits: Any
    position: Any
    watermark: Any


class AttendSizes(NamedTuple):
    """Constants: heads of K and V, heads of q that share each, and a launch's tiles.

    QUERIES: of the sharing heads, in a unit. UNITS: of a group.
    """

    GROUPS: int
    SHARE: int
    QUERIES: int
    UNITS: int
    HEAD_DIM: int
    HEAD_TILE: int
    SPLITS: int
    SPLIT_TILE: int
    PARTS: int
    POSITIONS: int


@triton.jit
def _partial_results(scratch, first, some, n_live, c, inside, HEAD_DIM: tl.constexpr):
    """(outputs (PARTS, HEAD_TILE), maxima (PARTS,)) of the ranges `some` of the head whose first slot is given."""
    there = some < n_live
    mask = there[:, None] & inside[None, :]
    at = (first + some)[:, None] * HEAD_DIM + c[None, :]
    parts = tl.load(scratch.partial + at, mask=mask, other=0.0, cache_modifier=".cg")
    return parts, tl.load(scratch.largest + first + some, mask=there, other=-1e30, cache_modifier=".cg")


@triton.jit
def _combine(out, scratch, heads, n_live, c, inside, usual, S: tl.constexpr):
    """Combines the partial results of heads of q, each with its batch row, and stores what they are together."""
    # Everything is asked for before the first value is used: the ways to the L2 are what takes time here.
    some = tl.arange(0, S.PARTS)
    s = tl.arange(0, S.SPLIT_TILE)
    live = s < n_live
    found = ()
    tops = ()
    sums = ()
    for j in tl.static_range(S.QUERIES):
        first = heads[j] * S.SPLITS
        found = found + (_partial_results(scratch, first, some, n_live, c, inside, S.HEAD_DIM),)
        tops = tops + (tl.load(scratch.largest + first + s, mask=live, other=-1e30, cache_modifier=".cg"),)
        sums = sums + (tl.load(scratch.total + first + s, mask=live, other=0.0, cache_modifier=".cg"),)
    highest = ()
    mixed = ()
    for j in tl.static_range(S.QUERIES):
        highest = highest + (tl.max(tops[j], 0),)
        mixed = mixed + (tl.zeros([S.HEAD_TILE], tl.float32),)
    for part in range(0, n_live, S.PARTS):
        more = ()
        coming = ()
        for j in tl.static_range(S.QUERIES):
            more = more + (mixed[j] + tl.sum(found[j][0] * tl.exp(found[j][1] - highest[j])[:, None], 0),)
            later = part + S.PARTS + some
            coming = coming + (_partial_results(scratch, heads[j] * S.SPLITS, later, n_live, c, inside, S.HEAD_DIM),)
        mixed = more
        found = coming
    for j in tl.static_range(S.QUERIES):
        whole = mixed[j] / tl.sum(sums[j] * tl.exp(tops[j] - highest[j]))
        tl.store(out + heads[j] * S.HEAD_DIM + c, whole - usual[j], mask=inside)


@triton.jit
def attend(
    unit, split, q, kept, mean, out, scratch, capacity, scale, slopes, S: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One unit and one range of positions, as a function: look-ahead gives the grid other programs too.

    mean: what is taken off, or None.
    BIAS: what is added to scores, with `slopes` (`positions`).
    """
    pair = unit // S.UNITS
    b = pair // S.GROUPS
    group = pair % S.GROUPS
    c = tl.arange(0, S.HEAD_TILE)
    inside = c < S.HEAD_DIM
    owned = ()  # heads of the group. A last unit that lacks some does its last one again.
    heads = ()
    usual = ()
    for j in tl.static_range(S.QUERIES):
        own = tl.minimum(unit % S.UNITS * S.QUERIES + j, S.SHARE - 1)
        owned = owned + (own,)
        heads = heads + (pair * S.SHARE + own,)
        if mean is None:
            usual = usual + (tl.zeros([S.HEAD_TILE], tl.float32),)
        else:
            at_mean = mean + (group * S.SHARE + own) * S.HEAD_DIM + c
            usual = usual + (tl.load(at_mean, mask=inside, other=0.0),)
    last = tl.load(kept.position + b, cache_modifier=".cg")
    first = split * S.POSITIONS
    p = first + tl.arange(0, S.POSITIONS)
    at = (pair.to(tl.int64) * capacity + p)[:, None] * S.HEAD_DIM + c[None, :]
    if kept.row_bits is None:
        selected = last >= 0
    else:
        selected = ((tl.load(kept.row_bits + group, cache_modifier=".cg") >> b) & 1) != 0
    ready = last  # positions below were filled in by an earlier step
    if kept.watermark is not None:
        ready = tl.minimum(last, tl.load(kept.watermark + pair, cache_modifier=".cg"))
    early = (p < tl.where(selected, ready, 0))[:, None] & inside[None, :]
    k_early = tl.load(kept.k_cache + at, mask=early, other=0.0, cache_modifier=".cg")
    v_early = tl.load(kept.v_cache + at, mask=early, other=0.0, cache_modifier=".cg")
    start_dependents_and_wait(PDL)
    if selected:
        if first <= last:
            queries = ()
            for j in tl.static_range(S.QUERIES):
                at_q = q + heads[j] * S.HEAD_DIM + c
                queries = queries + (tl.load(at_q, mask=inside, other=0.0) * scale,)
            seen = p <= last
            late = (seen & (p >= ready))[:, None] & inside[None, :]
            k = tl.load(kept.k_cache + at, mask=late, other=k_early, cache_modifier=".cg").to(tl.float32)
            v = tl.load(kept.v_cache + at, mask=late, other=v_early, cache_modifier=".cg").to(tl.float32)
            mixed = ()
            tops = ()
            masses = ()
            for j in tl.static_range(S.QUERIES):
                scores = BIAS(tl.sum(k * queries[j][None, :], 1), slopes, group * S.SHARE + owned[j], p - last)
                scores = tl.where(seen, scores, float("-inf"))
                # A range whose positions are all missing must not give NaN: its weight below is exactly zero.
                top = tl.maximum(tl.max(scores, 0), -1e30)
                weights = tl.exp(scores - top)
                mixed = mixed + (tl.sum(weights[:, None] * v, 0),)
                tops = tops + (top,)
                masses = masses + (tl.sum(weights),)
            n_live = last // S.POSITIONS + 1
            arrived = 0
            if n_live > 1:
                for j in tl.static_range(S.QUERIES):
                    slot = heads[j] * S.SPLITS + split
                    tl.store(scratch.partial + slot * S.HEAD_DIM + c, mixed[j], mask=inside)
                    tl.store(scratch.largest + slot, tops[j])
                    tl.store(scratch.total + slot, masses[j])
                tl.debug_barrier()
                arrived = tl.atomic_add(scratch.tickets + unit, 1, sem="acq_rel")
            if n_live == 1:
                for j in tl.static_range(S.QUERIES):
                    at_out = out + heads[j] * S.HEAD_DIM + c
                    tl.store(at_out, mixed[j] / masses[j] - usual[j], mask=inside)
                if kept.watermark is not None:
                    tl.store(kept.watermark + pair, last + 1, mask=unit % S.UNITS == 0)
            elif arrived == n_live - 1:
                tl.debug_barrier()
                _combine(out, scratch, heads, n_live, c, inside, usual, S)
                tl.store(scratch.tickets + unit, 0)
                if kept.watermark is not None:
                    tl.store(kept.watermark + pair, last + 1, mask=unit % S.UNITS == 0)
    else:
        if split == 0:
            for j in tl.static_range(S.QUERIES):
                nothing = tl.zeros([S.HEAD_TILE], tl.float32)
                tl.store(out + heads[j] * S.HEAD_DIM + c, nothing, mask=inside)


@triton.jit
def _flash_decode_kernel(
    q, kept, mean, out, scratch, capacity, scale, slopes, S: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):
    attend(tl.program_id(0), tl.program_id(1), q, kept, mean, out, scratch, capacity, scale, slopes, S, BIAS, PDL)


def attention_launch(
    step: HeadStep, out: Tensor, scratch: AttentionScratch, mean: Tensor | None
) -> tuple[tuple[Any, ...], AttendSizes, dict[str, Any], int]:
    """(arguments, sizes, constants, warps) of `attend`, the same in every grid that carries it, checked."""
    q, cache, selection = step.q, step.cache, step.selection
    n_groups, share, head_dim = check_attention(step)
    batch, n_heads, capacity = len(q), n_groups * share, cache.capacity
    check_shape("out", out, batch, n_heads * head_dim)
    if mean is not None:
        check_shape("mean", mean, n_heads, head_dim)
    slopes = cache.positions.slopes if isinstance(cache.positions, Alibi) else None
    if slopes is not None:
        check_shape("slopes", slopes, n_heads)
    settings = AttendSettings.find("float", q.device, rows=batch, heads=n_groups, share=share, capacity=capacity)
    allowed = f"a program has {', '.join(map(str, POSITIONS))} positions, not {settings.positions}"
    require(settings.positions in POSITIONS, allowed)
    blocks = triton.cdiv(capacity, BLOCK)
    check_shape("scratch.partial", scratch.partial, batch * n_heads, blocks, head_dim)
    for name in ("largest", "total"):
        check_shape(f"scratch.{name}", getattr(scratch, name), batch * n_heads, blocks)
    check_shape("scratch.tickets", scratch.tickets, batch * n_heads)
    splits = triton.cdiv(capacity, settings.positions)
    row_bits = None if selection is None else selection.row_bits
    kept = CacheReads(cache.k, cache.v, row_bits, step.position, cache.watermark)
    arguments = (q, kept, mean, out, scratch, capacity, head_dim**-0.5, slopes)
    units = triton.cdiv(share, settings.queries)
    queries = triton.cdiv(share, units)  # alike for all
    sizes = AttendSizes(
        n_groups, share, queries, units, head_dim, triton.next_power_of_2(head_dim), splits,
        triton.next_power_of_2(splits), max(2, COMBINED // triton.next_power_of_2(queries)), settings.positions,
    )  # fmt: skip
    constants = {"S": constant_fields(sizes), "BIAS": no_bias if slopes is None else alibi_bias}
    return arguments, sizes, constants, settings.warps


def flash_decode(
    step: HeadStep, out: Tensor, scratch: AttentionScratch, pdl: bool = False, mean: Tensor | None = None
) -> None:
    """See the module's formula. Errors: shapes, head dims, a CPU tensor."""
    arguments, sizes, constants, warps = attention_launch(step, out, scratch, mean)
    grid = (len(step.q) * sizes.GROUPS * sizes.UNITS, sizes.SPLITS)
    _flash_decode_kernel[grid](*arguments, **constants, num_warps=warps, **as_dependent(pdl, out.device))
