"""Rows of 4-bit words by head times one input of fp16: all heads, or those that are selected.

    v[i] = sum_h scale[h, i] sum_j code[h, i, j] x[h head_dim + j],   h selected

The weight lies head by head, (h, d, head_dim) with one scale a head and output. A skipped head skips codes and scales
alike, and a head's outputs are one range of memory. Products are exact, sums in fp32. Every program reads x whole.

A program owns TILES times 8 outputs. Its warps take heads in turn, SPAN at a time, two beside each other as a unit of
`int4_mma`. The first half of the unit's rows are 8 outputs of one head, the other half those of another one. The heads'
inputs lie in two columns. Tiles of 8 outputs let all multiprocessors have as many at widths such as 9216. The first
span is read before the wait: the selection is older than the launch before.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.int4_mma import column_sums, from_lane, int4_mma, unit_vector
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import ask, lane_queue, take
from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.listed import keyed
from dejavu_train.kernels.stages.select import selected_heads

ROWS = tl.constexpr(8)


@triton.constexpr_function
def queue_bytes(lanes, span, tiles, head_dim):
    """Shared memory of the words on their way: of two heads of a tile 8 V of each lane."""
    return lanes * (span // 2) * tiles * 8 * unit_vector(head_dim // 8, head_dim)


@triton.constexpr_function
def _tiles_of_heads(entries, warps):
    """Registers of a lane that hold the heads of a warp's entries, 32 each."""
    return -(-entries // (32 * warps))


@triton.jit
def _warps_heads(order, n, lane, UNITS: tl.constexpr, H: tl.constexpr, ALL: tl.constexpr):
    """The heads of a warp's entries, entry k in lane k % 32 of tile k // 32: a gather, once, is four barriers."""
    WARPS: tl.constexpr = lane.shape[0] // 32
    found = ()
    for k in tl.static_range(_tiles_of_heads(H * UNITS, WARPS)):
        number = (32 * k + lane % 32) * WARPS + lane // 32
        entry = tl.minimum(number // UNITS, tl.maximum(n - 1, 0))
        if ALL:
            heads = entry
        else:
            heads = tl.gather(order, entry, 0)
        found = found + (tl.where(n > 0, heads, 0),)
    return found


@triton.jit
def _heads(its, begin, lane, UNITS: tl.constexpr, SPAN: tl.constexpr, H: tl.constexpr):
    """The head of each lane group's entry of the span, (L,): begin + (g % SPAN) warps + warp, g from SPAN on again."""
    WARPS: tl.constexpr = lane.shape[0] // 32
    own = begin // WARPS + lane % 32 // 4 % SPAN  # beyond the last entry any head
    heads = from_lane(its[0], own % 32)
    for k in tl.static_range(1, _tiles_of_heads(H * UNITS, WARPS)):
        heads = tl.where(own // 32 == k, from_lane(its[k], own % 32), heads)
    return heads


@triton.jit
def _head_input(
    mixed, heads, begin, n, lane, W: tl.constexpr, V: tl.constexpr, UNITS: tl.constexpr, SPAN: tl.constexpr
):
    """4 V planes of the input of each lane group's entry, see `_heads`. Zero beyond the last one. mixed: its pairs."""
    number = begin + lane % 32 // 4 % SPAN * (lane.shape[0] // 32) + lane // 32
    planes = ()
    for v in tl.static_range(V):
        word = number % UNITS * (4 * V) + lane % 4 * V + v
        at = (mixed + heads * (4 * W) + 4 * word)[:, None] + tl.arange(0, 4)[None, :]
        there = (number < n * UNITS) & (word < W)
        planes = planes + split_words(tl.load(at, mask=there[:, None], other=0), 4)
    return planes


@triton.jit
def _ask_heads(
    queue, weight, scales, heads, begin, n, rows, n_rows, lane,
    W: tl.constexpr, V: tl.constexpr, UNITS: tl.constexpr, PAIR: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """The queue with a lane's words of two entries on their way, and the scales of its row of them.

    Entries 2 PAIR and 2 PAIR + 1 of the span, whose heads the lane groups of these numbers hold in `heads`. The inputs
    of the two are columns of the lanes t = PAIR, and other lanes' scales zero. rows: a tile's, g of 8.
    """
    found = ()
    at = ()
    there = ()
    for half in tl.static_range(2):
        number = begin + (2 * PAIR + half) * (lane.shape[0] // 32) + lane // 32
        place = number % UNITS * (4 * V) + lane % 4 * V
        line = from_lane(heads, 4 * (2 * PAIR + half)) * n_rows + rows
        inside = (number < n * UNITS) & (rows < n_rows)
        at = at + (weight + line.to(tl.int64) * W + place,)
        there = there + (inside & (place < W),)
        found = found + (tl.load(scales + line, mask=inside & (lane % 4 == PAIR), other=0.0),)
    return ask(queue, lane, at[0], at[1], there[0], there[1], SLOT, V, True), found


@triton.jit
def _walk_heads(x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    W: tl.constexpr = how.head_dim // 8
    V: tl.constexpr = unit_vector(W, how.head_dim)
    UNITS: tl.constexpr = (W + 4 * V - 1) // (4 * V)
    WARPS: tl.constexpr = how.lanes // 32
    PAIRS: tl.constexpr = how.span // 2
    lane = tl.arange(0, how.lanes)
    line = tl.program_id(0) * (ROWS * how.tiles)
    rows = line + lane % 32 // 4
    order = lane
    n = how.heads
    if source is not None:
        order, n = selected_heads(source.row_bits, how.heads, how.head_tile, how.share)
    its = _warps_heads(order, n, lane, UNITS, how.heads, source is None)
    heads = _heads(its, 0, lane, UNITS, how.span, how.heads)
    queue = lane_queue(lane, max(how.room, queue_bytes(how.lanes, how.span, how.tiles, how.head_dim)))
    factors = ()
    for p in tl.static_range(PAIRS):
        for m in tl.static_range(how.tiles):
            queue, found = _ask_heads(
                queue, words, scales, heads, 0, n, rows + ROWS * m, n_rows, lane, W, V, UNITS, p, p * how.tiles + m
            )
            factors = factors + found
    ahead = ()
    for m in tl.static_range(0, how.tiles, 2):
        own = line + ROWS * m + tl.arange(0, 16)
        inside = own < tl.minimum(n_rows, line + ROWS * how.tiles)
        ahead = ahead + (sink.ahead(sink, own, 0, inside, inside, n_rows),)
    wait_for_predecessor(PDL)
    acc = ()
    for _ in tl.static_range(how.tiles):
        acc = acc + (tl.zeros((how.lanes,), tl.float32),)
    its_x = _head_input(x, heads, 0, n, lane, W, V, UNITS, how.span)
    for begin in range(0, n * UNITS, how.span * WARPS):
        heads = _heads(its, begin + how.span * WARPS, lane, UNITS, how.span, how.heads)
        coming = _head_input(x, heads, begin + how.span * WARPS, n, lane, W, V, UNITS, how.span)
        for p in tl.static_range(PAIRS):
            for m in tl.static_range(how.tiles):
                w, queue = take(queue, lane, p * how.tiles + m, V, PAIRS * how.tiles - 1)
                part = int4_mma(w, its_x, V)
                # The tiles' sums in turn: the first of the tuple is this tile's.
                more = acc[0] + part[0] * factors[0].to(tl.float32) + part[3] * factors[1].to(tl.float32)
                acc = acc[1:] + (more,)
                queue, found = _ask_heads(
                    queue, words, scales, heads, begin + how.span * WARPS, n, rows + ROWS * m, n_rows, lane, W, V,
                    UNITS, p, p * how.tiles + m,
                )  # fmt: skip
                factors = factors[2:] + found
        its_x = coming
    acc = acc + (tl.zeros((how.lanes,), tl.float32),)  # beside the last of an odd number of tiles
    for m in tl.static_range(0, how.tiles, 2):
        own = line + ROWS * m + tl.arange(0, 16)
        inside = own < tl.minimum(n_rows, line + ROWS * how.tiles)
        sink.put(sink, column_sums(acc[m], acc[m + 1], how.lanes), ahead[m // 2], own, 0, inside, n_rows)


@keyed
class HeadWalk(NamedTuple):
    """heads: all. head_tile: of a tile of these. lanes: threads. span: heads of a warp that are on their way. tiles: of
    8 outputs of a program. room: bytes that the queue takes at least (`lane_queue.even_room`). share: heads that are
    selected together."""

    heads: int
    head_tile: int
    head_dim: int
    lanes: int
    span: int
    tiles: int
    room: int
    share: int = 1
    walk: Any = _walk_heads
