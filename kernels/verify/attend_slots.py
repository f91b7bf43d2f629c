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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_head_dim, check_shape, require
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.positions import Alibi, Rotary

SLOTS = 8
SPLIT = 128
ROWS = 16  # of a product on tensor cores: eight slots and as many zeros


@dataclass(frozen=True)
class SlotScratch:
    """Partial outputs (sequences h, splits, 16, head_dim), maxima and sums (sequences h, splits, 16), all fp32. tickets
    (sequences h) int32, zero between calls."""

    partial: Tensor
    largest: Tensor
    total: Tensor
    tickets: Tensor

    @classmethod
    def empty(
        cls, n_heads: int, head_dim: int, capacity: int, device: torch.device | str, sequences: int = 1
    ) -> "SlotScratch":
        """For caches of so many positions."""
        splits, n_heads = triton.cdiv(capacity, SPLIT), sequences * n_heads
        numbers = torch.zeros(n_heads, splits, ROWS, head_dim + 2, device=device, dtype=torch.float32)
        partial, largest, total = numbers.split((head_dim, 1, 1), dim=3)
        tickets = torch.zeros(n_heads, dtype=torch.int32, device=device)
        return cls(partial.contiguous(), largest[..., 0].contiguous(), total[..., 0].contiguous(), tickets)


def attend_slots_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    out: Tensor,
    scratch: SlotScratch | None = None,
    placed: Rotary | Alibi | None = None,
) -> None:
    """Plain torch, slot by slot."""
    share = q.shape[1] // k_cache.shape[1]
    for i, last in enumerate(position.tolist()):
        keys, values = (
            cache[i % len(cache), :, : last + 1].float().repeat_interleave(share, 0) for cache in (k_cache, v_cache)
        )
        scores = (keys @ q[i].float()[:, :, None])[..., 0] / q.shape[-1] ** 0.5
        if isinstance(placed, Alibi):
            scores = scores + placed.slopes[:, None] * (torch.arange(last + 1, device=q.device) - last)
        out[i] = (scores.softmax(-1)[:, None] @ values)[:, 0]


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


def attend_slots(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    out: Tensor,
    scratch: SlotScratch,
    placed: Rotary | Alibi | None = None,
    pdl: bool = False,
) -> None:
    """out (8, h, head_dim) of q, for slots at these positions of the sequence in the caches, or each of its own.

    placed: what attention knows of positions. Only slopes are looked at.

    Errors: shapes, dtypes, head dims, a CPU tensor.
    """
    check_device("q", q)
    sequences, groups, capacity, head_dim = k_cache.shape
    h = q.shape[1]
    require(sequences in (1, SLOTS), f"caches of {sequences} sequences, expected 1 or {SLOTS}")
    check_head_dim(head_dim)
    require(h % groups == 0, f"{groups} heads of K and V do not divide {h} heads")
    check_shape("q", q, SLOTS, h, head_dim)
    check_shape("k_cache", k_cache, sequences, groups, capacity, head_dim)
    check_shape("v_cache", v_cache, sequences, groups, capacity, head_dim)
    slopes = placed.slopes if isinstance(placed, Alibi) else None
    if slopes is not None:
        check_shape("slopes", slopes, h)
    check_shape("position", position, SLOTS)
    check_shape("out", out, SLOTS, h, head_dim)
    splits = triton.cdiv(capacity, SPLIT)
    check_shape("scratch.largest", scratch.largest, sequences * h, splits, ROWS)
    require(q.dtype == k_cache.dtype == v_cache.dtype, f"q and caches differ: {q.dtype}, {k_cache.dtype}")
    pdl = use_pdl(pdl, q.device)
    _attend_slots_kernel[(h, splits, sequences)](
        q, k_cache, v_cache, position, out, scratch.partial, scratch.largest, scratch.total, scratch.tickets, slopes,
        capacity, splits, head_dim**-0.5, HEADS=h, SHARE=h // groups, HEAD_DIM=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)), SLOT_COUNT=SLOTS, ROW_TILE=ROWS, POSITIONS=SPLIT,
        SEQUENCES=sequences, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
