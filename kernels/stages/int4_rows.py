"""Sixteen rows of 4-bit words times one, two, four or eight inputs ("tokens"), rows after rows of a matrix.

    y[b, i] = sum_h sum_j code[h, i, j] scale[h, i, j // group] x[b, h 8 W + j]

Segments h of W words a row each: a matrix has one, the output projection's head-major rows one a head. A program's
warps share out the columns, in pairs of units: two of a row, or of two segments. The products are those of `int4_mma`.

T tokens lie in the columns of B as 8 / T units side by side. Column n is token n % T of unit n // T. In registers, a
lane holds T times as much of x as of one token. In C, lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8. Its
columns 2 t and 2 t + 1 are two units of one token or two tokens of one unit.

Words come through a queue in lines of 128 bytes (`lane_queue`), slot after slot, whatever number divides a row's pairs
of units. Rows are neighbours, then `rows` = (first row, end of the matrix). Or they are listed, and lie anywhere. Then
`rows` = six numbers of each lane's rows (`lane_queue.listed_row`) and six flags, whether such a row is read. Products
of rows that are not read have no meaning (listed: they are zero).

What a thread cannot hold of x at once it takes in passes over the rows: pairs `begin` .. `begin` + m.pairs - 1 of each
warp. Pairs beyond a warp's last one are not read. m: `Int4Form`. In plain torch:
`kernels.dense.int4_batch.int4_by_head_reference`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.int4_mma import (
    column_sums,
    groups_of,
    int4_mma,
    pairs_of_a_warp,
    scaled,
    segment_units,
    tile_sums,
    unit_of,
    unit_vector,
    units_a_group,
)
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import (
    after_slot,
    as_it_comes,
    ask_lines,
    ask_listed_lines,
    ask_units,
    at_slot,
    fetch_ahead,
    lane_queue,
    line_slot_bytes,
    listed_row,
    take_unit,
)

ROLLED_FROM = tl.constexpr(5)  # pairs of a warp: whole steps of 6.7B, where dense rows have 4, are faster without


class Int4Form(NamedTuple):
    """What a kernel knows of its rows, all constants.

    words: of a row of a segment. pairs: of units of a warp in one pass. ahead: pairs that the queue has room for, at
    most `pairs`. whole: there are a multiple of 16 rows. fetched: words of each first row that the L2 is asked for
    behind those in the queue. room: bytes that the queue takes at least (`lane_queue.even_room`).
    """

    words: int
    group: int
    lanes: int
    pairs: int
    ahead: int
    whole: bool = False
    listed: bool = False
    tokens: int = 1
    segments: int = 1
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


@triton.constexpr_function
def bodies(pairs, tokens):
    """How many groups of 8 / T units, whose parts of x share registers, a warp has of so many pairs."""
    return -(-2 * pairs * tokens // 8)


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
def _unit_place(unit, n_rows, m: tl.constexpr):
    """(words from a row of the first segment to that row's unit, how many words the unit has)."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    UNITS: tl.constexpr = segment_units(m.words, V)
    word = unit % UNITS * (4 * V)
    left = tl.where(unit < m.segments * UNITS, m.words - word, 0)
    return unit // UNITS * (n_rows * m.words) + word, left


@triton.jit
def _ask(queue, words, rows, pair, lane, m: tl.constexpr):
    """The queue with the words of sixteen rows for the warp's pair number `pair` on their way, in its first slot."""
    W: tl.constexpr = m.words
    V: tl.constexpr = unit_vector(W, m.group)
    WARPS: tl.constexpr = m.lanes // 32
    INSIDE: tl.constexpr = m.tokens == 1 and pairs_of_a_warp(W, V, WARPS) * WARPS * 8 * V <= W
    place = pair * (WARPS * 8 * V) + lane // 32 * (8 * V)
    left = tl.full(lane.shape, 8 * V, tl.int32)
    if not INSIDE:
        left = W - place
    if m.segments > 1:
        unit = (pair * WARPS + lane // 32) * 2
        first, left_first = _unit_place(unit, rows[1], m)
        second, left_second = _unit_place(unit + 1, rows[1], m)
        at = words + tl.cast(rows[0], tl.int64) * W
        queue = ask_units(queue, lane, at, first, second, rows[1] - rows[0], left_first, left_second, V, W)
    elif m.listed:
        queue = ask_listed_lines(queue, lane, words + place, rows[:6], rows[6:], left, V, W, INSIDE)
    else:
        at = words + tl.cast(rows[0], tl.int64) * W + place
        number = rows[1] - rows[0]
        if m.whole:
            number = tl.where(rows[0] < rows[1], 16, 0)  # one comparison for all rows
        queue = ask_lines(queue, lane, at, number, left, 0, V, W, 0, True)
    return queue


@triton.jit
def row_scales(scales, rows, begin, lane, m: tl.constexpr):
    """A lane's scales of rows g and g + 8 for the units whose products it has, in turn, for each of `bodies`."""
    W: tl.constexpr = m.words
    V: tl.constexpr = unit_vector(W, m.group)
    T: tl.constexpr = m.tokens
    UNITS: tl.constexpr = segment_units(W, V)
    row, other_row, there, other_there = two_rows(rows, lane, m)
    found = ()
    for k in tl.static_range(bodies(m.pairs, T)):
        for odd in tl.static_range(2 if T == 1 else 1):  # columns of C: two units, or two tokens of one
            unit = unit_of(2 * begin + 8 // T * k + lane % 4 * 2 // T + odd, lane // 32, m.lanes // 32)
            if m.segments == 1:
                place = unit // units_a_group(m.group, V)
                at = row * groups_of(W, m.group) + place
                other_at = other_row * groups_of(W, m.group) + place
            else:
                segment = unit // UNITS * rows[1]
                at = row + segment
                other_at = other_row + segment
            inside = unit < tl.where(there, m.segments * UNITS, 0)
            other_inside = unit < tl.where(other_there, m.segments * UNITS, 0)
            found = found + (tl.load(scales + at, mask=inside, other=0.0),)
            found = found + (tl.load(scales + other_at, mask=other_inside, other=0.0),)
    return found


@triton.jit
def token_planes(x, batch, begin, lane, m: tl.constexpr):
    """4 V planes of fp16 pairs for each of `bodies`: a lane's part of x (B, segments 8 W), here its int32 pairs. Tokens
    from `batch` on are the last one again."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    T: tl.constexpr = m.tokens
    UNITS: tl.constexpr = segment_units(m.words, V)
    column = lane % 32 // 4
    row = x + tl.minimum(column % T, batch - 1).to(tl.int64) * (4 * m.segments * m.words)
    planes = ()
    for k in tl.static_range(bodies(m.pairs, T)):
        unit = unit_of(2 * begin + 8 // T * k + column // T, lane // 32, m.lanes // 32)
        word = unit % UNITS * (4 * V) + lane % 4 * V
        there = (word < m.words) & (unit < m.segments * UNITS)
        word += unit // UNITS * m.words
        for v in tl.static_range(V):
            at = (row + 4 * (word + v))[:, None] + tl.arange(0, 4)[None, :]
            planes = planes + split_words(tl.load(at, mask=there[:, None], other=0), 4)
    return planes


@triton.jit
def _either(first, one, two, N: tl.constexpr):
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
def ask_first_rows(queue, words, scales, rows, begin, lane, m: tl.constexpr):
    """(the empty queue with the first m.ahead pairs of `rows` on their way, those that there are, all their scales)."""
    W: tl.constexpr = m.words
    V: tl.constexpr = unit_vector(W, m.group)
    tl.static_assert(not (m.listed and m.fetched), "the rows of a list are no neighbours")
    for k in tl.static_range(m.ahead):
        own = at_slot(queue, k, line_slot_bytes(m.lanes, V))
        queue = after_slot(queue, _ask(own, words, rows, begin + k, lane, m))
    BEGIN: tl.constexpr = 8 * V * m.ahead * (m.lanes // 32)
    if m.fetched > 0 and BEGIN < W:
        row = rows[0] + lane
        at = words + row.to(tl.int64) * W + BEGIN
        fetch_ahead(at, (lane < 16) & (row < rows[1]), 4 * min(W - BEGIN, m.fetched))
    return queue, row_scales(scales, rows, begin, lane, m)


@triton.jit
def first_rows(words, scales, rows, lane, m: tl.constexpr):
    """`ask_first_rows` of a new queue, one a kernel."""
    queue = lane_queue(lane, max(m.room, row_queue_bytes(m.words, m.group, m.lanes, m.ahead)))
    return ask_first_rows(queue, words, scales, rows, 0, lane, m)


@triton.jit
def _pair_step(queue, slot, sums, s, x, words, rows, next_rows, begin, number, pair, lane, m: tl.constexpr):
    """(queue, slot, sums) after pair `pair` of the pass, the `number`th of those that share x and s."""
    V: tl.constexpr = unit_vector(m.words, m.group)
    T: tl.constexpr = m.tokens
    own = at_slot(queue, slot, line_slot_bytes(m.lanes, V))
    for odd in tl.static_range(2):
        w, own = take_unit(own, lane, 0, odd, V, m.ahead - 1)
        if T == 8:
            part = int4_mma(w, x[4 * V * odd : 4 * V * odd + 4 * V], V)
            more = scaled(sums, part, s[2 * odd], s[2 * odd + 1])
        elif T == 1:
            part = int4_mma(w, x, V)
            mine = lane % 4 == number
            more = (
                tl.where(mine, sums[0] + part[odd] * s[odd * 2].to(tl.float32), sums[0]),
                tl.where(mine, sums[1] + part[2 + odd] * s[odd * 2 + 1].to(tl.float32), sums[1]),
            )
        else:
            part = int4_mma(w, x, V)
            more = scaled(sums, part, s[0], s[1])
            mine = lane % 4 * 2 // T == 2 * number + odd
            more = (
                tl.where(mine, more[0], sums[0]),
                tl.where(mine, more[1], sums[1]),
                tl.where(mine, more[2], sums[2]),
                tl.where(mine, more[3], sums[3]),
            )
        sums = more
    again = pair + m.ahead < m.pairs
    asked = _either(again, rows, next_rows, 12 if m.listed else 2)
    next_pair = begin + tl.where(again, pair + m.ahead, pair + m.ahead - m.pairs)
    own = _ask(own, words, asked, next_pair, lane, m)
    return after_slot(queue, own), tl.where(slot + 1 < m.ahead, slot + 1, 0), sums


@triton.jit
def no_sums(lane, m: tl.constexpr):
    """The sums that products are added to: two tiles (L,) of one token, four of several."""
    zero = tl.zeros(lane.shape, tl.float32)
    sums = (zero, zero)
    if m.tokens > 1:
        sums = sums + sums
    return sums


@triton.jit
def row_values(sums, m: tl.constexpr):
    """What the sums come to: (16,) of one token, (16, T) of several."""
    if m.tokens == 1:
        values = column_sums(sums[0], sums[1], m.lanes)
    else:
        values = tile_sums(sums, m.lanes, m.tokens)
    return values


@triton.jit
def int4_rows_step(queue, slot, sums, s, x, words, scales, rows, next_rows, begin, lane, m: tl.constexpr):
    """(sums with the pass's products of `rows` and all tokens, queue, first slot, scales of `next_rows`).

    queue, s: `first_rows` of `rows`, with the same constants, whose first slot is 0. x: `token_planes`, or of one token
    `normalised_units` or `unit_pairs`. As soon as a pair is taken, the one that comes m.ahead pairs later is asked for.

    Pairs that share registers of x are a loop that stays one, of one token from ROLLED_FROM pairs on and of listed
    rows. Instructions that a program reads once, or that are too many to be kept, take longer to come than words do.
    (66B's sparse MLP takes 10 us for fc1 in one piece, 5 in a loop.) Of one token the scales of `next_rows` are asked
    for behind the first eight units, where there are more, else before them.
    """
    V: tl.constexpr = unit_vector(m.words, m.group)
    T: tl.constexpr = m.tokens
    PAIRS: tl.constexpr = m.pairs
    SHARE: tl.constexpr = max(1, 4 // T)  # pairs that share registers of x
    EACH: tl.constexpr = max(1, T // 4)  # bodies of a pair, or of those
    SCALES: tl.constexpr = 4 if T == 1 else 2 * EACH
    LATE: tl.constexpr = T == 1 and PAIRS > 4  # the first products come sooner
    if PAIRS % m.ahead == 0:
        slot = 0
    coming = ()
    if not LATE:
        coming = row_scales(scales, next_rows, begin, lane, m)
    for first in tl.static_range(0, PAIRS, SHARE):
        own_x = x[4 * V * EACH * (first // SHARE) : 4 * V * EACH * (first // SHARE + 1)]
        own_s = s[SCALES * (first // SHARE) : SCALES * (first // SHARE + 1)]
        if SHARE > 1 and (T > 1 or m.listed or PAIRS >= ROLLED_FROM):
            for number in range(0, as_it_comes(min(SHARE, PAIRS - first))):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, words, rows, next_rows, begin, number, first + number, lane, m
                )
        else:
            for number in tl.static_range(min(SHARE, PAIRS - first)):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, words, rows, next_rows, begin, number, first + number, lane, m
                )
        if LATE and first == 0:
            coming = row_scales(scales, next_rows, begin, lane, m)
    return sums, queue, slot, coming
