# mypy: disable-error-code="assignment, misc"
"""Rows of 4-bit words in registers, and their products with a vector: what kernels of either format share.

Where a row lies. A row of W words (`int4`: eight columns a word) is spread over L lanes, the threads of a program, in
pieces: of a piece a lane has 4, 2 or 1 neighbouring words, 16 bytes as often as they fit, so that 7168 columns are
pieces of 4096, 2048 and 1024 for 128 lanes, with no lane idle. All words of a lane's piece lie in one group of columns.

A product, by count of instructions a word:
    codes        a shift, four lop3: (word & 0x000F000F) | 0x64006400 is the pair 1024 + raised code in fp16, with the
                 mask 0x00F000F0 1024 + 16 times the raised one; four additions or fma take 1032, or 64 + 8, off. Exact.
    products     four of pairs: with x, which lies in four planes of pairs a word, or with a factor
    sums         one mma.m16n8k16 whose other operand picks a lane's own products and no other lane's
Fourteen, where adding in fp16 pairs and converting the sum of eight takes sixteen: the tensor cores serve as a fp32
adder of fp16 numbers. Each product is rounded to fp16, once; all sums are in fp32. Per lane and piece come one
load, a scale and one multiplication with it: 15.3 a word in pieces of four words, of the 26 that four schedulers can
issue in the time in which a multiprocessor's share of 4.5 TB/s brings one in (h200: 19.4 bytes a clock).

The picking operand. Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and
2 t + 9 of A (16, 16), and (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1) of C (16, 8). With B[k, n] = 1 for
n = 2 t and k of lane t's columns, C[g, 2 t] is the sum of what this lane put into row g. With B[k, n] = 1 where
k % 8 = n, halves stay apart: C[g, 2 t] sums the low halves, C[g, 2 t + 1] the high ones (`int4_outer`). So the
assembly is as elementwise as an addition, whatever the layout of a tile; only all lanes of a warp must reach it
together, as they do wherever no branch differs within a warp. A lane's NaN may reach the three beside it, which
belong to the same row, or to the same list entry.

Each assembly has a twin in plain arithmetic for the interpreter (ASM False), which rounds in the same places.
"""

import triton
import triton.language as tl

from kernels.common.checks import INTERPRET
from kernels.common.launch import THROUGH_L1

ASSEMBLY = tl.constexpr(not INTERPRET)
# What int4_outer's factors are multiplied with, so that small ones keep their digits in fp16 (normal from 6.1e-5 on).
FACTOR_UNIT = tl.constexpr(64.0)


@triton.constexpr_function
def pieces_of(words, lanes):
    """((first word, words a lane), ...) of a row of `words` over `lanes`."""
    start, pieces = 0, ()
    while start < words:
        vector = 1
        for wider in (2, 4):
            if wider * lanes <= words - start and words % wider == 0:
                vector = wider
        pieces += ((start, vector),)
        start += vector * lanes
    return pieces


@triton.constexpr_function
def n_pieces(words, lanes):
    return len(pieces_of(words, lanes))


@triton.constexpr_function
def piece_start(words, lanes, number):
    return pieces_of(words, lanes)[number][0]


@triton.constexpr_function
def piece_vector(words, lanes, number):
    return pieces_of(words, lanes)[number][1]


@triton.constexpr_function
def lane_words(words, lanes):
    """Words of a row that each lane has, those beyond the row's end counted."""
    return sum([vector for _, vector in pieces_of(words, lanes)])


@triton.constexpr_function
def row_tiles(words, lanes):
    """Tiles of a row as `int4_row` gives it: words, and a scale a piece."""
    return lane_words(words, lanes) + n_pieces(words, lanes)


def _codes(word: str, pairs: str) -> str:
    """PTX: the pairs 0..3 of a word's codes."""
    return (
        f"shr.u32 rest, {word}, 8;"
        f"lop3.b32 {pairs}0, {word}, 0x000F000F, magic, 0xEA; lop3.b32 {pairs}1, {word}, 0x00F000F0, magic, 0xEA;"
        f"lop3.b32 {pairs}2, rest, 0x000F000F, magic, 0xEA; lop3.b32 {pairs}3, rest, 0x00F000F0, magic, 0xEA;"
        f"add.rn.f16x2 {pairs}0, {pairs}0, minus1032; fma.rn.f16x2 {pairs}1, {pairs}1, sixteenth, minus72;"
        f"add.rn.f16x2 {pairs}2, {pairs}2, minus1032; fma.rn.f16x2 {pairs}3, {pairs}3, sixteenth, minus72;"
    )


