"""A program's list in shared memory: all items that are wanted, in order, whichever warp takes them."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.lane_queue import lane_queue
from dejavu_train.kernels.common.shared_list import list_bytes, list_four, write_list


@triton.jit
def _list_kernel(flags, out, counts, L: tl.constexpr, R: tl.constexpr, ASM: tl.constexpr):
    lane = tl.arange(0, L)
    at = lane
    room = lane_queue(lane, list_bytes(L, R), ASM)
    if ASM:
        at = room[0]
    wanted = ()
    for r in tl.static_range(R):
        wanted = wanted + (tl.load(flags + (lane // 32 * R + r) * 32 + lane % 32) != 0,)
    items, count = write_list(at, wanted, lane, R, ASM)
    tl.store(counts + lane, count)
    for k in tl.static_range(8 * R + 1):  # each warp takes its share of the fours, and some beyond the list
        four = k * (L // 32) + lane // 32
        found = list_four(items, four, lane, R, ASM)
        for j in tl.static_range(4):
            tl.store(out + 4 * four + j, found[j], mask=4 * four + j < count)


@pytest.mark.parametrize(("warps", "rounds", "share"), [(1, 3, 0.5), (2, 2, 0.9), (4, 1, 0.0), (2, 1, 1.0)])
def test_a_list_has_what_is_wanted_in_order(device, asm, warps, rounds, share):
    torch.manual_seed(warps + rounds)
    flags = (torch.rand(32 * warps * rounds, device=device) < share).int() * 7
    out = torch.full((32 * warps * rounds,), -1, dtype=torch.int32, device=device)
    counts = torch.empty(32 * warps, dtype=torch.int32, device=device)
    _list_kernel[(1,)](flags, out, counts, L=32 * warps, R=rounds, ASM=asm, num_warps=warps)
    want = flags.nonzero()[:, 0].int()
    assert torch.equal(out[: len(want)], want) and (out[len(want) :] == -1).all()
    assert (counts == len(want)).all()
