"""The list of selected neurons without gaps: `pack` closes them in one small kernel, in the list's order."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import check_device
from dejavu_train.kernels.common.launch import (
    as_dependent,
    constant_fields,
    start_dependents_and_wait,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.selection import PackedSelection, Selection

ENTRIES = 1024  # of the list, for a program of `pack`


class PackSizes(NamedTuple):
    """Constants. SLOTS: of a range. SLOT_TILE, ALL_TILE: powers of two that hold these, and all ranges.

    RANGES: of a program.
    """

    SLOTS: int
    SLOT_TILE: int
    ALL_TILE: int
    RANGES: int


@triton.jit
def pack_ranges(
    number_of, ids, counts, packed_ids, packed_count, n_ranges, P: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):
    """Program number_of's RANGES ranges, with its wait: a program's whole work, also as a part of another grid."""
    # All slots are read beside the counts that say which of them are valid: one round trip.
    if EARLY:
        start_dependents_and_wait(PDL)
    else:
        wait_for_predecessor(PDL)
    low = number_of * P.RANGES
    every = tl.arange(0, P.ALL_TILE)
    number = tl.load(counts + every, mask=every < n_ranges, other=0)
    own = low + tl.arange(0, P.RANGES)
    slot = tl.arange(0, P.SLOT_TILE)
    mine = tl.load(counts + own, mask=own < n_ranges, other=0)
    at = own[:, None] * P.SLOTS + slot[None, :]
    there = (own < n_ranges)[:, None] & (slot < P.SLOTS)[None, :]
    row = tl.load(ids + at, mask=there, other=0)
    start = tl.sum(tl.where(every < low, number, 0)) + tl.cumsum(mine, 0) - mine
    place = start[:, None] + slot[None, :]
    valid = slot[None, :] < mine[:, None]
    tl.store(packed_ids + place, row, mask=valid)
    if low == 0:
        tl.store(packed_count, tl.sum(number))


@triton.jit(do_not_specialize=["n_ranges"])
def _pack_kernel(ids, counts, packed_ids, packed_count, n_ranges, P: tl.constexpr, PDL: tl.constexpr):
    pack_ranges(tl.program_id(0), ids, counts, packed_ids, packed_count, n_ranges, P, False, PDL)


def pack(rows: Selection, out: PackedSelection, pdl: bool = False) -> None:
    """Close the gaps of a selection, of one row or of several: ids and count."""
    programs, arguments, sizes = pack_launch(rows, out)
    _pack_kernel[(programs,)](*arguments, P=sizes, num_warps=4, **as_dependent(pdl, rows.ids.device))


def pack_launch(
    rows: Selection, out: PackedSelection, entries: int = ENTRIES
) -> tuple[int, tuple[Any, ...], PackSizes]:
    """(programs, arguments, sizes) of `pack_ranges`, the same in every grid that carries it, checked.

    entries: slots of the list for a program.
    """
    check_device("rows.ids", rows.ids)
    n_ranges = rows.counts.numel()
    padded = triton.next_power_of_2(rows.block)
    ranges = max(1, entries // padded)
    sizes = PackSizes(rows.block, padded, max(128, triton.next_power_of_2(n_ranges)), ranges)
    arguments = (rows.ids, rows.counts, out.ids, out.count, n_ranges)
    return triton.cdiv(n_ranges, ranges), arguments, constant_fields(sizes)