_HEAD = (
    "{ .reg .b32 rest, magic, minus1032, sixteenth, minus72, g, t, pick, p<4>, r<4>; .reg .f32 zero, c<4>;"
    ".reg .pred own;"
    "mov.b32 magic, 0x64006400; mov.b32 minus1032, 0xE408E408; mov.b32 sixteenth, 0x2C002C00;"
    "mov.b32 minus72, 0xD480D480; mov.u32 t, %laneid; shr.u32 g, t, 2; and.b32 t, t, 3; shl.b32 t, t, 1;"
    "setp.eq.u32 own, g, t;"
)
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def _dot_asm(vector: int) -> str:
    """PTX: $0 = the sum of the products of `vector` words with four pairs of x each."""
    text = _HEAD + "selp.b32 pick, 0x3C003C00, 0, own;"
    text += "mov.b32 zero, 0;"
    for v in range(vector):
        text += _codes(f"${1 + v}", "p")
        text += "".join(f"mul.rn.f16x2 p{i}, p{i}, ${1 + vector + 4 * v + i};" for i in range(4))
        before = "c0, c1, c2, c3" if v else "zero, zero, zero, zero"
        text += f"{_MMA} {{c0, c1, c2, c3}}, {{p0, p1, p2, p3}}, {{pick, pick}}, {{{before}}};"
    return text + "add.f32 $0, c0, c2; }"


def _outer_asm() -> str:
    """PTX: $0..$7 = $12..$19 plus the eight codes of word $8 times $10 and those of word $9 times $11."""
    text = _HEAD + "selp.b32 pick, 0x00003C00, 0, own; add.u32 t, t, 1; setp.eq.u32 own, g, t;"
    text += "selp.b32 pick, 0x3C000000, pick, own;" + _codes("$8", "p") + _codes("$9", "r")
    text += "".join(f"mul.rn.f16x2 p{i}, p{i}, $10; mul.rn.f16x2 r{i}, r{i}, $11;" for i in range(4))
    for half in (0, 1):
        to, of = (", ".join(f"${first + 4 * half + i}" for i in range(4)) for first in (0, 12))
        a, b = 2 * half, 2 * half + 1
        text += f"{_MMA} {{{to}}}, {{p{a}, p{b}, r{a}, r{b}}}, {{pick, pick}}, {{{of}}};"
    return text + "}"


DOT1, DOT2, DOT4 = (tl.constexpr(_dot_asm(vector)) for vector in (1, 2, 4))
DOT1_OPERANDS, DOT2_OPERANDS, DOT4_OPERANDS = (tl.constexpr("=f" + ",r" * (5 * vector)) for vector in (1, 2, 4))
OUTER = tl.constexpr(_outer_asm())
OUTER_OPERANDS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 4 + ["f"] * 8))
EIGHT_FLOATS = tl.constexpr((tl.float32,) * 8)


