# mypy: disable-error-code="assignment"
"""Sixteen rows of 4-bit words times one input, a program's warps sharing out the columns, row after row of a matrix.

The products are those of `int4_mma` with one input. Words come through a queue in lines of 128 bytes (`lane_queue`),
in rounds: a slot is a constant, though no number need divide a row's pairs of units.
"""

import triton
import triton.language as tl

from kernels.common.int4_mma import column_sums, groups_of, int4_mma, unit_vector, units_a_group
from kernels.common.lane_queue import ask_lines, fetch_ahead, lane_queue, line_slot_bytes, take_unit


@triton.constexpr_function
def pairs_of_a_warp(words, vector, warps):
    """Pairs of units of a row that each warp takes, some of them beyond the row's end perhaps."""
    pairs = -(-words // (8 * vector))
    return -(-pairs // warps)


@triton.constexpr_function
def rounds_of(pairs, most):
    """How many rounds through a queue of at most `most` slots a warp's pairs of a row take: as few as can be."""
    return -(-pairs // most)


@triton.constexpr_function
def round_slots(pairs, rounds):
    """Slots of such a queue."""
    return -(-pairs // rounds)


@triton.constexpr_function
def row_queue_bytes(words, group, lanes, rounds):
    """Shared memory of the queue of `first_rows`."""
    vector = unit_vector(words, group)
    return round_slots(pairs_of_a_warp(words, vector, lanes // 32), rounds) * line_slot_bytes(lanes, vector)


@triton.constexpr_function
def pair_slot(pair, pairs, rounds):
    """The slot of a warp's pair, the same in every tile: each round begins with slot 0, longer rounds come first.

    So a slot is asked for anew pairs // rounds pairs later at the soonest, whether or not rounds are equally long.
    """
    short, longer = pairs // rounds, pairs % rounds
    return pair % (short + 1) if pair < longer * (short + 1) else (pair - longer * (short + 1)) % short


@triton.jit
def unit_of(step, warp, WARPS: tl.constexpr):
    """The unit of a row that a warp takes as its number `step`: warps take pairs of neighbouring units in turn."""
    return (step // 2 * WARPS + warp) * 2 + step % 2


@triton.jit
def _two_rows(line, n_rows, lane):
    """A lane's rows line + g and line + g + 8; of those beyond the last one, the last."""
    row = line + lane % 32 // 4
    return tl.minimum(row, n_rows - 1).to(tl.int64), tl.minimum(row + 8, n_rows - 1).to(tl.int64)


@triton.jit
def _ask_rows(
    queue, words, line, n_rows, lane, PAIR: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, ROUNDS: tl.constexpr,
    WHOLE: tl.constexpr, THERE: tl.constexpr,
):  # fmt: skip
    """The queue with the words of rows line .. line + 15 for the warp's pair number PAIR on their way.

    THERE: line itself is one of the rows. Rows from n_rows on are not read; WHOLE: n_rows is a multiple of 16.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    WARPS: tl.constexpr = lane.shape[0] // 32
    START: tl.constexpr = PAIR * WARPS * 8 * V
    INSIDE: tl.constexpr = START + WARPS * 8 * V <= W
    SLOT: tl.constexpr = pair_slot(PAIR, pairs_of_a_warp(W, V, WARPS), ROUNDS)
    place = lane // 32 * (8 * V)
    at = words + tl.cast(line, tl.int64) * W + place
    rows = n_rows - line
    if WHOLE:
        rows = tl.where(line < n_rows, 16, 0)  # one comparison for all rows
    left = tl.full(lane.shape, 8 * V, tl.int32)
    if not INSIDE:
        left = W - START - place
    return ask_lines(queue, lane, at, rows, left, SLOT, V, W, START, not (INSIDE and WHOLE and THERE))


@triton.jit
def _row_scales(scales, line, n_rows, lane, W: tl.constexpr, GROUP: tl.constexpr):
    """A lane's scales of rows line + g and line + g + 8 for each eight units: those of units 2 t and 2 t + 1."""
    V: tl.constexpr = unit_vector(W, GROUP)
    WARPS: tl.constexpr = lane.shape[0] // 32
    G: tl.constexpr = groups_of(W, GROUP)
    row, other_row = _two_rows(line, n_rows, lane)
    found = ()
    for octet in tl.static_range((pairs_of_a_warp(W, V, WARPS) + 3) // 4):
        for odd in tl.static_range(2):
            unit = unit_of(8 * octet + lane % 4 * 2 + odd, lane // 32, WARPS)
            there = unit * (4 * V) < tl.where(line < n_rows, W, 0)
            place = unit // units_a_group(GROUP, V)
            found = found + (tl.load(scales + row * G + place, mask=there, other=0.0),)
            found = found + (tl.load(scales + other_row * G + place, mask=there, other=0.0),)
    return found


@triton.jit
def first_rows(
    words, scales, line, n_rows, lane, W: tl.constexpr, GROUP: tl.constexpr, ROUNDS: tl.constexpr,
    WHOLE: tl.constexpr, FETCHED: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(a queue with the first pairs of rows line .. line + 15, if there are such rows, and all their scales).

    ROUNDS: `rounds_of` a warp's pairs; WHOLE: n_rows is a multiple of 16. The L2 is asked for the FETCHED words of each
    row that come next. ROOM: bytes that the queue takes at least (`lane_queue.even_room`).
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    L: tl.constexpr = lane.shape[0]
    PAIRS: tl.constexpr = pairs_of_a_warp(W, V, L // 32)
    AHEAD: tl.constexpr = PAIRS // ROUNDS
    queue = lane_queue(lane, max(ROOM, row_queue_bytes(W, GROUP, L, ROUNDS)))
    for k in tl.static_range(AHEAD):
        queue = _ask_rows(queue, words, line, n_rows, lane, k, W, GROUP, ROUNDS, WHOLE, False)
    BEGIN: tl.constexpr = 8 * V * AHEAD * (L // 32)
    if FETCHED > 0 and BEGIN < W:
        row = line + lane
        at = words + row.to(tl.int64) * W + BEGIN
        fetch_ahead(at, (lane < 16) & (row < n_rows), 4 * min(W - BEGIN, FETCHED))
    return queue, _row_scales(scales, line, n_rows, lane, W, GROUP)


@triton.jit
def int4_rows_step(
    queue, s, x, words, scales, line, next_line, n_rows, lane, W: tl.constexpr, GROUP: tl.constexpr,
    ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Products (16,) of rows line .. line + 15 with x, and queue and scales of the rows from next_line on.

    queue, s: `first_rows` of line, with the same ROUNDS and WHOLE; x: `normalised_units`. As soon as a pair is taken,
    the one that comes AHEAD pairs later is asked for.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    PAIRS: tl.constexpr = pairs_of_a_warp(W, V, lane.shape[0] // 32)
    AHEAD: tl.constexpr = PAIRS // ROUNDS
    first = tl.zeros(lane.shape, tl.float32)
    second = tl.zeros(lane.shape, tl.float32)
    coming = _row_scales(scales, next_line, n_rows, lane, W, GROUP)
    for k in tl.static_range(PAIRS):
        for odd in tl.static_range(2):
            w, queue = take_unit(queue, lane, pair_slot(k, PAIRS, ROUNDS), odd, V, AHEAD - 1)
            part = int4_mma(w, x[k // 4 * 4 * V : k // 4 * 4 * V + 4 * V], V)
            mine = lane % 4 == k % 4
            first = tl.where(mine, first + part[odd] * s[k // 4 * 4 + odd * 2].to(tl.float32), first)
            second = tl.where(mine, second + part[2 + odd] * s[k // 4 * 4 + odd * 2 + 1].to(tl.float32), second)
        if k + AHEAD < PAIRS:
            queue = _ask_rows(queue, words, line, n_rows, lane, k + AHEAD, W, GROUP, ROUNDS, WHOLE, True)
        else:
            queue = _ask_rows(queue, words, next_line, n_rows, lane, k + AHEAD - PAIRS, W, GROUP, ROUNDS, WHOLE, False)
    return column_sums(first, second, lane.shape[0]), queue, coming
