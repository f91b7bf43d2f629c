"""Rows of query, key and value of the selected heads with 4-bit weights. Formulas, layouts and policies as in `qkv`.

    program -DOWN .. -1    16 rows each of another matrix, the first half of an MLP predictor, for the present input
    program p >= 0         rows 16 p .. 16 p + 15 of the head-major weight, of one head's q, k or v
                           times up to PAIRS of its head's pairs (`qkv_pairs`), of several batch rows up to WIDE
    later items            16 rows of k or v of a head that lacks more pairs, times WIDE of these

    hidden[r] = act(scale[r] (down[r] n))      down (DOWN * 16, d) lies as the weight does, `rank` rows of it count

Inputs may be those of a norm that comes late (`late_norm`, LATE, one batch row).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.int4_mma import ask_inputs, ask_words, first_scales, int4_tile, tile_bytes
from dejavu_train.kernels.common.lane_queue import drain, lane_queue
from dejavu_train.kernels.common.late_norm import late_factors
from dejavu_train.kernels.common.launch import count_program, wait_for_predecessor
from dejavu_train.kernels.stages.qkv_pairs import QkvRows, lacking_positions, places, store_rows, turning

ROWS = tl.constexpr(16)
# Items of a program of an idle head, at most: they take as long as the others' two rounds do.
SHARE_OF_IDLE = tl.constexpr(2)


class Late(NamedTuple):
    """Facts of a norm that comes late: see `late_norm.LateNorm`."""

    moments: Any
    estimate: Any
    factors: Any


class Down(NamedTuple):
    """The other matrix, with what its sums are put right with, and what is made of it.

    tile_scales: of rows of 4 bits. None: nibbles. arrived: counts the programs whose values lie in memory.
    """

    weight: Any
    tile_scales: Any
    gains: Any
    shifts: Any
    scale: Any
    hidden: Any
    arrived: Any


class AheadSizes(NamedTuple):
    """Constants of what runs beside q/k/v. EPS, CENTRED: of the late norm. DOWN: programs that make hidden values.

    RANK: of these values. RELU: of them.
    """

    RANK: int
    EPS: float = 0.0
    CENTRED: bool = True
    DOWN: int = 0
    RELU: bool = False


@triton.constexpr_function
def wide_turn(steps, wide):
    """Units of a turn with `wide` inputs, 4 or 8, which take as much of the queue whichever it is."""
    return min(steps, 16 // wide)


@triton.constexpr_function
def tile_room(d, group, lanes, steps, pairs, wide):
    """Bytes of the queue of tiles of either form."""
    narrow = tile_bytes(d // 8, group, lanes, steps, pairs)
    return max(narrow, tile_bytes(d // 8, group, lanes, steps, wide, wide_turn(steps, wide)))


@triton.jit
def _later_groups(lacking, head_bits, b, FIRST: tl.constexpr, WIDE: tl.constexpr):
    """Groups of WIDE pairs beyond the FIRST ones that each selected head lacks, of padded heads."""
    there = ((head_bits[None, :] >> b[:, None]) & 1) != 0
    return (tl.maximum(tl.sum(tl.where(there, lacking, 0), 0) - FIRST, 0) + WIDE - 1) // WIDE


@triton.jit
def _later_item(item, wanted, S: tl.constexpr, FIRST: tl.constexpr):
    """(head, first row, first pair, how many positions each batch row lacks) of an item of the list of later groups.

    Heads in turn. Of each its groups beyond the FIRST pairs, of each the tiles of k and v.
    """
    TILES: tl.constexpr = 2 * S.HEAD_DIM // ROWS
    OF_Q: tl.constexpr = S.SHARE * S.HEAD_DIM
    b = tl.arange(0, triton.next_power_of_2(S.B))
    heads = tl.arange(0, triton.next_power_of_2(S.H))
    _, lacking = lacking_positions(wanted, b, heads, S)
    head_bits = tl.load(wanted.row_bits + heads, mask=heads < S.H, other=0)
    items = TILES * _later_groups(lacking, head_bits, b, FIRST, S.WIDE)
    ends = tl.cumsum(items, 0)
    own = (ends > item) & (ends - items <= item)
    head = tl.sum(tl.where(own, heads, 0))
    place = item - tl.sum(tl.where(own, ends - items, 0))
    n = tl.sum(tl.where(own[None, :] & (((head_bits[None, :] >> b[:, None]) & 1) != 0), lacking, 0), 1)
    return head, OF_Q + place % TILES * ROWS, FIRST + place // TILES * S.WIDE, n


@triton.jit
def _inputs(attn_in, lane, inputs, start, n_pairs, last, n, capacity, B: tl.constexpr, D: tl.constexpr):
    """Where each lane's of `inputs` inputs begins: those of the pairs from `start` on, of n[b] up to last[b].

    Of pairs that do not exist the last one's input is read again: no lane's load needs a mask.
    """
    own = tl.minimum(lane % 32 // 4 % inputs, n_pairs - 1 - start)
    of_row, p = places(own, start, last + 1 - n, tl.cumsum(n, 0), B)
    return attn_in + (of_row * capacity + p).to(tl.int64) * (D // 2)


@triton.jit
def _store_hidden(values, rows, row_scales, down, rank, RELU: tl.constexpr):
    """The first column of values (ROWS, N), hidden values of these rows."""
    own = (tl.arange(0, values.shape[1]) == 0)[None, :]
    y = tl.sum(tl.where(own, values, 0.0), 1) * row_scales
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
    tl.store(down.hidden + rows, y, mask=rows < rank)
    count_program(down.arrived)


@triton.jit
def _multiply(
    queue, x, begun, now, head, row, start, n_pairs, last, n, rows, late, stored, S: tl.constexpr, N: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Values (ROWS, N) of rows of a head for N pairs from `start` on, for which words and inputs were asked for. Those
    of pairs beyond n_pairs are not stored.

    now: factors of the present position, of a norm that comes late. Nothing that is used after the product is
    loaded after it: that comes meanwhile.
    """
    W: tl.constexpr = S.D // 8
    line = head * ((S.SHARE + 2) * S.HEAD_DIM) + row
    r = tl.arange(0, ROWS)
    offset = tl.load(rows.bias + line + r)
    i = tl.arange(0, N)
    of_row, p = places(i, start, last + 1 - n, tl.cumsum(n, 0), S.B)
    exists = start + i < n_pairs
    by = turning(stored.table, row, p, exists, ROWS, S)
    if late is not None:
        gain = tl.load(rows.gains + line + r)
        kept = exists & (p < tl.sum(last))  # one batch row
        a = tl.load(late.factors + 2 * p, mask=kept, other=0.0)
        c = tl.load(late.factors + 2 * p + 1, mask=kept, other=0.0)
    values = int4_tile(
        queue, rows.weight, rows.scales, line, x, W, S.GROUP, S.BLOCK, S.STAGES, N, begun, TURN
    )  # fmt: skip
    if late is not None:
        # Products are put right before they are stored. The factors of the present position come from the moments, and
        # are kept for later ones. The bias has W shift, and `gains` (h, r + 2, head_dim) W gain.
        present = p == tl.sum(last)
        a = tl.where(present, now[0], a)
        c = tl.where(present, now[1], c)
        values = values * a[None, :] + gain[:, None] * c[None, :]
    values += offset.to(tl.float32)[:, None]
    store_rows(values, by, head, row, row + r, of_row, p, exists, stored, S)
    return values