@triton.jit
def codes_of(words):
    """The codes of words (...), fp32 (..., 8)."""
    column = tl.arange(0, 8)
    shift = 4 * (column // 2) + 16 * (column % 2)
    if len(words.shape) == 1:
        codes = (words[:, None] >> shift[None, :]) & 15
    else:
        codes = (words[:, :, None] >> shift[None, None, :]) & 15
    return (codes - 8).to(tl.float32)


@triton.jit
def halves_of(plane0, plane1, plane2, plane3):
    """What lies in four planes of pairs (...), fp32 (..., 8)."""
    columns = tl.join(tl.join(plane0, plane2), tl.join(plane1, plane3))  # (..., 2, 2): high bit of the plane, low bit
    both = tl.join(columns & 0xFFFF, columns >> 16)
    if len(plane0.shape) == 1:
        both = tl.reshape(both, (plane0.shape[0], 8))
    else:
        both = tl.reshape(both, (plane0.shape[0], plane0.shape[1], 8))
    return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def half_of(pairs, number):
    """The low half of pairs of fp16, or where `number` is 1 the high one, in fp32."""
    return (pairs >> (16 * number)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded(products):
    """fp32 numbers through fp16."""
    return products.to(tl.float16).to(tl.float32)


@triton.jit
def pairs_of(low, high):
    """int32 pairs of two tiles of fp16."""
    lower = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return lower | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def int4_dot(words, x, VECTOR: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """sum over VECTOR words and their columns of code times x: fp32, of the operands' shape.

    words: VECTOR tiles of int32; x: 4 VECTOR tiles of pairs, plane i of a word its columns 2 i and 2 i + 1; all may be
    broadcast. Products are rounded to fp16: |x| below 8188 keeps them finite.
    """
    if ASM:
        if VECTOR == 1:
            total = tl.inline_asm_elementwise(DOT1, DOT1_OPERANDS, words + x, dtype=tl.float32, is_pure=True, pack=1)
        elif VECTOR == 2:
            total = tl.inline_asm_elementwise(DOT2, DOT2_OPERANDS, words + x, dtype=tl.float32, is_pure=True, pack=1)
        else:
            total = tl.inline_asm_elementwise(DOT4, DOT4_OPERANDS, words + x, dtype=tl.float32, is_pure=True, pack=1)
    else:
        for v in tl.static_range(VECTOR):
            numbers = halves_of(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3])
            products = rounded(codes_of(words[v]) * numbers)
            part = tl.sum(products, len(products.shape) - 1)
            if v == 0:
                total = part
            else:
                total += part
    return total


@triton.jit
def int4_outer(acc, first, second, f_first, f_second, ASM: tl.constexpr = ASSEMBLY):
    """acc (a tuple of eight fp32 tiles, a column of the word each) + codes of first * f_first + of second * f_second.

    The factors are pairs of one fp16 number twice; products are rounded to fp16, sums are in fp32.
    """
    if ASM:
        more = tl.inline_asm_elementwise(
            OUTER, OUTER_OPERANDS, (first, second, f_first, f_second) + acc, dtype=EIGHT_FLOATS, is_pure=True, pack=1
        )
    else:
        one = rounded(codes_of(first) * halves_of(f_first, f_first, f_first, f_first))
        two = rounded(codes_of(second) * halves_of(f_second, f_second, f_second, f_second))
        low, high = tl.split(tl.reshape(one + two, (first.shape[0], 4, 2)))
        even = split_words(low, 4)
        odd = split_words(high, 4)
        more = ()
        for i in tl.static_range(4):
            more = more + (acc[2 * i] + even[i], acc[2 * i + 1] + odd[i])
    return more


@triton.jit
def split_words(tile, VECTOR: tl.constexpr):
    """The VECTOR words of a tile (..., VECTOR), a tile each; those of a thread are renamed, not moved."""
    if VECTOR == 2:
        words = tl.split(tile)
    else:
        if len(tile.shape) == 2:
            fours = tl.reshape(tile, (tile.shape[0], 2, 2))
        else:
            fours = tl.reshape(tile, (tile.shape[0], tile.shape[1], 2, 2))
        even, odd = tl.split(fours)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = (first, second, third, fourth)
    return words


@triton.constexpr_function
def whole_mask(end, words):
    """Whether a piece's mask is one of lanes: beyond the row's end, and in the interpreter, which takes no scalar."""
    return end > words or INTERPRET


@triton.jit
def piece_words(at, there, lane, START: tl.constexpr, VECTOR: tl.constexpr, W: tl.constexpr):
    """A lane's words of one piece of the row at `at`; undefined where not `there` and beyond the row's end.

    Filling these would cost an instruction a word, for words that are multiplied with nothing, or that no one asks for.
    """
    place = START + lane * VECTOR
    mask = there
    if whole_mask(START + lane.shape[0] * VECTOR, W):
        mask = place < tl.where(there, W, 0)
    if VECTOR == 1:
        words = (tl.load(at + place, mask=mask, eviction_policy="evict_first"),)
    else:
        each = place[:, None] + tl.arange(0, VECTOR)[None, :]
        if whole_mask(START + lane.shape[0] * VECTOR, W):
            mask = mask[:, None]
        words = split_words(tl.load(at + each, mask=mask, eviction_policy="evict_first"), VECTOR)
    return words


@triton.jit
def piece_scales(at, there, lane, START: tl.constexpr, VECTOR: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr):
    """A lane's scale of one piece of a row, zero where not `there` and beyond the row's end."""
    place = START + lane * VECTOR
    mask = there
    if whole_mask(START + lane.shape[0] * VECTOR, W):
        mask = place < tl.where(there, W, 0)
    return tl.load(at + place * 8 // GROUP, mask=mask, other=0.0)


@triton.jit
def int4_row(words, scales, row, there, lane, W: tl.constexpr, GROUP: tl.constexpr):
    """A row as a tuple: `lane_words` tiles (L,) of words, then a tile of fp16 scales for each piece.

    Not read where `there` is false: words are then undefined and the scales zero.
    """
    L: tl.constexpr = lane.shape[0]
    row = row.to(tl.int64)
    tiles = ()
    for j in tl.static_range(n_pieces(W, L)):
        tiles = tiles + piece_words(words + row * W, there, lane, piece_start(W, L, j), piece_vector(W, L, j), W)
    for j in tl.static_range(n_pieces(W, L)):
        at = scales + row * (8 * W // GROUP)
        scale = piece_scales(at, there, lane, piece_start(W, L, j), piece_vector(W, L, j), W, GROUP)
        tiles = tiles + (scale,)
    return tiles


@triton.jit
def word_planes(tile):
    """Four tiles (L,) of pairs from the eight columns (L, 8) of a word each."""
    halves = tile.to(tl.float16)
    low, high = tl.split(tl.reshape(halves, (tile.shape[0], 4, 2)))
    return split_words(pairs_of(low, high), 4)


@triton.jit
def word_columns(x, word, W: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """The eight columns (L, 8) of each lane's word of x (8 W,), zero beyond the end."""
    at = x + (8 * word)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(at, mask=(word < W)[:, None], other=0.0, cache_modifier=CACHE)


@triton.jit
def column_tiles(x, lane, W: tl.constexpr, L: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """x (8 W,) as `lane_words` tiles (L, 8), zero beyond the end."""
    tiles = ()
    for j in tl.static_range(n_pieces(W, L)):
        for v in tl.static_range(piece_vector(W, L, j)):
            word = piece_start(W, L, j) + lane * piece_vector(W, L, j) + v
            tiles = tiles + (word_columns(x, word, W, CACHE),)
    return tiles


@triton.jit
def planes_of(tiles, N: tl.constexpr):
    """The 4 N planes of N tiles (L, 8)."""
    planes = ()
    for k in tl.static_range(N):
        planes = planes + word_planes(tiles[k])
    return planes


@triton.jit
def int4_product(row, x, W: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr = 0):
    """Each lane's part of the product of a row with x's planes, fp32 (L,); FIRST: where the row's tiles begin."""
    N: tl.constexpr = lane_words(W, L)
    acc = tl.zeros(x[0].shape, tl.float32)
    for j in tl.static_range(n_pieces(W, L)):
        part = int4_dot(
            row[FIRST + piece_start(W, L, j) // L : FIRST + piece_start(W, L, j) // L + piece_vector(W, L, j)],
            x[4 * (piece_start(W, L, j) // L) : 4 * (piece_start(W, L, j) // L + piece_vector(W, L, j))],
            piece_vector(W, L, j),
        )
        acc += part * row[FIRST + N + j].to(tl.float32)
    return acc


@triton.jit
def store_columns(at, acc, lane, W: tl.constexpr):
    """Stores acc, eight tiles (L,) a word as `int4_outer` sums them, divided by FACTOR_UNIT, at `at` (8 W,)."""
    L: tl.constexpr = lane.shape[0]
    for j in tl.static_range(n_pieces(W, L)):
        for v in tl.static_range(piece_vector(W, L, j)):
            c = acc[8 * (piece_start(W, L, j) // L + v) : 8 * (piece_start(W, L, j) // L + v) + 8]
            even = tl.join(tl.join(c[0], c[4]), tl.join(c[2], c[6]))
            odd = tl.join(tl.join(c[1], c[5]), tl.join(c[3], c[7]))
            tile = tl.reshape(tl.join(even, odd), (L, 8)) * (1 / FACTOR_UNIT)
            word = piece_start(W, L, j) + lane * piece_vector(W, L, j) + v
            tl.store(at + (8 * word)[:, None] + tl.arange(0, 8)[None, :], tile, mask=(word < W)[:, None])
