"""Sixteen rows of 4-bit words times one input, a program's warps sharing out the columns, rows after rows of a matrix.

The products are those of `int4_mma` with one input. Words come through a queue in lines of 128 bytes (`lane_queue`),
slot after slot, whatever number divides a row's pairs of units. The rows are neighbours, `rows` = (first row, end of
the matrix), or, LISTED, any: `rows` = six numbers of each lane's rows (`lane_queue.listed_row`) and six flags, whether
such a row is read. Products of rows that are not read have no meaning (LISTED: they are zero).
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.int4_mma import column_sums, groups_of, int4_mma, unit_vector, units_a_group
from dejavu_train.kernels.common.lane_queue import (
    after_slot,
    as_it_comes,
    ask_lines,
    ask_listed_lines,
    at_slot,
    fetch_ahead,
    lane_queue,
    line_slot_bytes,
    listed_row,
    take_unit,
)

ROLLED_FROM = tl.constexpr(5)  # pairs of a warp: whole steps of 6.7B, where dense rows have 4, are faster without


@triton.constexpr_function
def pairs_of_a_warp(words, vector, warps):
    """Pairs of units of a row that each warp takes, some of them beyond the row's end perhaps."""
    pairs = -(-words // (8 * vector))
    return -(-pairs // warps)


def pairs_ahead(words: int, group: int, warps: int, most: int, room: int) -> int:
    """AHEAD of `first_rows`: `most` pairs, or as many as a warp has of a row and `room` bytes of a queue hold.

    Errors: no room for one.
    """
    vector = unit_vector(words, group)
    held = room // line_slot_bytes(32 * warps, vector)
    require(held > 0, f"{warps} warps: {room} bytes of shared memory hold no pair of units of each")
    return min(most, held, pairs_of_a_warp(words, vector, warps))


@triton.constexpr_function
def row_queue_bytes(words, group, lanes, ahead):
    """Shared memory of the queue of `first_rows`."""
    return ahead * line_slot_bytes(lanes, unit_vector(words, group))


@triton.jit
def unit_of(step, warp, WARPS: tl.constexpr):
    """The unit of a row that a warp takes as its number `step`: warps take pairs of neighbouring units in turn."""
    return (step // 2 * WARPS + warp) * 2 + step % 2


@triton.jit
def two_rows(rows, lane, LISTED: tl.constexpr):
    """(a lane's rows g and g + 8 of the sixteen, whether they are there). Of those beyond the last one, the last."""
    if LISTED:
        row = rows[4].to(tl.int64)
        other_row = rows[5].to(tl.int64)
        there = rows[10]
        other_there = rows[11]
    else:
        line = rows[0] + lane % 32 // 4
        row = tl.minimum(line, rows[1] - 1).to(tl.int64)
        other_row = tl.minimum(line + 8, rows[1] - 1).to(tl.int64)
        there = rows[0] < rows[1]  # one comparison for both: sums of rows beyond the matrix are not stored
        other_there = there
    return row, other_row, there, other_there


@triton.jit
def _ask_rows(
    queue, words, rows, pair, lane, W: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr
):
    """The queue with the words of sixteen rows for the warp's pair number `pair` on their way, in its first slot.

    WHOLE: the matrix has a multiple of 16 rows.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    WARPS: tl.constexpr = lane.shape[0] // 32
    INSIDE: tl.constexpr = pairs_of_a_warp(W, V, WARPS) * WARPS * 8 * V <= W
    place = pair * (WARPS * 8 * V) + lane // 32 * (8 * V)
    left = tl.full(lane.shape, 8 * V, tl.int32)
    if not INSIDE:
        left = W - place
    if LISTED:
        queue = ask_listed_lines(queue, lane, words + place, rows[:6], rows[6:], left, V, W, INSIDE)
    else:
        at = words + tl.cast(rows[0], tl.int64) * W + place
        number = rows[1] - rows[0]
        if WHOLE:
            number = tl.where(rows[0] < rows[1], 16, 0)  # one comparison for all rows
        queue = ask_lines(queue, lane, at, number, left, 0, V, W, 0, True)
    return queue


@triton.jit
def _row_scales(scales, rows, lane, W: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr):
    """A lane's scales of rows g and g + 8 for each eight units: those of units 2 t and 2 t + 1."""
    V: tl.constexpr = unit_vector(W, GROUP)
    WARPS: tl.constexpr = lane.shape[0] // 32
    G: tl.constexpr = groups_of(W, GROUP)
    row, other_row, there, other_there = two_rows(rows, lane, LISTED)
    found = ()
    for octet in tl.static_range((pairs_of_a_warp(W, V, WARPS) + 3) // 4):
        for odd in tl.static_range(2):
            unit = unit_of(8 * octet + lane % 4 * 2 + odd, lane // 32, WARPS)
            place = unit // units_a_group(GROUP, V)
            inside = unit * (4 * V) < tl.where(there, W, 0)
            found = found + (tl.load(scales + row * G + place, mask=inside, other=0.0),)
            if LISTED:
                inside = unit * (4 * V) < tl.where(other_there, W, 0)
            found = found + (tl.load(scales + other_row * G + place, mask=inside, other=0.0),)
    return found


@triton.jit
def either(first, one, two, N: tl.constexpr):
    """N numbers of the tuple `one` where `first`, else of `two`."""
    chosen = ()
    for k in tl.static_range(N):
        chosen = chosen + (tl.where(first, one[k], two[k]),)
    return chosen


@triton.jit
def rows_of_list(ids, first, end, last, lane):
    """A lane's six rows of the sixteen entries of a list from `first` on, and whether they lie before `end`."""
    numbers = ()
    there = ()
    for k in tl.static_range(6):
        entry = first + listed_row(lane, k)
        # Ids may be read beyond the count: those are old ones, in range.
        numbers = numbers + (tl.load(ids + tl.minimum(entry, last), cache_modifier=".cg"),)
        there = there + (entry < end,)
    return numbers + there


@triton.jit
def _ask_first_words(
    queue, words, rows, lane, W: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    for k in tl.static_range(AHEAD):
        own = at_slot(queue, k, line_slot_bytes(lane.shape[0], unit_vector(W, GROUP)))
        queue = after_slot(queue, _ask_rows(own, words, rows, k, lane, W, GROUP, WHOLE, LISTED))
    return queue


@triton.jit
def ask_first_rows(
    queue, words, scales, rows, lane, W: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr = False,
):  # fmt: skip
    """`first_rows` through a queue that is there, and empty."""
    queue = _ask_first_words(queue, words, rows, lane, W, GROUP, AHEAD, WHOLE, LISTED)
    return queue, _row_scales(scales, rows, lane, W, GROUP, LISTED)


@triton.jit
def first_rows(
    words, scales, rows, lane, W: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
    FETCHED: tl.constexpr, ROOM: tl.constexpr, LISTED: tl.constexpr = False,
):  # fmt: skip
    """(a queue with the first AHEAD pairs of `rows`, those that there are, and all their scales).

    AHEAD: at most a warp's pairs of a row. WHOLE: the matrix has a multiple of 16 rows. The L2 is asked for the FETCHED
    words of each row that come next. ROOM: bytes that the queue takes at least (`lane_queue.even_room`).
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    L: tl.constexpr = lane.shape[0]
    tl.static_assert(not (LISTED and FETCHED), "the rows of a list are no neighbours")
    queue = lane_queue(lane, max(ROOM, row_queue_bytes(W, GROUP, L, AHEAD)))
    queue = _ask_first_words(queue, words, rows, lane, W, GROUP, AHEAD, WHOLE, LISTED)
    BEGIN: tl.constexpr = 8 * V * AHEAD * (L // 32)
    if FETCHED > 0 and BEGIN < W:
        row = rows[0] + lane
        at = words + row.to(tl.int64) * W + BEGIN
        fetch_ahead(at, (lane < 16) & (row < rows[1]), 4 * min(W - BEGIN, FETCHED))
    return queue, _row_scales(scales, rows, lane, W, GROUP, LISTED)


@triton.jit
def _pair_step(
    queue, slot, sums, s, x, words, rows, next_rows, number, pair, lane, W: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """(queue, slot, sums) after pair `pair` of `rows`, the warp's `number`th of those that share x and s."""
    V: tl.constexpr = unit_vector(W, GROUP)
    PAIRS: tl.constexpr = pairs_of_a_warp(W, V, lane.shape[0] // 32)
    own = at_slot(queue, slot, line_slot_bytes(lane.shape[0], V))
    first = sums[0]
    second = sums[1]
    mine = lane % 4 == number
    for odd in tl.static_range(2):
        w, own = take_unit(own, lane, 0, odd, V, AHEAD - 1)
        part = int4_mma(w, x, V)
        first = tl.where(mine, first + part[odd] * s[odd * 2].to(tl.float32), first)
        second = tl.where(mine, second + part[2 + odd] * s[odd * 2 + 1].to(tl.float32), second)
    more = pair + AHEAD < PAIRS
    asked = either(more, rows, next_rows, 12 if LISTED else 2)
    next_pair = tl.where(more, pair + AHEAD, pair + AHEAD - PAIRS)
    own = _ask_rows(own, words, asked, next_pair, lane, W, GROUP, WHOLE, LISTED)
    return after_slot(queue, own), tl.where(slot + 1 < AHEAD, slot + 1, 0), (first, second)


@triton.jit
def int4_rows_step(
    queue, slot, s, x, words, scales, rows, next_rows, lane, W: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    WHOLE: tl.constexpr, LISTED: tl.constexpr = False,
):  # fmt: skip
    """Products (16,) of `rows` with x, and queue, first slot and scales of `next_rows`.

    queue, s: `first_rows` of `rows`, with the same constants, whose first slot is 0. x: `normalised_units`. As soon as
    a pair is taken, the one that comes AHEAD pairs later is asked for. From ROLLED_FROM pairs on, and of LISTED rows,
    those that share registers of x are a loop that stays one: instructions that a program reads once, or that are too
    many to be kept, take longer to come than words do (66B's sparse MLP: 10 us for fc1 in one piece, 5 in a loop).
    The scales of `next_rows` are asked for behind the first eight units, where there are more, else before them.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    PAIRS: tl.constexpr = pairs_of_a_warp(W, V, lane.shape[0] // 32)
    if PAIRS % AHEAD == 0:
        slot = 0
    sums = (tl.zeros(lane.shape, tl.float32), tl.zeros(lane.shape, tl.float32))
    coming = ()
    if PAIRS <= 4:  # one octet
        coming = _row_scales(scales, next_rows, lane, W, GROUP, LISTED)
    for octet in tl.static_range((PAIRS + 3) // 4):
        own_x = x[4 * V * octet : 4 * V * octet + 4 * V]
        own_s = s[4 * octet : 4 * octet + 4]
        if LISTED or PAIRS >= ROLLED_FROM:
            for number in range(0, as_it_comes(min(4, PAIRS - 4 * octet))):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, words, rows, next_rows, number, 4 * octet + number, lane, W,
                    GROUP, AHEAD, WHOLE, LISTED,
                )  # fmt: skip
        else:
            for number in tl.static_range(min(4, PAIRS - 4 * octet)):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, words, rows, next_rows, number, 4 * octet + number, lane, W,
                    GROUP, AHEAD, WHOLE, LISTED,
                )  # fmt: skip
        if PAIRS > 4 and octet == 0:  # not before: the first products come sooner
            coming = _row_scales(scales, next_rows, lane, W, GROUP, LISTED)
    return column_sums(sums[0], sums[1], lane.shape[0]), queue, slot, coming
