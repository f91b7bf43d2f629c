"""Adds up what several GPUs have, in one kernel: each pushes its numbers into the others' memory, and reads its own.

    part_r (n,) fp32 on rank r     out = part_0 + part_1 + ... in the order of ranks, the same bits on every rank

A rank's inbox (2, ranks, n) int64 lies in memory that the other ranks may write. An entry is one store of eight bytes:
a number in its low half, and the count of the sum in its high half. So a number is there when its count is, and no
barrier is needed. Two halves of the inbox take turns. A rank pushes the sum after next when it has all numbers of the
next one. The others push these behind the end of this one. (NCCL's protocol LL has entries with flags alike.)

Programs are numbered alike on all ranks, and wait for those of their own number only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor

BLOCK = 128  # numbers of a program, which is one warp: it waits for four entries a lane


@dataclass(frozen=True)
class Inbox:
    """Where the numbers of other ranks arrive.

    pointers: (ranks,) int64, addresses of all ranks' entries. entries: (2, ranks, n) int64, this rank's own, zero at
    first. counts: (programs,) int32, zero at first: how many sums each program has made.
    """

    rank: int
    pointers: Tensor
    entries: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rank: int, pointers: Tensor, entries: Tensor) -> "Inbox":
        programs = triton.cdiv(entries.shape[2], BLOCK)
        return cls(rank, pointers, entries, torch.zeros(programs, dtype=torch.int32, device=entries.device))


@triton.jit
def _rank_sum_kernel(
    part, out, pointers, entries, counts, N: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    wait_for_predecessor(PDL)
    count = tl.load(counts + tl.program_id(0)) + 1
    mine = tl.load(part + columns, mask=inside, other=0.0)
    low = mine.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    entry = (count.to(tl.int64) << 32) | low
    half = (count & 1) * (RANKS * N)
    for other in tl.static_range(RANKS):
        if other != RANK:
            inbox = tl.load(pointers + other).to(tl.pointer_type(tl.int64))
            tl.store(inbox + half + RANK * N + columns, entry, mask=inside)
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            total += mine
        else:
            arrives = entries + half + other * N + columns
            found = tl.load(arrives, mask=inside, other=0, volatile=True)
            while tl.max(tl.where(inside & ((found >> 32).to(tl.int32) != count), 1, 0), 0) > 0:
                found = tl.load(arrives, mask=inside, other=0, volatile=True)
            total += found.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(out + columns, total, mask=inside)
    tl.store(counts + tl.program_id(0), count)


def rank_sum(part: Tensor, out: Tensor, inbox: Inbox, pdl: bool = False) -> None:
    """out = the sum of all ranks' parts. All ranks call it with an inbox of one size, and equally often.

    part, out: fp32, contiguous, of n numbers each. Errors: sizes, dtypes, a CPU tensor outside the interpreter.
    """
    check_device("part", part)
    n = inbox.entries.shape[2]
    require(part.numel() == n and out.numel() == n, f"part and out must have {n} numbers, as the inbox has")
    require(part.dtype == out.dtype == torch.float32, f"part and out must be float32, got {part.dtype}, {out.dtype}")
    require(part.is_contiguous() and out.is_contiguous(), "part and out must be contiguous")
    check_shape("pointers", inbox.pointers, inbox.entries.shape[1])
    dependent = use_pdl(pdl, part.device)
    _rank_sum_kernel[(triton.cdiv(n, BLOCK),)](
        part, out, inbox.pointers, inbox.entries, inbox.counts, N=n, RANK=inbox.rank, RANKS=inbox.entries.shape[1],
        BLOCK=BLOCK, PDL=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
