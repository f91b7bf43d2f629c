# mypy: disable-error-code="assignment"
"""LayerNorm of one row as the planes that 4-bit rows are multiplied with, its gains and shifts read early.

    n = (x - mean) rstd gain + shift, rounded to fp16; x (8 W,) fp32, gain and shift (8 W,), W words a row

A layer's gains and shifts were last read a token ago, so they come from the memory. They depend on nothing, and are
read before the wait for the kernel before (`unit_norms`), for `int4_row_step`.
"""

import triton
import triton.language as tl

from kernels.common.int4_mma import fp16_pairs, unit_vector
from kernels.common.int4_row_step import pairs_of_a_warp, unit_of
from kernels.common.int4_tiles import split_words
from kernels.common.launch import THROUGH_L1, sums_together
from kernels.common.layer_norm import mean_and_rstd


@triton.jit
def _lane_place(octet, lane, V: tl.constexpr):
    """Where a lane's V words of its unit of a warp's eight units number `octet` begin in a row."""
    return unit_of(8 * octet + lane % 32 // 4, lane // 32, lane.shape[0] // 32) * (4 * V) + lane % 4 * V


@triton.jit
def unit_pairs(x, lane, W: tl.constexpr, GROUP: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """x (8 W,) fp16 as it is, in the planes of `normalised_units`; x: its int32 pairs."""
    V: tl.constexpr = unit_vector(W, GROUP)
    planes = ()
    for octet in tl.static_range((pairs_of_a_warp(W, V, lane.shape[0] // 32) + 3) // 4):
        place = _lane_place(octet, lane, V)
        for v in tl.static_range(V):
            at = (x + 4 * (place + v))[:, None] + tl.arange(0, 4)[None, :]
            planes = planes + split_words(
                tl.load(at, mask=(place < W)[:, None], other=0, cache_modifier=CACHE), 4
            )  # fmt: skip
    return planes


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
