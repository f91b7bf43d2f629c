"""The list of selected neurons without gaps: `pack` closes them in one small kernel, in the list's order."""

from typing import Any

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import check_device
from dejavu_train.kernels.common.launch import start_dependents_and_wait, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.selection import PackedSelection, Selection

ENTRIES = 1024  # of the list, for a program of `pack`


@triton.jit
def pack_ranges(
    number_of, ids, counts, packed_ids, packed_count, n_ranges, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr,
    ALL_RANGES: tl.constexpr, RANGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program number_of's RANGES ranges, with its wait: a program's whole work, also as a part of another grid."""
    # All slots are read beside the counts that say which of them are valid: one round trip.
    if EARLY:
        start_dependents_and_wait(PDL)
    else:
        wait_for_predecessor(PDL)
    low = number_of * RANGES
    every = tl.arange(0, ALL_RANGES)
    number = tl.load(counts + every, mask=every < n_ranges, other=0)
    own = low + tl.arange(0, RANGES)
    slot = tl.arange(0, SLOTS_PAD)
    mine = tl.load(counts + own, mask=own < n_ranges, other=0)
    at = own[:, None] * SLOTS + slot[None, :]
    there = (own < n_ranges)[:, None] & (slot < SLOTS)[None, :]
    row = tl.load(ids + at, mask=there, other=0)
    start = tl.sum(tl.where(every < low, number, 0)) + tl.cumsum(mine, 0) - mine
    place = start[:, None] + slot[None, :]
    valid = slot[None, :] < mine[:, None]
    tl.store(packed_ids + place, row, mask=valid)
    if low == 0:
        tl.store(packed_count, tl.sum(number))


@triton.jit(do_not_specialize=["n_ranges"])
def _pack_kernel(
    ids, counts, packed_ids, packed_count, n_ranges, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr,
    ALL_RANGES: tl.constexpr, RANGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pack_ranges(
        tl.program_id(0), ids, counts, packed_ids, packed_count, n_ranges, SLOTS, SLOTS_PAD,
        ALL_RANGES, RANGES, False, PDL,
    )  # fmt: skip


def pack(rows: Selection, out: PackedSelection, pdl: bool = False) -> None:
    """Close the gaps of a selection, of one row or of several: ids and count."""
    pdl = use_pdl(pdl, rows.ids.device)
    programs, arguments, constants = pack_launch(rows, out)
    _pack_kernel[(programs,)](*arguments, **constants, PDL=pdl, num_warps=4, launch_pdl=pdl)


def pack_launch(
    rows: Selection, out: PackedSelection, entries: int = ENTRIES
) -> tuple[int, tuple[Any, ...], dict[str, int]]:
    """(programs, arguments, constants) of `pack_ranges`, the same in every grid that carries it, checked.

    entries: slots of the list for a program.
    """
    check_device("rows.ids", rows.ids)
    n_ranges = rows.counts.numel()
    padded = triton.next_power_of_2(rows.block)
    ranges = max(1, entries // padded)
    constants = {
        "SLOTS": rows.block,
        "SLOTS_PAD": padded,
        "ALL_RANGES": max(128, triton.next_power_of_2(n_ranges)),
        "RANGES": ranges,
    }
    arguments = (rows.ids, rows.counts, out.ids, out.count, n_ranges)
    return triton.cdiv(n_ranges, ranges), arguments, constants
