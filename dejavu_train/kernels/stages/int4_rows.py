"""Sixteen rows of 4-bit words times one normalised row, rows after rows of a matrix.

    y[i] = sum_j code[i, j] scale[i, j // group] x[j]

A program's warps share out the columns, in pairs of units. The products are those of `raised_mma`, where the token lies
in the columns of B as eight units side by side. In registers, a lane holds the part of x that is its own. In C, lane
(g, t) = (lane / 4, lane % 4) has rows g and g + 8. Its columns 2 t and 2 t + 1 are two units.

Words come through a queue in lines of 128 bytes (`lane_queue`), slot after slot, whatever number divides a row's pairs
of units. Rows are neighbours, then `rows` = (first row, end of the matrix). Or they are listed, and lie anywhere. Then
`rows` = six numbers of each lane's rows (`lane_queue.listed_row`) and six flags, whether such a row is read. Products
of rows that are not read have no meaning (listed: they are zero). m: `Int4Form`. Several tokens: `stages.int4_tokens`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.int4_mma import (
    RAISED_UNIT,
    column_sums,
    either,
    groups_of,
    pairs_of_a_warp,
    raised_mma,
    raised_offset,
    segment_units,
    unit_of,
    unit_vector,
    units_a_group,
)
from dejavu_train.kernels.common.int4_norm import normalised_units, unit_norms
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
from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.listed import keyed

ROLLED_FROM = tl.constexpr(5)  # pairs of a warp: whole steps of 6.7B, where dense rows have 4, are faster without


class Int4Form(NamedTuple):
    """Form of a kernel's rows, all constants.

    words: of a row. pairs: of units of a warp. ahead: pairs that the queue has room for, at most `pairs`. whole: there
    are a multiple of 16 rows. fetched: words of each first row that the L2 is asked for behind those in the queue.
    room: bytes that the queue takes at least (`lane_queue.even_room`).
    """

    words: int
    group: int
    lanes: int
    pairs: int
    ahead: int
    whole: bool = False
    listed: bool = False
    fetched: int = 0
    room: int = 0


def pairs_ahead(words: int, group: int, warps: int, most: int, room: int) -> int:
    """`Int4Form.ahead`: `most` pairs, or as many as a warp has of a row and `room` bytes of a queue hold.

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
def two_rows(rows, lane, m: tl.constexpr):
    """(a lane's rows g and g + 8 of the sixteen, whether they are there). Of those beyond the last one, the last."""
    if m.listed:
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
def _ask(queue, words, rows, pair, lane, m: tl.constexpr):
    """The queue with the words of sixteen rows for the warp's pair number `pair` on their way, in its first slot."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    WARPS: tl.constexpr = m.lanes // 32
    INSIDE: tl.constexpr = pairs_of_a_warp(m.words, V, WARPS) * WARPS * 8 * V <= m.words
    place = pair * (WARPS * 8 * V) + lane // 32 * (8 * V)
    left = tl.full(lane.shape, 8 * V, tl.int32)
    if not INSIDE:
        left = m.words - place
    if m.listed:
        queue = ask_listed_lines(queue, lane, words + place, rows[:6], rows[6:], left, V, m.words, INSIDE)
    else:
        at = words + tl.cast(rows[0], tl.int64) * m.words + place
        number = rows[1] - rows[0]
        if m.whole:
            number = tl.where(rows[0] < rows[1], 16, 0)  # one comparison for all rows
        queue = ask_lines(queue, lane, at, number, left, 0, V, m.words, 0, True)
    return queue


@triton.jit
def row_scales(scales, rows, lane, m: tl.constexpr):
    """A lane's scales of rows g and g + 8 for the units whose products it has, in turn, for each eight units."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    row, other_row, there, other_there = two_rows(rows, lane, m)
    found = ()
    for k in tl.static_range((m.pairs + 3) // 4):
        for odd in tl.static_range(2):
            unit = unit_of(8 * k + lane % 4 * 2 + odd, lane // 32, m.lanes // 32)
            place = unit // units_a_group(m.group, V)
            inside = unit < tl.where(there, segment_units(m.words, V), 0)
            other_inside = unit < tl.where(other_there, segment_units(m.words, V), 0)
            found = found + (tl.load(scales + row * groups_of(m.words, m.group) + place, mask=inside, other=0.0),)
            at = scales + other_row * groups_of(m.words, m.group) + place
            found = found + (tl.load(at, mask=other_inside, other=0.0),)
    return found


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
def ask_first_rows(queue, words, scales, rows, lane, m: tl.constexpr):
    """(the empty queue with the first m.ahead pairs of `rows` on their way, those that there are, all their scales)."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    tl.static_assert(not (m.listed and m.fetched), "the rows of a list are no neighbours")
    for k in tl.static_range(m.ahead):
        own = at_slot(queue, k, line_slot_bytes(m.lanes, V))
        queue = after_slot(queue, _ask(own, words, rows, k, lane, m))
    BEGIN: tl.constexpr = 8 * V * m.ahead * (m.lanes // 32)
    if m.fetched > 0 and BEGIN < m.words:
        row = rows[0] + lane
        at = words + row.to(tl.int64) * m.words + BEGIN
        fetch_ahead(at, (lane < 16) & (row < rows[1]), 4 * min(m.words - BEGIN, m.fetched))
    return queue, row_scales(scales, rows, lane, m)


@triton.jit
def new_queue(lane, m: tl.constexpr):
    """An empty queue, one a kernel."""
    return lane_queue(lane, max(m.room, row_queue_bytes(m.words, m.group, m.lanes, m.ahead)))


@triton.jit
def first_rows(words, scales, rows, lane, m: tl.constexpr):
    """`ask_first_rows` of a new queue, one a kernel."""
    return ask_first_rows(new_queue(lane, m), words, scales, rows, lane, m)


@triton.jit
def with_offsets(planes, m: tl.constexpr):
    """A lane's part of x, 4 V planes for each eight units, and behind them two numbers for each (`raised_offset`)."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    BODIES: tl.constexpr = (m.pairs + 3) // 4
    found = planes
    for k in tl.static_range(BODIES):
        found = found + raised_offset(planes[4 * V * k : 4 * V * k + 4 * V], V)
    return found


@triton.jit
def _pair_step(queue, slot, sums, s, x, offset, words, rows, next_rows, number, pair, lane, m: tl.constexpr):
    """(queue, slot, sums) after pair `pair` of the row, the `number`th of those that share x and s."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    own = at_slot(queue, slot, line_slot_bytes(m.lanes, V))
    for odd in tl.static_range(2):
        w, own = take_unit(own, lane, 0, odd, V, m.ahead - 1)
        part = raised_mma(w, x, offset, V)
        mine = lane % 4 == number
        sums = (
            tl.where(mine, sums[0] + part[odd] * s[odd * 2].to(tl.float32), sums[0]),
            tl.where(mine, sums[1] + part[2 + odd] * s[odd * 2 + 1].to(tl.float32), sums[1]),
        )
    again = pair + m.ahead < m.pairs
    asked = either(again, rows, next_rows, 12 if m.listed else 2)
    own = _ask(own, words, asked, tl.where(again, pair + m.ahead, pair + m.ahead - m.pairs), lane, m)
    return after_slot(queue, own), tl.where(slot + 1 < m.ahead, slot + 1, 0), sums


@triton.jit
def int4_rows_step(queue, slot, s, x, words, scales, rows, next_rows, lane, m: tl.constexpr):
    """(products of `rows` (16,), queue, first slot, scales of `next_rows`).

    queue, s: `first_rows` of `rows`, with the same constants, whose first slot is 0. x: `with_offsets` of
    `normalised_units` or `unit_pairs`. As soon as a pair is taken, the one that comes m.ahead pairs later is asked for.

    Pairs that share registers of x are a loop that stays one, from ROLLED_FROM pairs on and of listed rows.
    Instructions that a program reads once, or that are too many to be kept, take longer to come than words do. (66B's
    sparse MLP takes 10 us for fc1 in one piece, 5 in a loop.) Up to SHARE listed pairs are few enough for the assembler
    to unroll, which asks for the next pair's words sooner. The scales of `next_rows` are asked for behind the first
    eight units, where there are more, else before them.
    """
    V: tl.constexpr = unit_vector(m.words, m.group)
    BODIES: tl.constexpr = (m.pairs + 3) // 4
    SHARE: tl.constexpr = 4  # pairs that share registers of x, and four scales
    LATE: tl.constexpr = m.pairs > SHARE  # the first products come sooner
    if m.pairs % m.ahead == 0:
        slot = 0
    coming = ()
    if not LATE:
        coming = row_scales(scales, next_rows, lane, m)
    zero = tl.zeros(lane.shape, tl.float32)
    sums = (zero, zero)
    for first in tl.static_range(0, m.pairs, SHARE):
        own_x = x[V * first : V * first + 4 * V]
        own_s = s[first : first + 4]
        offset = x[4 * V * BODIES + first // 2 : 4 * V * BODIES + first // 2 + 2]
        if m.listed or m.pairs >= ROLLED_FROM:
            for number in range(0, as_it_comes(min(SHARE, m.pairs - first), LATE)):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, offset, words, rows, next_rows, number, first + number, lane, m
                )
        else:
            for number in tl.static_range(min(SHARE, m.pairs - first)):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, offset, words, rows, next_rows, number, first + number, lane, m
                )
        if LATE and first == 0:
            coming = row_scales(scales, next_rows, lane, m)
    return column_sums(sums[0], sums[1], m.lanes) * (1 / RAISED_UNIT), queue, slot, coming


@triton.jit
def _walk_units(x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    m: tl.constexpr = how.form
    lane = tl.arange(0, m.lanes)
    rows = (tl.program_id(0) * 16, n_rows)
    queue, s = first_rows(words, scales, rows, lane, m)
    norms = unit_norms(norm, lane, m.words, m.group)
    wait_for_predecessor(PDL)
    n, _, _ = normalised_units(x, norms, norm, lane, m.words, m.group)
    n = with_offsets(n, m)
    step = tl.num_programs(0) * 16
    slot = 0
    for begin in range(tl.program_id(0) * 16, n_rows, step):
        lines = begin + tl.arange(0, 16)
        inside = lines < n_rows
        ahead = sink.ahead(sink, lines, 0, inside, inside, n_rows)
        values, queue, slot, s = int4_rows_step(
            queue, slot, s, n, words, scales, (begin, n_rows), (begin + step, n_rows), lane, m
        )
        sink.put(sink, values, ahead, lines, 0, inside, n_rows)


@keyed
class UnitWalk(NamedTuple):
    """A program's walk over rows, sixteen at a time, with one row, which it normalises and rounds to fp16.

    The first words are on their way before the wait for the stage before."""

    form: Int4Form
    walk: Any = _walk_units
