"""Attention of eight positions of one sequence, *slots*, none of which depends on the others.

    s[i, j, p] = q[i, j] . k_cache[j, p] / sqrt(head_dim)       p = 0 .. position[i]
    out[i, j]  = softmax_p(s[i, j, p]) v_cache[j, p]

Slot i, head j. q (8, h, head_dim), caches (1, h, T, head_dim), out (8, h, head_dim) as q. position (8) int32.

A program owns one head and SPLIT positions, which begin at a multiple of SPLIT, whatever slots there are. It holds the
keys while it multiplies with all eight queries, so K and V are read once. A second kernel adds what the splits gave, in
their order, up to the slot's own. Positions behind a slot's own count exactly zero: their scores are minus infinity.
Another slot may have left values there that are not finite. They are taken for zero.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_head_dim, check_shape, require

SLOTS = 8
SPLIT = 128
ROWS = 16  # of a product on tensor cores: eight slots and as many zeros


@dataclass(frozen=True)
class SlotScratch:
    """Partial outputs (h, splits, 16, head_dim), maxima and sums (h, splits, 16), all fp32."""

    partial: Tensor
    largest: Tensor
    total: Tensor

    @classmethod
    def empty(cls, n_heads: int, head_dim: int, capacity: int, device: torch.device | str) -> "SlotScratch":
        """For caches of so many positions."""
        splits = triton.cdiv(capacity, SPLIT)
        numbers = torch.zeros(n_heads, splits, ROWS, head_dim + 2, device=device, dtype=torch.float32)
        partial, largest, total = numbers.split((head_dim, 1, 1), dim=3)
        return cls(partial.contiguous(), largest[..., 0].contiguous(), total[..., 0].contiguous())


def attend_slots_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, out: Tensor) -> None:
    """Plain torch, slot by slot."""
    for i, last in enumerate(position.tolist()):
        keys, values = k_cache[0, :, : last + 1].float(), v_cache[0, :, : last + 1].float()
        scores = (keys @ q[i].float()[:, :, None])[..., 0] / q.shape[-1] ** 0.5
        out[i] = (scores.softmax(-1)[:, None] @ values)[:, 0]


@triton.jit
def _partial_kernel(
    q, k_cache, v_cache, position, partial, largest, total, capacity, n_splits, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, SLOT_COUNT: tl.constexpr,
    ROW_TILE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split = tl.program_id(1)
    i = tl.arange(0, ROW_TILE)
    c = tl.arange(0, HEAD_TILE)
    last = tl.load(position + i, mask=i < SLOT_COUNT, other=-1)
    furthest = tl.max(last, 0)
    first = split * POSITIONS
    if first <= furthest:
        inside = c < HEAD_DIM
        p = first + tl.arange(0, POSITIONS)
        at = (head.to(tl.int64) * capacity + p)[:, None] * HEAD_DIM + c[None, :]
        read = (p <= furthest)[:, None] & inside[None, :]
        k = tl.load(k_cache + at, mask=read, other=0.0)
        v = tl.load(v_cache + at, mask=read, other=0.0)
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v_cache.dtype.element_ty)
        at_q = (i * HEADS + head)[:, None] * HEAD_DIM + c[None, :]
        queries = tl.load(q + at_q, mask=(i < SLOT_COUNT)[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(p[None, :] <= last[:, None], scores, float("-inf"))
        most = tl.max(scores, 1)
        usable = tl.where(most == float("-inf"), 0.0, most)  # a split behind the slot: exp(-inf) = 0
        weights = tl.exp(scores - usable[:, None])
        mixed = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row = (head * n_splits + split) * ROW_TILE + i
        tl.store(largest + row, most)
        tl.store(total + row, tl.sum(weights, 1))
        tl.store(partial + row[:, None] * HEAD_DIM + c[None, :], mixed, mask=inside[None, :])


@triton.jit
def _combine_kernel(
    position, partial, largest, total, out, n_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    slot = tl.program_id(1)
    c = tl.arange(0, HEAD_TILE)
    inside = c < HEAD_DIM
    used = tl.load(position + slot) // POSITIONS + 1
    most = float("-inf")
    for split in range(0, used):
        most = tl.maximum(most, tl.load(largest + (head * n_splits + split) * ROW_TILE + slot))
    mixed = tl.zeros([HEAD_TILE], tl.float32)
    weight = 0.0
    for split in range(0, used):
        row = (head * n_splits + split) * ROW_TILE + slot
        factor = tl.exp(tl.load(largest + row) - most)
        weight += factor * tl.load(total + row)
        mixed += factor * tl.load(partial + row * HEAD_DIM + c, mask=inside, other=0.0)
    tl.store(out + (slot * HEADS + head) * HEAD_DIM + c, (mixed / weight).to(out.dtype.element_ty), mask=inside)


def attend_slots(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, out: Tensor, scratch: SlotScratch
) -> None:
    """out (8, h, head_dim) of q, for slots at these positions of the sequence in the caches."""
    check_device("q", q)
    _, h, capacity, head_dim = k_cache.shape
    check_head_dim(head_dim)
    check_shape("q", q, SLOTS, h, head_dim)
    check_shape("k_cache", k_cache, 1, h, capacity, head_dim)
    check_shape("v_cache", v_cache, 1, h, capacity, head_dim)
    check_shape("position", position, SLOTS)
    check_shape("out", out, SLOTS, h, head_dim)
    splits = triton.cdiv(capacity, SPLIT)
    check_shape("scratch.largest", scratch.largest, h, splits, ROWS)
    require(q.dtype == k_cache.dtype == v_cache.dtype, f"q and caches differ: {q.dtype}, {k_cache.dtype}")
    sizes = {
        "HEADS": h,
        "HEAD_DIM": head_dim,
        "HEAD_TILE": max(16, triton.next_power_of_2(head_dim)),
        "ROW_TILE": ROWS,
        "POSITIONS": SPLIT,
    }
    _partial_kernel[(h, splits)](
        q, k_cache, v_cache, position, scratch.partial, scratch.largest, scratch.total, capacity, splits,
        head_dim**-0.5, SLOT_COUNT=SLOTS, num_warps=4, **sizes,
    )  # fmt: skip
    _combine_kernel[(h, SLOTS)](
        position, scratch.partial, scratch.largest, scratch.total, out, splits, num_warps=2, **sizes
    )
