# mypy: disable-error-code="assignment"
"""LayerNorm of one row as the planes that 4-bit rows are multiplied with, its gains and shifts read early.

    n = (x - mean) rstd gain + shift, rounded to fp16; x (8 W,) fp32, gain and shift (8 W,), W words a row

A layer's gains and shifts were last read a token ago, so they come from the memory. They depend on nothing, and are
read before the wait for the kernel before: where sixteen rows are multiplied at a time (`int4_row_step`) into registers
(`unit_norms`, `normalised_units`), where a row is spread over all threads (`int4_tiles`) into a queue in shared memory
(`ask_norm`, `normalised_planes`, fp16), because registers have no room for them there at d = 9216.
"""

import triton
import triton.language as tl

from kernels.common.int4_mma import fp16_pairs, unit_vector
from kernels.common.int4_row_step import pairs_of_a_warp, unit_of
from kernels.common.int4_tiles import half_of, lane_words, n_pieces, piece_start, piece_vector, split_words
from kernels.common.lane_queue import MOST_BYTES, ask, lane_queue, take
from kernels.common.launch import sums_together
from kernels.common.layer_norm import mean_and_rstd


@triton.constexpr_function
def queued_words(words, lanes):
    """Of a lane's words of a row, those whose eight gains and eight shifts a queue has room for."""
    return min(lane_words(words, lanes), MOST_BYTES // (32 * lanes))


@triton.jit
def ask_norm(gain, shift, lane, W: tl.constexpr, L: tl.constexpr):
    """A queue with a lane's gains and shifts on their way, of as many of its words of a row of W as it has room for."""
    N: tl.constexpr = queued_words(W, L)
    queue = lane_queue(lane, 32 * L * N)
    gains = gain.to(tl.pointer_type(tl.int32), bitcast=True)
    shifts = shift.to(tl.pointer_type(tl.int32), bitcast=True)
    for j in tl.static_range(n_pieces(W, L)):
        for v in tl.static_range(piece_vector(W, L, j)):
            if piece_start(W, L, j) // L + v < N:
                word = piece_start(W, L, j) + lane * piece_vector(W, L, j) + v
                there = word < W
                queue = ask(
                    queue, lane, gains + 4 * word, shifts + 4 * word, there, there, piece_start(W, L, j) // L + v, 4,
                    True, True,
                )  # fmt: skip
    return queue


@triton.jit
def _four_pairs(vector, word, W: tl.constexpr):
    """The four pairs of fp16 of each lane's word of `vector` (8 W,), zero beyond the end."""
    at = (vector.to(tl.pointer_type(tl.int32), bitcast=True) + 4 * word)[:, None] + tl.arange(0, 4)[None, :]
    return split_words(tl.load(at, mask=(word < W)[:, None], other=0), 4)


@triton.jit
def normalised_planes(queue, x, gain, shift, lane, W: tl.constexpr, L: tl.constexpr, EPS: tl.constexpr):
    """`lane_words` times four planes of LayerNorm(x), zero beyond the end; queue: `ask_norm`'s, of the same W and L."""
    N: tl.constexpr = queued_words(W, L)
    fours = ()  # tiles (L, 4) of neighbouring columns
    total = tl.zeros((L,), tl.float32)
    squares = tl.zeros((L,), tl.float32)
    for j in tl.static_range(n_pieces(W, L)):
        for v in tl.static_range(piece_vector(W, L, j)):
            word = piece_start(W, L, j) + lane * piece_vector(W, L, j) + v
            for half in tl.static_range(2):
                at = (x + 8 * word + 4 * half)[:, None] + tl.arange(0, 4)[None, :]
                four = tl.load(at, mask=(word < W)[:, None], other=0.0)
                total += tl.sum(four, 1)
                squares += tl.sum(four * four, 1)
                fours = fours + (four,)
    sums = sums_together((total, squares), 2)
    mean, rstd = mean_and_rstd(sums[0], sums[1], 8 * W, EPS)
    planes = ()
    for j in tl.static_range(n_pieces(W, L)):
        for v in tl.static_range(piece_vector(W, L, j)):
            if piece_start(W, L, j) // L + v < N:  # four pairs of gains, four of shifts
                pairs, queue = take(
                    queue, lane, piece_start(W, L, j) // L + v, 4, N - 1 - piece_start(W, L, j) // L - v
                )  # fmt: skip
            else:
                word = piece_start(W, L, j) + lane * piece_vector(W, L, j) + v
                pairs = _four_pairs(gain, word, W) + _four_pairs(shift, word, W)
            for half in tl.static_range(2):
                n = split_words((fours[2 * (piece_start(W, L, j) // L + v) + half] - mean) * rstd, 4)
                for i in tl.static_range(2):
                    low = n[2 * i] * half_of(pairs[2 * half + i], 0) + half_of(pairs[4 + 2 * half + i], 0)
                    high = n[2 * i + 1] * half_of(pairs[2 * half + i], 1) + half_of(pairs[4 + 2 * half + i], 1)
                    planes = planes + (fp16_pairs(low, high),)
    return planes


@triton.jit
def _lane_place(octet, lane, V: tl.constexpr):
    """Where a lane's V words of its unit of a warp's eight units number `octet` begin in a row."""
    return unit_of(8 * octet + lane % 32 // 4, lane // 32, lane.shape[0] // 32) * (4 * V) + lane % 4 * V


@triton.jit
def unit_norms(gain, shift, lane, W: tl.constexpr, GROUP: tl.constexpr):
    """A lane's gains and shifts, tiles (L, 4) in turn, of four columns each, for `normalised_units`."""
    V: tl.constexpr = unit_vector(W, GROUP)
    norms = ()
    for octet in tl.static_range((pairs_of_a_warp(W, V, lane.shape[0] // 32) + 3) // 4):
        place = _lane_place(octet, lane, V)
        for piece in tl.static_range(2 * V):
            column = (8 * place + 4 * piece)[:, None] + tl.arange(0, 4)[None, :]
            there = (place < W)[:, None]
            norms = norms + (tl.load(gain + column, mask=there, other=0.0),)
            norms = norms + (tl.load(shift + column, mask=there, other=0.0),)
    return norms


@triton.jit
def normalised_units(x, norms, lane, W: tl.constexpr, GROUP: tl.constexpr, EPS: tl.constexpr):
    """LayerNorm(x), x (8 W,), rounded to fp16: 4 V planes for each eight units of a warp, lane group g unit g.

    norms: `unit_norms`. x is read twice, the second time out of the L1.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    OCTETS: tl.constexpr = (pairs_of_a_warp(W, V, lane.shape[0] // 32) + 3) // 4
    total = tl.zeros(lane.shape, tl.float32)
    squares = tl.zeros(lane.shape, tl.float32)
    for octet in tl.static_range(OCTETS):
        place = _lane_place(octet, lane, V)
        for piece in tl.static_range(2 * V):
            at = (x + 8 * place + 4 * piece)[:, None] + tl.arange(0, 4)[None, :]
            four = tl.load(at, mask=(place < W)[:, None], other=0.0)
            total += tl.sum(four, 1)
            squares += tl.sum(four * four, 1)
    both = sums_together((total, squares), 2)
    mean, rstd = mean_and_rstd(both[0], both[1], 8 * W, EPS)
    planes = ()
    for octet in tl.static_range(OCTETS):
        place = _lane_place(octet, lane, V)
        for piece in tl.static_range(2 * V):
            at = (x + 8 * place + 4 * piece)[:, None] + tl.arange(0, 4)[None, :]
            four = (tl.load(at, mask=(place < W)[:, None], other=0.0) - mean) * rstd
            four = four * norms[4 * V * octet + 2 * piece].to(tl.float32)
            n = split_words(four + norms[4 * V * octet + 2 * piece + 1].to(tl.float32), 4)
            planes = planes + (fp16_pairs(n[0], n[1]), fp16_pairs(n[2], n[3]))
    return planes
