# mypy: disable-error-code="assignment"
"""fc2 over all neurons with 4-bit weights, two to eight tokens:

    out[b, j] = residual[b, j] + bias[j] + sum_i h[b, i] scale[i, j // group] code[i, j]

h (B, n), after the ReLU; weight (n, d), a row a neuron, of which columns are outputs. Neurons lie along K of the tensor
cores' m16n8k16, outputs along M, tokens along N. The factor h * scale * 64 is rounded to fp16; products with the codes
are exact, sums in fp32: |h * scale| must stay below 1023, or the sum is infinite.

No code is converted. A nibble 0..15 in the lowest bits of a half is that many times 2^-24 as an fp16 number, one four
bits further up 2^-20: numbers below the normal range, which the tensor cores take at full precision. What codes are
raised by (8) goes off in the end, with the sum of the factors, an instruction on a matrix of ones. By count, of four
words: four prmt put the codes of two neurons side by side, four shifts and sixteen masks make four operands of A, four
instructions multiply: 7 a word, and 3 to 5 for reading words, scales and h.

A warp owns 256 columns: lane (g, t) = (lane / 4, lane % 4) reads four words of each of the neurons 4 t .. 4 t + 3 of a
unit of sixteen, the eight lanes of a neuron one line of 128 bytes. Columns that share a scale are at least those of T
lane groups, for T = 2 or 4 tokens at once: column n of B has the factors of token n % T with the scale of lane groups
n // T * T to n // T * T + T - 1, and of C[g, n] those are meant where n // T = g // T. Five to eight tokens are two
programs. A program's warps lie side by side on the same rows, so that a row is read in pieces of several lines; the
next units are on their way in a queue of each lane (`lane_queue`). Programs that share columns add up in
`add_partials`, in a fixed order. In plain torch: `int4_fc2_reference`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_dtype, check_shape
from kernels.common.int4 import Int4Rows
from kernels.common.int4_mma import FOUR_FLOATS, fp16_pairs
from kernels.common.int4_tiles import _MMA, ASSEMBLY, FACTOR_UNIT, codes_of, half_of, split_words
from kernels.common.lane_queue import ask, lane_queue, take
from kernels.common.launch import use_pdl, wait_for_predecessor
from kernels.mlp.sparse_fc2 import MAX_SPLITS, add_partials, partial_sums

MOST_TOKENS = 8
COLUMNS = tl.constexpr(256)  # of a warp
ASKS = tl.constexpr(5)  # of a unit


@dataclass(frozen=True)
class Int4Fc2BatchSettings:
    """warps: of a program; ahead: units of sixteen neurons on their way; programs: a grid's; registers: of a thread, at
    most."""

    warps: int
    ahead: int
    programs: int
    registers: int


def int4_fc2_batch_settings() -> Int4Fc2BatchSettings:
    """Launch settings: four programs of four warps a multiprocessor of 132."""
    return Int4Fc2BatchSettings(1, 2, 4, 128) if INTERPRET else Int4Fc2BatchSettings(4, 2, 528, 128)


def tokens_at_once(batch: int) -> int:
    """2 or 4: tokens of a program."""
    return 2 if batch == 2 else 4


def takes(weight: Int4Rows, batch: int) -> bool:
    """Whether the kernel multiplies such rows: lane groups of as many tokens share a scale, and scales and h lie in
    pairs."""
    n, d = weight.shape
    aligned = n % 2 == 0 and d % (2 * weight.group) == 0
    return 1 < batch <= MOST_TOKENS and aligned and weight.group % (32 * tokens_at_once(batch)) == 0


def _products_asm() -> str:
    """PTX: $0..$15 = $22..$37 plus a word each of four neurons, $16..$19, times the factors $20 and $21."""
    text = "{ .reg .b32 x, y, p<4>;"
    for half, selector in enumerate(("0x5410", "0x7632")):
        text += f"prmt.b32 x, $16, $17, {selector}; prmt.b32 y, $18, $19, {selector};"
        for high in (0, 1):
            if high:
                text += "shr.u32 x, x, 8; shr.u32 y, y, 8;"
            text += "and.b32 p0, x, 0x000F000F; and.b32 p1, x, 0x00F000F0;"
            text += "and.b32 p2, y, 0x000F000F; and.b32 p3, y, 0x00F000F0;"
            first = 4 * (2 * half + high)
            to, of = (", ".join(f"${start + first + i}" for i in range(4)) for start in (0, 22))
            text += f"{_MMA} {{{to}}}, {{p0, p1, p2, p3}}, {{$20, $21}}, {{{of}}};"
    return text + "}"


PRODUCTS = tl.constexpr(_products_asm())
# Outputs are written before the last input is read: "&".
PRODUCTS_OPERANDS = tl.constexpr(",".join(["=&f"] * 16 + ["r"] * 6 + ["f"] * 16))
ONES = tl.constexpr(
    "{ .reg .b32 one; mov.b32 one, 0x3C003C00;"
    f"{_MMA} {{$0, $1, $2, $3}}, {{one, one, one, one}}, {{$4, $5}}, {{$6, $7, $8, $9}}; }}"
)
ONES_OPERANDS = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 2 + ["f"] * 4))
SIXTEEN_FLOATS = tl.constexpr((tl.float32,) * 16)


@triton.constexpr_function
def _nibble_unit(i):
    """What a raised code of 1 in the masked nibble of column 2 i or 2 i + 1 is as a fp16 number."""
    return 2.0**-20 if i % 2 else 2.0**-24


@triton.jit
def _factor_numbers(b0, b1):
    """(warps, 8 columns, 16 neurons) fp32 of the B operands (L,): neurons 4 t .. 4 t + 3 of lane t."""
    both = tl.join(tl.join(b0, b1) & 0xFFFF, tl.join(b0, b1) >> 16)  # (L, register, half)
    numbers = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(numbers, (b0.shape[0] // 32, 8, 16))


@triton.jit
def fc2_products(acc, words, b0, b1, ASM: tl.constexpr = ASSEMBLY):
    """acc (16 tiles (L,)) plus a lane's word of each of four neurons times the factors of the columns of B.

    Tile 8 s + 4 q + 2 r + p of lane (g, t): column 2 (2 q + r) + s of the word of lane group g, column 2 t + p of B,
    times 2^24 where r is 0 and 2^20 where it is 1; codes are raised ones, 0..15.
    """
    if ASM:
        more = tl.inline_asm_elementwise(
            PRODUCTS, PRODUCTS_OPERANDS, words + (b0, b1) + acc, dtype=SIXTEEN_FLOATS, is_pure=True, pack=1
        )
    else:
        L: tl.constexpr = b0.shape[0]
        first = tl.join(codes_of(words[0]), codes_of(words[2]))  # (L, 8, 2)
        second = tl.join(codes_of(words[1]), codes_of(words[3]))
        codes = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 3, 1)), (L // 32, 8, 1, 16, 8)) + 8.0
        factors = tl.reshape(_factor_numbers(b0, b1), (L // 32, 1, 8, 16, 1))
        total = tl.reshape(tl.sum(codes * factors, 3), (L, 2, 4, 2))  # column of B, then i and s of the word's 2 i + s
        lowest, highest = tl.split(total)
        more = ()
        for s in tl.static_range(2):
            of = tl.permute(highest if s else lowest, (0, 2, 1))  # (L, i, p)
            even, odd = tl.split(of)
            even = split_words(even, 4)
            odd = split_words(odd, 4)
            for i in tl.static_range(4):
                more = more + (acc[8 * s + 2 * i] + even[i] * _nibble_unit(i),)
                more = more + (acc[8 * s + 2 * i + 1] + odd[i] * _nibble_unit(i),)
    return more


@triton.jit
def factor_sums(acc, b0, b1, ASM: tl.constexpr = ASSEMBLY):
    """acc (4 tiles (L,)) plus the sums of the columns 2 t, 2 t + 1, 2 t and 2 t + 1 of B."""
    if ASM:
        more = tl.inline_asm_elementwise(ONES, ONES_OPERANDS, (b0, b1) + acc, dtype=FOUR_FLOATS, is_pure=True, pack=1)
    else:
        L: tl.constexpr = b0.shape[0]
        total = tl.sum(_factor_numbers(b0, b1), 2)
        total = tl.reshape(tl.broadcast_to(total[:, None, :], (L // 32, 8, 8)), (L, 2))
        even, odd = tl.split(total)
        more = (acc[0] + even, acc[1] + odd, acc[2] + even, acc[3] + odd)
    return more


@triton.jit
def _ask_unit(
    queue, weight, scales, h, row, n, word, group, place, K: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    AHEAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The queue with a lane's words of the neurons row .. row + 3 on their way, their scales and a token's h."""
    live = (row < n, row + 1 < n, row + 2 < n, row + 3 < n)
    at = (h + row).to(tl.pointer_type(tl.int32), bitcast=True)
    queue = ask(queue, place, at, at + 1, live[1], live[3], 10 * AHEAD + K, 1, True, True)
    if not WHOLE:
        there = (word < W) & (group < G)
        live = (live[0] & there, live[1] & there, live[2] & there, live[3] & there)
    at = weight + row.to(tl.int64) * W + word
    queue = ask(queue, place, at, at + W, live[0], live[1], 2 * K, 4, True)
    queue = ask(queue, place, at + 2 * W, at + 3 * W, live[2], live[3], 2 * K + 1, 4, True)
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * (G // 2) + group // 2
    step: tl.constexpr = G // 2
    slot: tl.constexpr = 8 * AHEAD + 2 * K  # behind the words, which take as much room as four such slots each
    queue = ask(queue, place, pairs, pairs + step, live[0], live[1], slot, 1, True, True)
    return ask(queue, place, pairs + 2 * step, pairs + 3 * step, live[2], live[3], slot + 1, 1, True, True)


@triton.jit
def _factors(first, second, pairs, odd):
    """The two operands of B: h (two pairs of fp16) times a lane's scale of two, times FACTOR_UNIT, as fp16 pairs."""
    f = ()
    for j in tl.static_range(4):
        both = first[j] if j < 2 else second[j - 2]
        f = f + (half_of(both, odd) * (half_of(pairs[j // 2], j % 2) * FACTOR_UNIT),)
    return fp16_pairs(f[0], f[1]), fp16_pairs(f[2], f[3])


STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, $6; }"
)


@triton.jit
def _store_four(at, values, there, ASM: tl.constexpr = ASSEMBLY):
    """Four numbers of each lane to `at` (pointers (L,), 16 bytes aligned) where `there`, in one piece."""
    if ASM:
        tl.inline_asm_elementwise(
            STORE,
            "=r,l,f,f,f,f,r",
            (at.to(tl.int64),) + values + (there.to(tl.int32),),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for j in tl.static_range(4):
            tl.store(at + j, values[j], mask=there)


@triton.jit(do_not_specialize=["n"])
def _int4_fc2_batch_kernel(
    h,
    weight,
    scales,
    partials,
    n,
    batch,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = D // 8
    G: tl.constexpr = D // GROUP
    WHOLE: tl.constexpr = W % L == 0  # 32 words a warp
    lane = tl.arange(0, L)
    g = lane % 32 // 4
    t = lane % 4
    # Pieces of a line on different banks, as are those that eight lanes read at a time.
    place = lane // 32 * 32 + 8 * t + (g + 2 * t) % 8
    column = tl.program_id(0) // BLOCKS * (L // 32 * COLUMNS) + lane // 32 * COLUMNS + 32 * g
    token = tl.program_id(0) % BLOCKS * TOKENS
    word = column // 8
    group = (column - g % TOKENS * 32) // GROUP
    odd = group % 2
    queue = lane_queue(lane, L * AHEAD * 88)
    step = tl.num_programs(1) * (16 * AHEAD)  # neurons of all programs together
    row = tl.program_id(1) * (16 * AHEAD) + 4 * t
    h += tl.minimum(token + g % TOKENS, batch - 1).to(tl.int64) * n
    wait_for_predecessor(PDL)
    for k in tl.static_range(AHEAD):
        queue = _ask_unit(queue, weight, scales, h, row + 16 * k, n, word, group, place, k, W, G, AHEAD, WHOLE)
    zero = tl.zeros((L,), tl.float32)
    acc = ()
    for _ in tl.static_range(64):
        acc = acc + (zero,)
    ones = (zero, zero, zero, zero)
    for _ in range(tl.program_id(1) * (16 * AHEAD), n, step):
        row += step
        for k in tl.static_range(AHEAD):
            pairs, queue = take(queue, place, 10 * AHEAD + k, 1, AHEAD * ASKS - 1)
            w01, queue = take(queue, place, 2 * k, 4, AHEAD * ASKS - 2)
            w23, queue = take(queue, place, 2 * k + 1, 4, AHEAD * ASKS - 3)
            s01, queue = take(queue, place, 8 * AHEAD + 2 * k, 1, AHEAD * ASKS - 4)
            s23, queue = take(queue, place, 8 * AHEAD + 2 * k + 1, 1, AHEAD * ASKS - 5)
            b0, b1 = _factors(s01, s23, pairs, odd)
            ones = factor_sums(ones, b0, b1)
            for v in tl.static_range(4):
                words = (w01[v], w01[4 + v], w23[v], w23[4 + v])
                acc = acc[16:] + fc2_products(acc[:16], words, b0, b1)
            queue = _ask_unit(queue, weight, scales, h, row + 16 * k, n, word, group, place, k, W, G, AHEAD, WHOLE)
    for p in tl.static_range(2):  # of C[g, 2 t + p] a lane group's own columns of B
        n_column = 2 * t + p
        own_token = token + n_column % TOKENS
        meant = (n_column // TOKENS == g // TOKENS) & (own_token < batch)
        numbers = ()
        for k in tl.static_range(32):  # columns of a lane group
            tile = acc[16 * (k // 8) + 8 * (k % 2) + k % 8 // 2 * 2 + p] * (1 / _nibble_unit(k % 8 // 2))
            numbers = numbers + ((tile - ones[p] * 8.0) * (1 / FACTOR_UNIT),)
        to = partials + (tl.program_id(1) * batch + own_token) * D + column
        for k in tl.static_range(8):
            _store_four(to + 4 * k, numbers[4 * k : 4 * k + 4], meant & (column + 4 * k < D))


def int4_fc2_batch(
    h: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
    settings: Int4Fc2BatchSettings | None = None,
) -> None:
    """h (B, n) fp16, B from 2 to 8; residual and out (B, d) fp32, weight (n, d); bitwise deterministic.

    See the module's docstring. Errors: shapes, dtypes, groups and batches that `takes` refuses, a CPU tensor.
    """
    check_device("h", h)
    batch = len(h)
    n, d = weight.shape
    check_shape("h", h, batch, n)
    check_dtype("h", h, (torch.float16,))
    weight.check("weight", (n, d), h)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    if not 1 < batch <= MOST_TOKENS:
        raise ValueError(f"{batch} tokens, expected 2 to {MOST_TOKENS}")
    if not takes(weight, batch):
        least = 32 * tokens_at_once(batch)
        raise ValueError(
            f"{n} neurons, groups of {weight.group} of {d} columns: an even number of neurons is expected, and of"
            f" multiples of {least} columns"
        )
    settings = settings or int4_fc2_batch_settings()
    tokens = tokens_at_once(batch)
    blocks = triton.cdiv(batch, tokens)
    stripes = triton.cdiv(d, COLUMNS.value * settings.warps)
    rounds = triton.cdiv(n, 16 * settings.ahead)
    splits = min(MAX_SPLITS // batch, max(1, settings.programs // (stripes * blocks)), rounds)
    splits = triton.cdiv(rounds, triton.cdiv(rounds, splits))  # as many rounds each, with as few programs
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, MAX_SPLITS, d)
    pdl = use_pdl(pdl, out.device)
    _int4_fc2_batch_kernel[(stripes * blocks, splits)](
        h,
        weight.words,
        weight.scales,
        partials,
        n,
        batch,
        D=d,
        GROUP=weight.group,
        L=32 * settings.warps,
        AHEAD=settings.ahead,
        TOKENS=tokens,
        BLOCKS=blocks,
        PDL=pdl,
        num_warps=settings.warps,
        maxnreg=settings.registers,
        launch_pdl=pdl,
    )
    add_partials(partials, splits, bias, residual, out, pdl)