@triton.jit
def own_tile(
    tile, n_tiles, attn_in, rows, wanted, stored, late, down, S: tl.constexpr, A: tl.constexpr, PDL: tl.constexpr
):
    """A program's whole work, its wait included: tile `tile` of all heads' n_tiles, its share of later groups, or both.

    late, down, A: or None. S.BLOCK: its threads. S.STAGES: units of a warp that are on their way.
    """
    OF_Q: tl.constexpr = S.SHARE * S.HEAD_DIM
    OF_HEAD: tl.constexpr = (S.SHARE + 2) * S.HEAD_DIM
    W: tl.constexpr = S.D // 8
    DOWN: tl.constexpr = 0 if down is None else A.DOWN
    TILES: tl.constexpr = OF_HEAD // ROWS
    FIRST: tl.constexpr = S.PAIRS if S.B == 1 else S.WIDE  # pairs that a tile's own program takes
    WIDE_TURN: tl.constexpr = wide_turn(S.STAGES, S.WIDE)
    lane = tl.arange(0, S.BLOCK)
    queue = lane_queue(lane, max(S.ROOM, tile_room(S.D, S.GROUP, S.BLOCK, S.STAGES, S.PAIRS, S.WIDE)))
    own_head = tile // TILES
    own_row = tile % TILES * ROWS
    of_head = True
    own = rows
    if DOWN > 0:
        of_head = tile >= 0
        own_head = tl.where(of_head, own_head, 0)
        own_row = tl.where(of_head, own_row, (tile + DOWN) * ROWS)
        own_weight = tl.where(of_head, rows.weight, down.weight)
        own_scales = tl.where(of_head, rows.scales, down.tile_scales)
        own_bias = tl.where(of_head, rows.bias, down.shifts)
        own_gains = tl.where(of_head, rows.gains, down.gains)
        own = QkvRows(own_weight, own_scales, own_bias, own_gains)
    # A program knows its rows before it knows whether they are needed. So their words come while it waits. One that had
    # to look its tile up in the list of selected heads would ask about 2 us later (one H200). Of a head that is not
    # selected the words come for nothing: a ninth of its bytes at d = 9216, a quarter at 4096.
    ask_words(queue, own.weight, own_head * OF_HEAD + own_row, W, S.GROUP, S.BLOCK, S.STAGES)
    begun = first_scales(own.scales, own_head * OF_HEAD + own_row, W, S.GROUP, S.BLOCK, S.STAGES, S.PAIRS, S.STAGES)
    # Positions and watermarks are those that the step before left. With one batch row the inputs do not wait for the
    # selection either: the positions that a head lacks are known before.
    b = tl.arange(0, triton.next_power_of_2(S.B))
    heads = tl.arange(0, triton.next_power_of_2(S.H))
    own_n = tl.where(b < S.B, 1, 0)  # positions of each batch row
    if DOWN > 0:
        own_rows = own_row + tl.arange(0, ROWS)
        row_scales = tl.load(down.scale + own_rows, mask=own_rows < tl.where(of_head, 0, A.RANK), other=0.0)
    if S.FILLS:
        last, lacking = lacking_positions(wanted, b, heads, S)
        mark = tl.load(wanted.watermark + b * S.H + own_head, mask=b < S.B, other=0)
        own_n = tl.where((b < S.B) & of_head & (own_row >= OF_Q), last + 1 - tl.minimum(mark, last), own_n)
    else:
        last = tl.load(wanted.position + b, mask=b < S.B, other=0)
    wait_for_predecessor(PDL)
    own_bits = tl.load(wanted.row_bits + own_head)
    needed = own_bits != 0
    if DOWN > 0:
        needed = needed | (tile < 0)
    if S.B > 1:
        for_row = ((own_bits >> b) & 1) != 0
        own_n = tl.where(for_row, own_n, 0)
    own_pairs = tl.sum(own_n)
    own_wide = (own_pairs > S.PAIRS) & (FIRST > S.PAIRS)
    own_x = _inputs(
        attn_in, lane, tl.where(own_wide, S.WIDE, S.PAIRS), 0, own_pairs, last, own_n, stored.capacity, S.B, S.D
    )
    if own_wide:
        ask_inputs(queue, own_x, W, S.GROUP, S.BLOCK, S.STAGES, S.WIDE, WIDE_TURN)
    elif own_pairs > 0:
        ask_inputs(queue, own_x, W, S.GROUP, S.BLOCK, S.STAGES, S.PAIRS, S.STAGES)
    if DOWN > 0:
        own_pairs = tl.where(of_head, own_pairs, 0)  # nothing to store for a head
    now = ()
    if late is not None:
        now = late_factors(late.moments, late.estimate, A.EPS, A.CENTRED, S.D)
    # A program's own tile comes as an item before those of the list: so the code of a product with S.WIDE, which of
    # several batch rows may be its own tile's, is there once.
    first = tl.where(needed, tile - n_tiles, tile)  # below zero
    end = 0
    step = n_tiles
    if S.FILLS:  # else a position of each row at most
        head_bits = tl.load(wanted.row_bits + heads, mask=heads < S.H, other=0)
        idle = ((heads < S.H) & (head_bits == 0)).to(tl.int32)
        n_idle = tl.sum(idle) * TILES
        n_later = tl.sum(_later_groups(lacking, head_bits, b, FIRST, S.WIDE)) * (2 * S.HEAD_DIM // ROWS)
        end = n_later
        # Programs of idle heads begin with the list at once. The head's own, perhaps among the last to begin, would end
        # long after all others. With more items for each, or no idle head, all share them out after their own tiles.
        if n_later <= SHARE_OF_IDLE * n_idle:  # for the programs of idle heads alone
            end = tl.where(needed, 0, n_later)
            first = tl.where(needed, first, tl.sum(tl.where(heads < own_head, idle, 0)) * TILES + tile % TILES)
            step = tl.where(needed, n_tiles, n_idle)
    if DOWN > 0:
        first = tl.where(of_head, first, -1)  # its own tile, once
        end = tl.where(of_head, end, 0)
    if not needed:
        drain(lane)
    for item in range(first, end, step):
        head = own_head
        row = own_row
        start = 0
        n = own_n
        n_pairs = own_pairs
        x = own_x
        wide = own_wide | (item >= 0)
        if item >= 0:
            head, row, start, n = _later_item(item, wanted, S, FIRST)
            n_pairs = tl.sum(n)
            ask_words(queue, rows.weight, head * OF_HEAD + row, W, S.GROUP, S.BLOCK, S.STAGES)
            x = _inputs(attn_in, lane, S.WIDE, start, n_pairs, last, n, stored.capacity, S.B, S.D)
            ask_inputs(queue, x, W, S.GROUP, S.BLOCK, S.STAGES, S.WIDE, WIDE_TURN)
        if wide:
            begun_wide = first_scales(
                rows.scales, head * OF_HEAD + row, W, S.GROUP, S.BLOCK, S.STAGES, S.WIDE, WIDE_TURN
            )
            _multiply(
                queue, x, begun_wide, now, head, row, start, n_pairs, last, n, rows, late, stored, S, S.WIDE, WIDE_TURN
            )
        else:
            values = _multiply(
                queue, own_x, begun, now, own_head, own_row, 0, own_pairs, last, own_n, own, late, stored, S, S.PAIRS,
                S.STAGES,
            )  # fmt: skip
            if DOWN > 0:
                if tile < 0:
                    if own_row == 0:
                        tl.store(late.factors + 2 * tl.sum(last), now[0])
                        tl.store(late.factors + 2 * tl.sum(last) + 1, now[1])
                    _store_hidden(values, own_rows, row_scales, down, A.RANK, A.RELU)
