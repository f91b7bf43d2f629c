"""Words of 4-bit codes in registers: what all kernels that read them share.

A word takes nine instructions. A shift and four lop3 make pairs: `(word & 0x000F000F) | 0x64006400` is 1024 + raised
code in fp16. With the mask 0x00F000F0 it is 1024 + 16 times the raised code. Four additions or fma take 1032, or 64 +
8, off. Exact. What multiplies the pairs is `int4_mma`. fc2's codes are multiplied as they lie (`int4_neurons`).

Each assembly has a twin in plain arithmetic for the interpreter (ASM False), which rounds in the same places.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common import limits
from dejavu_train.kernels.common.launch import THROUGH_L1

# What factors of codes are multiplied with, so that small ones keep their digits in fp16 (normal from 6.1e-5 on).
FACTOR_UNIT = tl.constexpr(64.0)
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


@triton.constexpr_function
def codes_asm(word, pairs):
    """PTX: the pairs 0..3 of a word's codes."""
    return (
        f"shr.u32 rest, {word}, 8;"
        f"lop3.b32 {pairs}0, {word}, 0x000F000F, magic, 0xEA; lop3.b32 {pairs}1, {word}, 0x00F000F0, magic, 0xEA;"
        f"lop3.b32 {pairs}2, rest, 0x000F000F, magic, 0xEA; lop3.b32 {pairs}3, rest, 0x00F000F0, magic, 0xEA;"
        f"add.rn.f16x2 {pairs}0, {pairs}0, minus1032; fma.rn.f16x2 {pairs}1, {pairs}1, sixteenth, minus72;"
        f"add.rn.f16x2 {pairs}2, {pairs}2, minus1032; fma.rn.f16x2 {pairs}3, {pairs}3, sixteenth, minus72;"
    )


@triton.jit
def codes_of(words):
    """The codes of words (L,), fp32 (L, 8)."""
    column = tl.arange(0, 8)
    shift = 4 * (column // 2) + 16 * (column % 2)
    return (((words[:, None] >> shift[None, :]) & 15) - 8).to(tl.float32)


@triton.jit
def halves_of(plane0, plane1, plane2, plane3):
    """Numbers in four planes of pairs (L,), fp32 (L, 8)."""
    columns = tl.join(tl.join(plane0, plane2), tl.join(plane1, plane3))  # (L, 2, 2): high bit of the plane, low bit
    both = tl.reshape(tl.join(columns & 0xFFFF, columns >> 16), (plane0.shape[0], 8))
    return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def half_of(pairs, number):
    """The low half of pairs of fp16, or where `number` is 1 the high one, in fp32."""
    return (pairs >> (16 * number)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pairs_of(low, high):
    """int32 pairs of two tiles of fp16."""
    lower = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return lower | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def split_words(tile, VECTOR: tl.constexpr):
    """The VECTOR words of a tile (L, VECTOR), a tile each. Those of a thread are renamed, not moved."""
    if VECTOR == 2:
        words = tl.split(tile)
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = (first, second, third, fourth)
    return words


word_vector = triton.constexpr_function(limits.word_vector)


@triton.jit
def neighbours(at, there, V: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """V neighbouring words or numbers from `at` (L,) on, zero where not `there`."""
    if V == 1:
        words = (tl.load(at, mask=there, other=0, cache_modifier=CACHE),)
    else:
        places = at[:, None] + tl.arange(0, V)[None, :]
        words = split_words(tl.load(places, mask=there[:, None], other=0, cache_modifier=CACHE), V)
    return words
