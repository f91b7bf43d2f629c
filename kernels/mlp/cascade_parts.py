"""Device functions of a cascade's kernels: rounding x, products of a word of nibbles, products of a whole row.

See cascade.py for the planes' layout. w is a tile of words, W = d / 8.
"""

import triton
import triton.language as tl

# Bits in the upper mantissa of 1.0 are a float 1 + code / 2^bits without a conversion, of which an SM does few; what
# the ones add is taken off the sum.
ONE = tl.constexpr(0x3F800000)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


@triton.jit
def largest(xs):
    largest = tl.abs(xs[0])
    for k in tl.static_range(1, 8):
        largest = tl.maximum(largest, tl.abs(xs[k]))
    return tl.max(largest, 0)


@triton.jit
def levels(xs, factor):
    """Bytes of the levels of xs that meet even and odd nibbles, and the sum of all levels."""
    total = tl.zeros(xs[0].shape, tl.float32)
    even = tl.zeros(xs[0].shape, tl.int32)
    odd = tl.zeros(xs[0].shape, tl.int32)
    for k in tl.static_range(8):
        level = (xs[k] * factor + ROUND) - ROUND
        total += level
        byte = (level.to(tl.int32) & 255) << (8 * (k // 2))
        if k % 2 == 0:
            even |= byte
        else:
            odd |= byte
    return even, odd, tl.sum(total, 0)


@triton.jit
def x_parts(x, w, W: tl.constexpr):
    """Eight tiles of x: columns k W + w."""
    parts = ()
    for k in tl.static_range(8):
        parts = parts + (tl.load(x + k * W + w, mask=w < W, other=0.0).to(tl.float32),)
    return parts


@triton.jit
def level_products(words, even, odd, ASM: tl.constexpr):
    """Sums over the eight columns of each word of (u + 8) r, int32."""
    if ASM:
        sums = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; and.b32 a, $1, 0x0F0F0F0F; shr.u32 b, $1, 4; and.b32 b, b, 0x0F0F0F0F;"
            " dp4a.u32.s32 a, a, $2, 0; dp4a.u32.s32 $0, b, $3, a; }",
            "=r,r,r,r",
            [words, even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        sums = tl.zeros(words.shape, tl.int32)
        for k in tl.static_range(8):
            level = even
            if k % 2 == 1:
                level = odd
            sums += ((words >> (4 * k)) & 15) * ((level << (24 - 8 * (k // 2))) >> 24)
    return sums


@triton.jit
def row_products(words, rest, x, w, W: tl.constexpr):
    """Sums of u x and of l x over tile w of a row: words are its upper plane, rest points to the other one."""
    middle = tl.load(rest + w, mask=w < W, other=0)
    low0 = tl.load(rest + W + w, mask=w < W, other=0)
    low1 = tl.load(rest + 2 * W + w, mask=w < W, other=0)
    xs = x_parts(x, w, W)
    upper = tl.zeros(words.shape, tl.float32)
    lower = tl.zeros(words.shape, tl.float32)
    total = tl.zeros(words.shape, tl.float32)
    for k in tl.static_range(8):
        code = shifted(words, 19 - 4 * k) & 0x00780000 | ONE
        upper += code.to(tl.float32, bitcast=True) * xs[k]
        low = low0
        if k >= 4:
            low = low1
        code = shifted(middle, 19 - 4 * k) & 0x00780000 | shifted(low, 11 - 8 * (k % 4)) & 0x0007F800 | ONE
        lower += code.to(tl.float32, bitcast=True) * xs[k]
        total += xs[k]
    # 1 + (u + 8) / 16 and 1 + (l + 2048) / 4096
    return tl.sum(16 * upper - 24 * total), tl.sum(4096 * lower - 6144 * total)


@triton.jit
def shifted(words, LEFT: tl.constexpr):
    if LEFT >= 0:
        moved = words << LEFT
    else:
        moved = words >> (-LEFT)
    return moved


@triton.jit
def plane_words(plane, row, on, w, W: tl.constexpr, WIDTH: tl.constexpr):
    """Tile w of a row of a plane, or nothing."""
    return tl.load(plane + row.to(tl.int64) * WIDTH + w, mask=w < tl.where(on, W, 0), other=0)
