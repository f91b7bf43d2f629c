"""Sixteen rows of 4-bit words times two, four or eight tokens, rows after rows of a matrix.

    y[b, i] = sum_h sum_j code[h, i, j] scale[h, i, j // group] x[b, h 8 W + j]

Segments h of W words a row each: a matrix has one, the output projection's head-major rows one a head. The products are
those of `int4_row_step`. T tokens lie in the columns of B as 8 / T units side by side, so that a lane holds T times as
much of x as of one token, in registers: column n has token n % T of unit n // T. A program's warps share out the units,
in pairs: two of a row, or of two segments. Of C lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8 for columns 2 t
and 2 t + 1, which are two tokens of one unit.

What a thread cannot hold of x at once it takes in passes over the rows: pairs `begin` .. `begin` + PAIRS - 1 of each
warp, which all functions here name. pairs beyond a warp's last one are not read. In plain torch:
`dejavu_train.kernels.dense.int4_batch.int4_by_head_reference`.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.int4_mma import groups_of, int4_mma, scaled, unit_vector, units_a_group
from dejavu_train.kernels.common.int4_row_step import either, two_rows, unit_of
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import (
    after_slot,
    as_it_comes,
    ask_lines,
    ask_listed_lines,
    ask_units,
    at_slot,
    line_slot_bytes,
    take_unit,
)


@triton.constexpr_function
def segment_units(words, group):
    """Units of a row of one segment of so many words, the last one perhaps not whole."""
    return -(-words // (4 * unit_vector(words, group)))


@triton.constexpr_function
def token_pairs_of_a_warp(words, group, segments, warps):
    """Pairs of units that each warp takes, some of them beyond the last segment's end perhaps."""
    pairs = -(-segments * segment_units(words, group) // 2)
    return -(-pairs // warps)


@triton.constexpr_function
def bodies(pairs, tokens):
    """How many groups of 8 / T units, whose parts of x share registers, a warp has of so many pairs."""
    return -(-2 * pairs * tokens // 8)


@triton.jit
def _unit_place(unit, n_rows, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr):
    """(words from a row of the first segment to that row's unit, how many words the unit has)."""
    V: tl.constexpr = unit_vector(W, GROUP)
    UNITS: tl.constexpr = segment_units(W, GROUP)
    word = unit % UNITS * (4 * V)
    left = tl.where(unit < SEGMENTS * UNITS, W - word, 0)
    return unit // UNITS * (n_rows * W) + word, left


@triton.jit
def _ask(
    queue, words, rows, pair, lane, n_rows, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
    WHOLE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The queue with the words of sixteen rows for the warp's pair number `pair` on their way, in its first slot."""
    V: tl.constexpr = unit_vector(W, GROUP)
    unit = (pair * (lane.shape[0] // 32) + lane // 32) * 2
    if SEGMENTS > 1:
        first, left_first = _unit_place(unit, n_rows, W, GROUP, SEGMENTS)
        second, left_second = _unit_place(unit + 1, n_rows, W, GROUP, SEGMENTS)
        at = words + tl.cast(rows[0], tl.int64) * W
        queue = ask_units(queue, lane, at, first, second, rows[1] - rows[0], left_first, left_second, V, W)
    elif LISTED:
        left = W - unit * (4 * V)
        queue = ask_listed_lines(queue, lane, words + unit * (4 * V), rows[:6], rows[6:], left, V, W, False)
    else:
        at = words + tl.cast(rows[0], tl.int64) * W + unit * (4 * V)
        number = rows[1] - rows[0]
        if WHOLE:
            number = tl.where(rows[0] < rows[1], 16, 0)  # one comparison for all rows
        queue = ask_lines(queue, lane, at, number, W - unit * (4 * V), 0, V, W, 0, True)
    return queue


@triton.jit
def token_scales(
    scales, rows, begin, lane, n_rows, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr, T: tl.constexpr,
    LISTED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A lane's scales of rows g and g + 8 for the units whose products it has, two for each of `bodies`."""
    V: tl.constexpr = unit_vector(W, GROUP)
    UNITS: tl.constexpr = segment_units(W, GROUP)
    row, other_row, there, other_there = two_rows(rows, lane, LISTED)
    found = ()
    for k in tl.static_range(bodies(PAIRS, T)):
        unit = unit_of(2 * begin + 8 // T * k + lane % 4 * 2 // T, lane // 32, lane.shape[0] // 32)
        if SEGMENTS == 1:
            place = unit // units_a_group(GROUP, V)
            at = row * groups_of(W, GROUP) + place
            other_at = other_row * groups_of(W, GROUP) + place
        else:
            segment = unit // UNITS * n_rows
            at = row + segment
            other_at = other_row + segment
        inside = unit < tl.where(there, SEGMENTS * UNITS, 0)
        other_inside = unit < tl.where(other_there, SEGMENTS * UNITS, 0)
        found = found + (tl.load(scales + at, mask=inside, other=0.0),)
        found = found + (tl.load(scales + other_at, mask=other_inside, other=0.0),)
    return found


@triton.jit
def token_planes(
    x, batch, begin, lane, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr, T: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """4 V planes of fp16 pairs for each of `bodies`: a lane's part of x (B, SEGMENTS 8 W), here its int32 pairs. tokens
    from `batch` on are the last one again."""
    V: tl.constexpr = unit_vector(W, GROUP)
    UNITS: tl.constexpr = segment_units(W, GROUP)
    column = lane % 32 // 4
    row = x + tl.minimum(column % T, batch - 1).to(tl.int64) * (4 * SEGMENTS * W)
    planes = ()
    for k in tl.static_range(bodies(PAIRS, T)):
        unit = unit_of(2 * begin + 8 // T * k + column // T, lane // 32, lane.shape[0] // 32)
        word = unit % UNITS * (4 * V) + lane % 4 * V
        there = (word < W) & (unit < SEGMENTS * UNITS)
        word += unit // UNITS * W
        for v in tl.static_range(V):
            at = (row + 4 * (word + v))[:, None] + tl.arange(0, 4)[None, :]
            planes = planes + split_words(tl.load(at, mask=there[:, None], other=0), 4)
    return planes


@triton.jit
def ask_first_rows(
    queue, words, rows, begin, lane, n_rows, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
    AHEAD: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The empty queue with the first AHEAD pairs of `rows` on their way.

    rows: as in `int4_row_step`. n_rows: of a segment. WHOLE: that is a multiple of 16.
    """
    for k in tl.static_range(AHEAD):
        own = at_slot(queue, k, line_slot_bytes(lane.shape[0], unit_vector(W, GROUP)))
        queue = after_slot(queue, _ask(own, words, rows, begin + k, lane, n_rows, W, GROUP, SEGMENTS, WHOLE, LISTED))
    return queue


@triton.jit
def _pair_step(
    queue, slot, sums, s, x, words, rows, next_rows, begin, number, pair, lane, n_rows, W: tl.constexpr,
    GROUP: tl.constexpr, SEGMENTS: tl.constexpr, T: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """(queue, slot, sums) after pair `pair` of the pass, the `number`th of those that share x and s."""
    V: tl.constexpr = unit_vector(W, GROUP)
    own = at_slot(queue, slot, line_slot_bytes(lane.shape[0], V))
    for odd in tl.static_range(2):
        w, own = take_unit(own, lane, 0, odd, V, AHEAD - 1)
        if T == 8:
            part = int4_mma(w, x[4 * V * odd : 4 * V * odd + 4 * V], V)
            more = scaled(sums, part, s[2 * odd], s[2 * odd + 1])
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
    again = pair + AHEAD < PAIRS
    asked = either(again, rows, next_rows, 12 if LISTED else 2)
    next_pair = begin + tl.where(again, pair + AHEAD, pair + AHEAD - PAIRS)
    own = _ask(own, words, asked, next_pair, lane, n_rows, W, GROUP, SEGMENTS, WHOLE, LISTED)
    return after_slot(queue, own), tl.where(slot + 1 < AHEAD, slot + 1, 0), sums


@triton.jit
def int4_tokens_step(
    queue, slot, sums, s, x, words, scales, rows, next_rows, begin, lane, n_rows, W: tl.constexpr, GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr, T: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """(sums with the pass's products of `rows` and T tokens, queue, first slot, scales of `next_rows`).

    sums: four tiles (L,), see `int4_mma.tile_sums`. queue: `ask_first_rows` of `rows`, with the same constants, whose
    first slot is 0. s: `token_scales`. x: `token_planes`. As soon as a pair is taken, the one that comes AHEAD pairs
    later is asked for. Of two tokens two pairs share registers of x, and are a loop that stays one (`int4_row_step`
    says why).
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    SHARE: tl.constexpr = max(1, 4 // T)  # pairs that share registers of x
    EACH: tl.constexpr = max(1, T // 4)  # bodies of a pair, or of those
    if PAIRS % AHEAD == 0:
        slot = 0
    coming = token_scales(scales, next_rows, begin, lane, n_rows, W, GROUP, SEGMENTS, T, LISTED, PAIRS)
    for first in tl.static_range(0, PAIRS, SHARE):
        own_x = x[4 * V * EACH * (first // SHARE) : 4 * V * EACH * (first // SHARE + 1)]
        own_s = s[2 * EACH * (first // SHARE) : 2 * EACH * (first // SHARE + 1)]
        if SHARE > 1:
            for number in range(0, as_it_comes(min(SHARE, PAIRS - first))):
                queue, slot, sums = _pair_step(
                    queue, slot, sums, own_s, own_x, words, rows, next_rows, begin, number, first + number, lane,
                    n_rows, W, GROUP, SEGMENTS, T, AHEAD, WHOLE, LISTED, PAIRS,
                )  # fmt: skip
        else:
            queue, slot, sums = _pair_step(
                queue, slot, sums, own_s, own_x, words, rows, next_rows, begin, 0, first, lane, n_rows, W, GROUP,
                SEGMENTS, T, AHEAD, WHOLE, LISTED, PAIRS,
            )  # fmt: skip
    return sums, queue, slot, coming
