"""A norm of one row as the planes that 4-bit rows are multiplied with, its gains and shifts read early.

    n = (x - mean) rstd gain + shift, rounded to fp16, or another `RowNorm`; x (8 W,) fp32, W words a row

A layer's gains and shifts were last read a token ago, so they come from the memory. They depend on nothing, and are
read before the wait for the kernel before (`unit_norms`). Each warp normalises the columns that it multiplies with, 128
at a time, four a lane, as they follow each other in its units. It gives them through shared memory to the lanes that
want 8 V neighbours each, and only its own lanes wait for that. (Loads of what a lane wants itself would touch 32 lines
each.)
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly, operands
from dejavu_train.kernels.common.int4_mma import fp16_pairs, pairs_of_a_warp, unit_of, unit_vector
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import shared_room
from dejavu_train.kernels.common.launch import THROUGH_L1, sums_together
from dejavu_train.kernels.common.layer_norm import row_moments


@triton.constexpr_function
def round_words(vector):
    """Words of a row, eight columns each, that a warp hands over at a time: all or half of eight units."""
    return min(64, 32 * vector)


@triton.constexpr_function
def norm_bytes(words, group, warps):
    """Shared memory of `normalised_units`."""
    return 16 * round_words(unit_vector(words, group)) * warps


@triton.constexpr_function
def _pieces(words, vector, warps):
    """Loads of four columns a lane with which a warp reads its units of a row of so many words."""
    return -(-pairs_of_a_warp(words, vector, warps) * 8 * vector // 16)


@triton.constexpr_function
def _planes_text(vector, rounds):
    """PTX: $0.. = 4 `vector` pairs of fp16, four from each of the `vector` addresses that follow. Of several rounds,
    where the last operand is not zero, else the pairs that stand before it."""
    n = 4 * vector
    text = "{ bar.warp.sync 0xffffffff;"
    guard = "@p " if rounds > 1 else ""
    if rounds > 1:
        text += f".reg .pred p; setp.ne.s32 p, ${2 * n + vector}, 0;"
        for i in range(n):
            text += f"mov.b32 ${i}, ${n + vector + i};"
    for v in range(vector):
        names = ", ".join(f"${4 * v + i}" for i in range(4))
        text += f"{guard}ld.shared.v4.b32 {{{names}}}, [${n + v}];"
    return text + "bar.warp.sync 0xffffffff; }"


@triton.jit
def _chunk(word, V: tl.constexpr):
    """Where a warp keeps word `word` of a round, in bytes: lanes that read together find no bank shared."""
    unit = word // (4 * V)
    v = word % V ^ (unit % 2 if V > 1 else 0)
    return unit * (64 * V) + v * 64 + word % (4 * V) // V * 16


@triton.jit
def _put(room, kept, low, high, K: tl.constexpr, lane, V: tl.constexpr, ASM: tl.constexpr):
    """Piece K of a round, four columns of each lane in two int32 pairs. Without ASM `kept` with them."""
    if ASM:
        at = room + _chunk(16 * K + lane % 32 // 2, V) + lane % 2 * 8
        assembly("st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, $1;", "=r,r,r,r", (at, low, high))
    else:
        kept = kept + (low, high)
    return kept


@triton.jit
def _planes(room, kept, before, NUMBER: tl.constexpr, lane, V: tl.constexpr, ASM: tl.constexpr):
    """`before`, 4 V planes of a warp's eight units, with those that round NUMBER of them brings."""
    WORDS: tl.constexpr = round_words(V)
    ROUNDS: tl.constexpr = 32 * V // WORDS
    first = lane % 32 * V  # a lane's words of the eight units
    mine = first // WORDS == NUMBER
    if ASM:
        given = ()
        for v in tl.static_range(V):
            given = given + (room + _chunk(first % WORDS + v, V),)
        if ROUNDS > 1:
            given = given + before + (mine.to(tl.int32),)
        planes = assembly(_planes_text(V, ROUNDS), operands("=&r", 4 * V, "r", len(given)), given)
    else:
        planes = ()
        for i in tl.static_range(4 * V):
            word = first % WORDS + i // 4
            writer = lane // 32 * 32 + word % 16 * 2 + i % 4 // 2
            found = before[i]
            for k in tl.static_range(WORDS // 16):
                found = tl.where(mine & (word // 16 == k), tl.gather(kept[2 * k + i % 2], writer, 0), found)
            planes = planes + (found,)
    return planes


@triton.jit
def unit_pairs(x, lane, W: tl.constexpr, GROUP: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """x (8 W,) fp16 as it is, in the planes of `normalised_units`. x: its int32 pairs."""
    V: tl.constexpr = unit_vector(W, GROUP)
    planes = ()
    for octet in tl.static_range((pairs_of_a_warp(W, V, lane.shape[0] // 32) + 3) // 4):
        unit = unit_of(8 * octet + lane % 32 // 4, lane // 32, lane.shape[0] // 32)
        place = unit * (4 * V) + lane % 4 * V
        for v in tl.static_range(V):
            at = (x + 4 * (place + v))[:, None] + tl.arange(0, 4)[None, :]
            four = tl.load(at, mask=(place < W)[:, None], other=0, cache_modifier=CACHE)
            planes = planes + split_words(four, 4)
    return planes


@triton.constexpr_function
def _inside(words, vector, warps, piece):
    """Whether all warps' piece of this number lies within a row of so many words."""
    return ((16 * piece + 15) // (8 * vector) + 1) * warps * 8 * vector <= words


@triton.jit
def _place(K: tl.constexpr, lane, V: tl.constexpr):
    """The word of a row in which a lane's four columns of piece K of its warp lie."""
    word = 16 * K + lane % 32 // 2
    return unit_of(word // (4 * V), lane // 32, lane.shape[0] // 32) * (4 * V) + word % (4 * V)


@triton.jit
def _piece(row, K: tl.constexpr, lane, W: tl.constexpr, V: tl.constexpr):
    """A lane's four columns of piece K of its warp, a tile (L, 4). Zero beyond the row."""
    place = _place(K, lane, V)
    at = (row + 8 * place + lane % 2 * 4)[:, None] + tl.arange(0, 4)[None, :]
    if _inside(W, V, lane.shape[0] // 32, K):
        four = tl.load(at)
    else:
        four = tl.load(at, mask=(place < W)[:, None], other=0.0)
    return four


@triton.jit
def unit_norms(norm, lane, W: tl.constexpr, GROUP: tl.constexpr):
    """A lane's gains and shifts, tiles (L, 4) in turn, of four columns each, for `normalised_units`."""
    V: tl.constexpr = unit_vector(W, GROUP)
    norms = ()
    for k in tl.static_range(_pieces(W, V, lane.shape[0] // 32)):
        if norm.gain is not None:
            norms = norms + (_piece(norm.gain, k, lane, W, V),)
        else:
            norms = norms + (tl.full((lane.shape[0], 4), 1.0, tl.float32),)
        if norm.shift is not None:
            norms = norms + (_piece(norm.shift, k, lane, W, V),)
        else:
            norms = norms + (tl.full((lane.shape[0], 4), 0.0, tl.float32),)
    return norms


@triton.jit
def _round(
    room, xs, norms, norm, rstd, before, ROUND: tl.constexpr, NUMBER: tl.constexpr, PIECES: tl.constexpr, lane,
    V: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`before`, planes of eight units, with those of the warp's round ROUND, the eight units' number NUMBER."""
    SHARE: tl.constexpr = round_words(V) // 16
    FIRST: tl.constexpr = ROUND * SHARE
    planes = before
    if FIRST < PIECES:
        kept = ()
        for k in tl.static_range(SHARE):
            if FIRST + k < PIECES:
                n = split_words(
                    norm.scaled(xs[FIRST + k] * rstd, norms[2 * (FIRST + k)], norms[2 * (FIRST + k) + 1]), 4
                )
                kept = _put(room, kept, fp16_pairs(n[0], n[1]), fp16_pairs(n[2], n[3]), k, lane, V, ASM)
            elif not ASM:
                kept = kept + (before[0] * 0, before[0] * 0)
        planes = _planes(room, kept, before, NUMBER, lane, V, ASM)
    return planes


@triton.jit
def normalised_units(x, norms, norm, lane, W: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """(planes, mean, 1 / deviation) of the norm of x (8 W,), rounded to fp16. Once a kernel. norms: `unit_norms`.

    There are 4 V planes for each eight units of a warp, lane group g unit g. Units that a warp has not may be anything.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    WARPS: tl.constexpr = lane.shape[0] // 32
    PIECES: tl.constexpr = _pieces(W, V, WARPS)
    ROUNDS: tl.constexpr = 32 * V // round_words(V)  # of eight units
    xs = ()
    total = tl.zeros(lane.shape, tl.float32)
    squares = tl.zeros(lane.shape, tl.float32)
    for k in tl.static_range(PIECES):
        xs = xs + (_piece(x, k, lane, W, V),)
    for k in tl.static_range(PIECES):
        total += tl.sum(xs[k], 1)
        squares += tl.sum(xs[k] * xs[k], 1)
    both = sums_together((total, squares), 2)
    mean, rstd = row_moments(both[0], both[1], norm, 8 * W)
    centred = ()  # zero beyond the row, where words are as well, which are codes of -8
    for k in tl.static_range(PIECES):
        if _inside(W, V, WARPS, k):
            centred = centred + (xs[k] - mean,)
        else:
            centred = centred + (tl.where((_place(k, lane, V) < W)[:, None], xs[k] - mean, 0.0),)
    room = 0
    if ASM:
        room = shared_room(lane, "normalised", norm_bytes(W, GROUP, WARPS), 16)
        room += lane // 32 * norm_bytes(W, GROUP, 1)
    planes = ()
    for octet in tl.static_range((PIECES + 2 * V - 1) // (2 * V)):
        own = ()
        for _ in tl.static_range(4 * V):
            own = own + (tl.zeros(lane.shape, tl.int32),)
        for number in tl.static_range(ROUNDS):
            own = _round(room, centred, norms, norm, rstd, own, octet * ROUNDS + number, number, PIECES, lane, V, ASM)
        planes = planes + own
    return planes, mean, rstd
