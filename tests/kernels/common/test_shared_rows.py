"""A program's list of rows and values in shared memory: what is wanted of each sixteen, in order, for all warps."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.shared_rows import append_rows, four_rows, rows_list


@triton.jit
def _rows_kernel(
    numbers, values, flags, out, found, held_out, STEPS: tl.constexpr, CAPACITY: tl.constexpr, L: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, L)
    listed = rows_list(tl.program_id(0), CAPACITY, ASM)
    held = tl.program_id(0)
    for step in tl.static_range(STEPS):
        place = 16 * step + tl.arange(0, 16)
        wanted = tl.load(flags + place) != 0
        listed, held = append_rows(
            listed, held, tl.load(numbers + place), tl.load(values + place), wanted, CAPACITY, ASM
        )
    tl.debug_barrier()
    tl.store(held_out, held)
    for first in tl.static_range(0, CAPACITY // 4 + 1, L):  # some beyond the list
        four = four_rows(listed, first + lane, CAPACITY, ASM)
        for k in tl.static_range(4):
            entry = 4 * (first + lane) + k
            tl.store(out + entry, four[k], mask=entry < held)
            tl.store(found + entry, four[4 + k], mask=entry < held)


@pytest.mark.parametrize(("steps", "warps", "share"), [(1, 1, 0.6), (3, 2, 0.4), (2, 1, 0.0), (5, 2, 1.0)])
def test_a_list_has_what_is_wanted_in_order(device, asm, steps, warps, share):
    torch.manual_seed(steps)
    capacity = 16 * steps
    numbers = torch.randint(0, 1 << 20, (capacity,), dtype=torch.int32, device=device)
    values, flags = torch.randn(capacity, device=device), (torch.rand(capacity, device=device) < share).int()
    if share:
        values[flags.nonzero()[0, 0]] = float("nan")
    out = torch.full((capacity,), -1, dtype=torch.int32, device=device)
    found, held = torch.full((capacity,), 7.0, device=device), torch.empty(1, dtype=torch.int32, device=device)
    _rows_kernel[(1,)](
        numbers, values, flags, out, found, held, STEPS=steps, CAPACITY=capacity, L=32 * warps, ASM=asm,
        num_warps=warps,
    )  # fmt: skip
    chosen = flags != 0
    assert int(held) == int(chosen.sum())
    assert torch.equal(out[: int(held)], numbers[chosen]) and (out[int(held) :] == -1).all()
    torch.testing.assert_close(found[: int(held)], values[chosen], rtol=0, atol=0, equal_nan=True)
