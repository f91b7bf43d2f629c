"""Two to eight tokens times rows of 4-bit words, neighbours or listed: blocks of tiles of sixteen rows.

    y[b, i] = sum_h sum_j code[h, i, j] scale[h, i, j // group] x[b, h 8 W + j]

Segments h of W words a row each: a matrix has one, the output projection's head-major rows one a head. The warps of a
program share out the columns, in pairs of units: two of a row, or of two segments. `raised_mma` multiplies them.

T tokens, a power of two, lie in the columns of B as 8 / T units side by side. Column n is token n % T of unit n // T.
In C, lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8. Its columns 2 t and 2 t + 1 are two tokens of one unit.

A program walks over the columns once for each block of tiles. In a turn the tokens of max(1, 4 / T) pairs come out of
the caches into registers. All tiles of the block are multiplied with them. The sums of a block stay in registers.
Tokens and scales of a turn are read while the turn before is multiplied.

Words come through a queue in lines of 128 bytes (`lane_queue`), `ahead` pairs before they are taken. What lies beyond
the last row or column is not read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.int4_mma import (
    RAISED_UNIT,
    from_lane,
    groups_of,
    pairs_of_a_warp,
    raised_mma,
    raised_offset,
    scaled,
    segment_units,
    tile_sums,
    unit_of,
    unit_vector,
    units_a_group,
)
from dejavu_train.kernels.common.int4_tiles import half_of, split_words
from dejavu_train.kernels.common.lane_queue import (
    after_slot,
    as_it_comes,
    ask_lines,
    ask_listed_lines,
    ask_units,
    at_slot,
    lane_queue,
    line_slot_bytes,
    listed_row,
    take_unit,
)
from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.listed import keyed


@triton.constexpr_function
def pairs_a_turn(tokens):
    """Pairs of units of a warp whose parts of x share registers."""
    return max(1, 4 // tokens)


@triton.constexpr_function
def turns_of(words, group, warps, tokens, segments):
    """How often a warp reads other columns of x, some of the last ones beyond the row's end perhaps."""
    pairs = pairs_of_a_warp(words, unit_vector(words, group), warps, segments)
    return -(-pairs // pairs_a_turn(tokens))


@triton.constexpr_function
def ends_with_row(words, group, warps, tokens, segments):
    """Whether the warps' turns end where the rows do."""
    units = segments * segment_units(words, unit_vector(words, group))
    turns = turns_of(words, group, warps, tokens, segments)
    return words % (4 * unit_vector(words, group)) == 0 and turns * pairs_a_turn(tokens) * warps * 2 == units


@triton.constexpr_function
def pairs_of_scales(words, group, tokens, segments):
    """Whether the two units of a pair have scales side by side, which a lane reads at once."""
    one_each = units_a_group(group, unit_vector(words, group)) == 1
    return tokens == 8 and segments == 1 and one_each and groups_of(words, group) % 2 == 0


@triton.jit
def _unit_place(unit, n_rows, how: tl.constexpr):
    """(words from a row of the first segment to that row's unit, how many words the unit has)."""
    V: tl.constexpr = unit_vector(how.words, how.group)
    UNITS: tl.constexpr = segment_units(how.words, V)
    if how.segments == 1:
        place = unit * (4 * V)
        left = how.words - place
    else:
        word = unit % UNITS * (4 * V)
        left = tl.where(unit < how.segments * UNITS, how.words - word, 0)
        place = unit // UNITS * (n_rows * how.words) + word
    return place, left


@triton.jit
def _ask_pair(queue, slot, words, first, ids, end, pair, lane, how: tl.constexpr):
    """The queue with the words of the tile from `first` on for the warp's pair number `pair` on their way, in `slot`.

    ids: of a list, those of the tile's entries in the lanes 0..15 of each warp."""
    V: tl.constexpr = unit_vector(how.words, how.group)
    WARPS: tl.constexpr = how.lanes // 32
    INSIDE: tl.constexpr = ends_with_row(how.words, how.group, WARPS, how.tokens, how.segments)
    own = at_slot(queue, slot, line_slot_bytes(how.lanes, V))
    place = pair * (WARPS * 8 * V) + lane // 32 * (8 * V)
    left = tl.full(lane.shape, 8 * V, tl.int32)
    if not INSIDE:
        left = how.words - place
    if how.listed:
        rows = ()
        there = ()
        for k in tl.static_range(6):
            rows = rows + (from_lane(ids, listed_row(lane, k)),)
            there = there + (first + listed_row(lane, k) < end,)
        own = ask_listed_lines(own, lane, words + place, rows, there, left, V, how.words, INSIDE)
    elif how.segments > 1:
        unit = (pair * WARPS + lane // 32) * 2
        one, left_one = _unit_place(unit, end, how)
        two, left_two = _unit_place(unit + 1, end, how)
        at = words + tl.cast(first, tl.int64) * how.words
        own = ask_units(own, lane, at, one, two, end - first, left_one, left_two, V, how.words)
    else:
        at = words + tl.cast(first, tl.int64) * how.words + place
        number = end - first
        if how.whole:
            number = tl.where(first < end, 16, 0)  # one comparison for all rows
        own = ask_lines(own, lane, at, number, left, 0, V, how.words, 0, True)
    return after_slot(queue, own)


@triton.jit
def _ask_later(
    queue, slot, words, firsts, ids, end, step, turn, LATER: tl.constexpr, lane, how: tl.constexpr
):  # fmt: skip
    """`_ask_pair` of the pair that is number LATER from the begin of a turn on, perhaps of the next block."""
    PAIRS: tl.constexpr = pairs_a_turn(how.tokens)
    TURNS: tl.constexpr = turns_of(how.words, how.group, how.lanes // 32, how.tokens, how.segments)
    TILE: tl.constexpr = LATER // PAIRS % how.tiles
    later_turn = turn + LATER // (PAIRS * how.tiles)
    over = later_turn >= TURNS
    pair = tl.where(over, later_turn - TURNS, later_turn) * PAIRS + LATER % PAIRS
    tile = tl.where(over, firsts[1], firsts[0]) + TILE * step
    own_ids = tl.where(over, ids[1][TILE], ids[0][TILE])
    return _ask_pair(queue, slot, words, tile, own_ids, end, pair, lane, how)


@triton.jit
def _tile_scales(scales, first, ids, end, turn, lane, how: tl.constexpr):
    """A lane's scales of rows g and g + 8 of a tile, for the units of a turn whose products it has, fp16.

    Or where `pairs_of_scales`, those of both units of a pair, int32."""
    V: tl.constexpr = unit_vector(how.words, how.group)
    UNITS: tl.constexpr = segment_units(how.words, V)
    WARPS: tl.constexpr = how.lanes // 32
    GROUPS: tl.constexpr = groups_of(how.words, how.group)
    INSIDE: tl.constexpr = ends_with_row(how.words, how.group, WARPS, how.tokens, how.segments) and not how.listed
    PAIRED: tl.constexpr = pairs_of_scales(how.words, how.group, how.tokens, how.segments)
    found = ()
    for k in tl.static_range(1 if PAIRED else max(1, how.tokens // 4)):
        unit = unit_of(2 * turn * pairs_a_turn(how.tokens) + k + lane % 4 * 2 // how.tokens, lane // 32, WARPS)
        for half in tl.static_range(2):
            line = first + listed_row(lane, 4 + half)
            if how.listed:
                row = from_lane(ids, listed_row(lane, 4 + half))
            else:
                row = tl.minimum(line, end - 1)  # sums of rows beyond the matrix are not stored
            if PAIRED:
                at = scales.to(tl.pointer_type(tl.int32), bitcast=True) + (row * (GROUPS // 2) + unit // 2)
            elif how.segments == 1:
                at = scales + (row * GROUPS + unit // units_a_group(how.group, V))
            else:
                at = scales + (unit // UNITS * end + row)
            if INSIDE:
                found = found + (tl.load(at),)
            else:
                found = found + (tl.load(at, mask=(line < end) & (unit < how.segments * UNITS), other=0),)
    return found


@triton.jit
def _token_planes(x, batch, turn, lane, how: tl.constexpr):
    """4 V planes of fp16 pairs for each 8 / T units of a turn: a lane's part of x.

    x: (B, segments 8 W), here its int32 pairs. Tokens from `batch` on are the last one again."""
    V: tl.constexpr = unit_vector(how.words, how.group)
    WARPS: tl.constexpr = how.lanes // 32
    INSIDE: tl.constexpr = ends_with_row(how.words, how.group, WARPS, how.tokens, how.segments)
    column = lane % 32 // 4
    row = x + tl.minimum(column % how.tokens, batch - 1) * (4 * how.segments * how.words)
    planes = ()
    for k in tl.static_range(max(1, how.tokens // 4)):
        unit = unit_of(2 * turn * pairs_a_turn(how.tokens) + k + column // how.tokens, lane // 32, WARPS)
        place, left = _unit_place(unit, 1, how)
        there = lane % 4 * V < left
        for v in tl.static_range(V):
            at = (row + 4 * (place + lane % 4 * V + v))[:, None] + tl.arange(0, 4)[None, :]
            if INSIDE:
                planes = planes + split_words(tl.load(at), 4)
            else:
                planes = planes + split_words(tl.load(at, mask=there[:, None], other=0), 4)
    return planes


@triton.jit
def _offsets(x, how: tl.constexpr):
    """`raised_offset` of each 8 / T units of a turn."""
    EACH: tl.constexpr = 4 * unit_vector(how.words, how.group)
    found = ()
    for k in tl.static_range(max(1, how.tokens // 4)):
        found = found + raised_offset(x[EACH * k : EACH * k + EACH], EACH // 4)
    return found


@triton.jit
def _take_pair(queue, slot, lane, how: tl.constexpr):
    """(the words of both units in `slot`, the queue)"""
    V: tl.constexpr = unit_vector(how.words, how.group)
    own = at_slot(queue, slot, line_slot_bytes(how.lanes, V))
    first, own = take_unit(own, lane, 0, 0, V, how.ahead - 1)
    second, own = take_unit(own, lane, 0, 1, V, how.ahead - 1)
    return first + second, after_slot(queue, own)


@triton.jit
def _add_pair(sums, w, s, x, offsets, number: tl.constexpr, lane, how: tl.constexpr):
    """A tile's four sums plus RAISED_UNIT times the products of a turn's pair `number`, whose words are `w`."""
    V: tl.constexpr = unit_vector(how.words, how.group)
    PAIRED: tl.constexpr = pairs_of_scales(how.words, how.group, how.tokens, how.segments)
    for odd in tl.static_range(2):
        own = w[2 * V * odd : 2 * V * odd + 2 * V]
        if how.tokens == 8:
            part = raised_mma(own, x[4 * V * odd : 4 * V * odd + 4 * V], offsets[2 * odd : 2 * odd + 2], V)
            if PAIRED:
                sums = scaled(sums, part, half_of(s[0], odd), half_of(s[1], odd))
            else:
                sums = scaled(sums, part, s[2 * odd], s[2 * odd + 1])
        else:  # what lies in columns of other units counts nothing
            mine = lane % 4 * 2 // how.tokens == 2 * number + odd
            sums = scaled(sums, raised_mma(own, x, offsets, V), tl.where(mine, s[0], 0.0), tl.where(mine, s[1], 0.0))
    return sums


@triton.jit
def _block_ids(source, first, n_rows, step, lane, how: tl.constexpr):
    """Ids of each tile's entries of a list, beyond the count old ones, in range. Else where tiles begin."""
    found = ()
    for r in tl.static_range(how.tiles):
        if how.listed:
            entry = first + r * step + lane % 16
            found = found + (tl.load(source.ids + tl.minimum(entry, n_rows - 1), cache_modifier=".cg"),)
        else:
            found = found + (first + r * step,)
    return found


@triton.jit
def _store_zeros(sink, batch, n_rows, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in y (B, n_rows) for the program's part of the rows, where no bit is set."""
    each = (n_rows + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    b = tl.arange(0, TOKENS)
    for first in range(begin, tl.minimum(begin + each, n_rows), BLOCK):
        own = first + tl.arange(0, BLOCK)
        inside = own < tl.minimum(begin + each, n_rows)
        idle = inside & (tl.load(sink.row_bits + own, mask=inside, other=1) == 0)
        at = sink.y + b.to(tl.int64)[:, None] * n_rows + own[None, :]
        zeros = tl.zeros((TOKENS, BLOCK), sink.y.dtype.element_ty)
        tl.store(at, zeros, mask=(b < batch)[:, None] & idle[None, :])


@triton.jit
def _walk_tokens(x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    EACH: tl.constexpr = (
        4 if how.tokens == 8 and not pairs_of_scales(how.words, how.group, how.tokens, how.segments) else 2
    )
    PAIRS: tl.constexpr = pairs_a_turn(how.tokens)  # of a turn
    TURNS: tl.constexpr = turns_of(how.words, how.group, how.lanes // 32, how.tokens, how.segments)
    lane = tl.arange(0, how.lanes)
    begin = tl.program_id(0) * 16
    end = n_rows
    step = tl.num_programs(0) * 16  # to the program's next tile
    if how.listed:  # a program has a part of the list: neighbours, whose rows lie on few pages of memory
        wait_for_predecessor(PDL)
        number = tl.load(source.count, cache_modifier=".cg")
        each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
        begin = tl.program_id(0) * each
        end = tl.minimum(number, begin + each)
        step = 16
    ids = _block_ids(source, begin, n_rows, step, lane, how)
    queue = lane_queue(lane, max(how.room, how.ahead * line_slot_bytes(how.lanes, unit_vector(how.words, how.group))))
    for k in tl.static_range(how.ahead):
        tile = begin + k // PAIRS % how.tiles * step
        pair = k // (PAIRS * how.tiles) * PAIRS + k % PAIRS
        queue = _ask_pair(queue, k, words, tile, ids[k // PAIRS % how.tiles], end, pair, lane, how)
    s = ()
    for r in tl.static_range(how.tiles):
        s = s + _tile_scales(scales, begin + r * step, ids[r], end, 0, lane, how)
    if how.listed:
        _store_zeros(sink, source.batch, n_rows, how.tokens, 2 * how.lanes)
    else:
        wait_for_predecessor(PDL)
    planes = _token_planes(x, source.batch, 0, lane, how)
    each_token = tl.arange(0, how.tokens)[None, :]
    b = tl.minimum(each_token, source.batch - 1)
    slot = 0
    for first in range(begin, end, how.tiles * step):
        next_first = first + how.tiles * step
        next_ids = _block_ids(source, next_first, n_rows, step, lane, how)
        zero = tl.zeros(lane.shape, tl.float32)
        sums = ()
        for _ in tl.static_range(4 * how.tiles):
            sums = sums + (zero,)
        for turn in range(0, as_it_comes(TURNS)):
            own_planes = planes
            own_s = s
            offsets = _offsets(own_planes, how)
            is_last = turn + 1 == TURNS
            next_turn = tl.where(is_last, 0, turn + 1)
            planes = _token_planes(x, source.batch, next_turn, lane, how)
            s = ()
            for r in tl.static_range(how.tiles):
                tile = tl.where(is_last, next_first, first) + r * step
                own_ids = tl.where(is_last, next_ids[r], ids[r])
                s = s + _tile_scales(scales, tile, own_ids, end, next_turn, lane, how)
                own = sums[:4]
                for k in tl.static_range(PAIRS):
                    w, queue = _take_pair(queue, slot, lane, how)
                    if first + r * step < end:  # the last block may have fewer tiles
                        own = _add_pair(own, w, own_s[EACH * r : EACH * r + EACH], own_planes, offsets, k, lane, how)
                    queue = _ask_later(
                        queue, slot, words, (first, next_first), (ids, next_ids), end, step, turn,
                        r * PAIRS + k + how.ahead, lane, how,
                    )  # fmt: skip
                    slot = tl.where(slot + 1 < how.ahead, slot + 1, 0)
                sums = sums[4:] + own
        for r in tl.static_range(how.tiles):
            entries = first + r * step + tl.arange(0, 16)[:, None]
            inside = entries < end
            stored = (each_token < source.batch) & inside
            lines = entries
            if how.listed:
                lines = tl.load(source.ids + tl.minimum(entries, n_rows - 1), cache_modifier=".cg")
            ahead = sink.ahead(sink, lines, b, inside, stored, n_rows)
            values = tile_sums(sums[4 * r : 4 * r + 4], how.lanes, how.tokens) * (1 / RAISED_UNIT)
            sink.put(sink, values, ahead, lines, b, stored, n_rows)
        ids = next_ids


@keyed
class TokenWalk(NamedTuple):
    """Constants. words: of a row of a segment. tiles: of a block. ahead: pairs that the queue has room for, at most as
    many as a block has. whole: there are a multiple of 16 rows. room: bytes that the queue takes at least
    (`lane_queue.even_room`)."""

    words: int
    group: int
    lanes: int
    tokens: int
    tiles: int
    ahead: int
    segments: int = 1
    whole: bool = False
    listed: bool = False
    room: int = 0
    walk: Any = _walk_tokens


class TokenSource(NamedTuple):
    """batch: tokens that there are. ids, count: of the rows that are read, where these are listed. The sink then has
    their bits."""

    batch: int
    ids: Tensor | None
    count: Tensor | None
