"""Attention of eight *slots*, none of which depends on the others: positions of one sequence, or of eight.

    s[i, j, p] = q[i, j] . k_cache[j / r, p] / sqrt(head_dim) + slope[j] (p - position[i])      p = 0 .. position[i]
    out[i, j]  = softmax_p(s[i, j, p]) v_cache[j / r, p]

Slot i, head j, r heads share K and V. Slopes (`positions.Alibi`) are zero where there are none.
q (8, h, head_dim), caches (1 or 8, h / r, T, head_dim), out (8, h, head_dim) as q. position (8) int32.

A program owns one head and SPLIT positions, which begin at a multiple of SPLIT, whatever slots there are. It holds the
keys while it multiplies with all eight queries. So K and V are read once a head. The last program of a head adds what
the splits gave, in their order, up to the slot's own. Positions behind a slot's own count exactly zero: their
scores are minus infinity. Another slot may have left values there that are not finite. They are taken for zero. Of
eight sequences a program owns one. It multiplies in the same way, with zeros for the queries of others, so a slot's
numbers are the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_attention, check_shape, require
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.launch import as_dependent, wait_for_predecessor
from dejavu_train.kernels.common.positions import Alibi
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode_reference

SLOTS = 8
SPLIT = 128
ROWS = 16  # of a product on tensor cores: eight slots and as many zeros


def slot_scratch(
    n_heads: int, head_dim: int, capacity: int, device: torch.device | str, sequences: int = 1
) -> AttentionScratch:
    """For caches of so many positions. Of each head and split there are ROWS queries' results, side by side."""
    return AttentionScratch.empty(sequences, ROWS * n_heads, head_dim, capacity, device, SPLIT)


def attend_slots_reference(step: HeadStep, out: Tensor, scratch: AttentionScratch | None = None) -> None:
    """Plain torch: slots as rows of a batch, which share a cache of one sequence."""
    cache = step.cache
    k, v = (each.expand(len(step.q), -1, -1, -1) for each in (cache.k, cache.v))
    every = KvCache(k, v, cache.attn_in, positions=cache.positions)
    flash_decode_reference(HeadStep(step.q, every, step.position), out.flatten(1))


@triton.jit
def _attend_slots_kernel(
    q, k_cache, v_cache, position, out, partial, largest, total, tickets, slopes, capacity, n_splits, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, SLOT_COUNT: tl.constexpr,
    ROW_TILE: tl.constexpr, POSITIONS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split = tl.program_id(1)
    place = tl.program_id(2) * HEADS + head  # among the heads of all sequences
    kept = place // SHARE  # heads divide into groups that share K and V, so sequences do as well
    i = tl.arange(0, ROW_TILE)
    c = tl.arange(0, HEAD_TILE)
    mine = i < SLOT_COUNT
    if SEQUENCES > 1:
        mine = mine & (i == tl.program_id(2))
    wait_for_predecessor(PDL)
    last = tl.load(position + i, mask=mine, other=-1)
    furthest = tl.max(last, 0)
    first = split * POSITIONS
    if first <= furthest:
        inside = c < HEAD_DIM
        p = first + tl.arange(0, POSITIONS)
        at = (kept.to(tl.int64) * capacity + p)[:, None] * HEAD_DIM + c[None, :]
        read = (p <= furthest)[:, None] & inside[None, :]
        k = tl.load(k_cache + at, mask=read, other=0.0)
        v = tl.load(v_cache + at, mask=read, other=0.0)
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v_cache.dtype.element_ty)
        at_q = (i * HEADS + head)[:, None] * HEAD_DIM + c[None, :]
        slots = mine[:, None] & inside[None, :]
        queries = tl.load(q + at_q, mask=slots, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if slopes is not None:
            scores += tl.load(slopes + head) * (p[None, :] - last[:, None]).to(tl.float32)
        scores = tl.where(p[None, :] <= last[:, None], scores, float("-inf"))
        most = tl.max(scores, 1)
        usable = tl.where(most == float("-inf"), 0.0, most)  # a split behind the slot: exp(-inf) = 0
        weights = tl.exp(scores - usable[:, None])
        mixed = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row = place * n_splits * ROW_TILE + i
        own = row + split * ROW_TILE
        tl.store(largest + own, most, cache_modifier=".cg")
        tl.store(total + own, tl.sum(weights, 1), cache_modifier=".cg")
        tl.store(partial + own[:, None] * HEAD_DIM + c[None, :], mixed, mask=inside[None, :], cache_modifier=".cg")
        tl.debug_barrier()  # every thread's numbers are stored before one thread releases the ticket
        arrived = tl.atomic_add(tickets + place, 1, sem="acq_rel", scope="gpu")
        if arrived == furthest // POSITIONS:
            best = tl.full((ROW_TILE,), float("-inf"), tl.float32)
            for s in range(0, arrived + 1):
                there = s * POSITIONS <= last
                found = tl.load(largest + row + s * ROW_TILE, mask=there, other=float("-inf"), cache_modifier=".cg")
                best = tl.maximum(best, found)
            usable = tl.where(best == float("-inf"), 0.0, best)
            sums = tl.zeros((ROW_TILE, HEAD_TILE), tl.float32)
            weight = tl.zeros((ROW_TILE,), tl.float32)
            for s in range(0, arrived + 1):
                there = s * POSITIONS <= last
                its = row + s * ROW_TILE
                found = tl.load(largest + its, mask=there, other=float("-inf"), cache_modifier=".cg")
                factor = tl.exp(found - usable)
                weight += factor * tl.load(total + its, mask=there, other=0.0, cache_modifier=".cg")
                at_its = partial + its[:, None] * HEAD_DIM + c[None, :]
                read_its = there[:, None] & inside[None, :]
                sums += factor[:, None] * tl.load(at_its, mask=read_its, other=0.0, cache_modifier=".cg")
            tl.store(out + at_q, (sums / weight[:, None]).to(out.dtype.element_ty), mask=slots)
            tl.store(tickets + place, 0)


def attend_slots(step: HeadStep, out: Tensor, scratch: AttentionScratch, pdl: bool = False) -> None:
    """out (8, h, head_dim) of q, for slots at these positions of the sequence in the cache, or each of its own.

    scratch: `slot_scratch`. Errors: shapes, dtypes, head dims, a CPU tensor.
    """
    q, cache = step.q, step.cache
    groups, share, head_dim = check_attention(step, slots=True)
    h, sequences = groups * share, len(cache.k)
    slopes = cache.positions.slopes if isinstance(cache.positions, Alibi) else None
    if slopes is not None:
        check_shape("slopes", slopes, h)
    for name, tensor in (("q", q), ("out", out)):
        check_shape(name, tensor, SLOTS, h, head_dim)
    splits = triton.cdiv(cache.capacity, SPLIT)
    check_shape("scratch.largest", scratch.largest, sequences * h * ROWS, splits)
    require(q.dtype == cache.k.dtype == cache.v.dtype, f"q and caches differ: {q.dtype}, {cache.k.dtype}")
    _attend_slots_kernel[(h, splits, sequences)](
        q, cache.k, cache.v, step.position, out, scratch.partial, scratch.largest, scratch.total, scratch.tickets,
        slopes, cache.capacity, splits, head_dim**-0.5, HEADS=h, SHARE=share, HEAD_DIM=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)), SLOT_COUNT=SLOTS, ROW_TILE=ROWS, POSITIONS=SPLIT,
        SEQUENCES=sequences, num_warps=4, **as_dependent(pdl, q.device),
    )  # fmt: skip
