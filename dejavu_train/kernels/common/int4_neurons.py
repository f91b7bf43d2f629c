"""Four words of each of sixteen neurons times up to eight columns of factors, on the tensor cores.

Neurons are rows of fc2, and lie along K of m16n8k16. Along M lie their columns, which are fc2's outputs. Along N lie
columns of factors. A warp has 256 columns: lane (g, t) = (lane / 4, lane % 4) four words of each of the neurons 4 t ..
4 t + 3.

No code is converted. A nibble in the lowest bits of 16 is an fp16 number: that many times 2^-24. Four bits further up
it is that many times 2^-20. Both lie below the normal range, and the tensor cores take them at full precision. What
codes are raised by (8) goes off in the end, with the sum of the factors, an instruction on a matrix of ones. By count,
a word takes 7 instructions. For four words, four prmt put the codes of two neurons side by side. Four shifts and
sixteen masks make four operands, and four more instructions multiply. Without ASM there are twins in plain arithmetic.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly, operands
from dejavu_train.kernels.common.int4_mma import fp16_pairs, from_lane
from dejavu_train.kernels.common.int4_tiles import FACTOR_UNIT, MMA, codes_of, split_words
from dejavu_train.kernels.common.lane_queue import take


def _products_asm() -> str:
    """PTX: $0..$15 = $22..$37 plus a word each of four neurons, $16..$19, times the factors $20 and $21."""
    text = "{ .reg .b32 x, y, p<4>;"
    for number in range(4):
        if number % 2:
            text += "shr.u32 x, x, 8; shr.u32 y, y, 8;"
        else:
            selector = ("0x5410", "0x7632")[number // 2]
            text += f"prmt.b32 x, $16, $17, {selector}; prmt.b32 y, $18, $19, {selector};"
        text += "and.b32 p0, x, 0x000F000F; and.b32 p1, x, 0x00F000F0;"
        text += "and.b32 p2, y, 0x000F000F; and.b32 p3, y, 0x00F000F0;"
        to, of = (", ".join(f"${start + 4 * number + i}" for i in range(4)) for start in (0, 22))
        text += f"{MMA} {{{to}}}, {{p0, p1, p2, p3}}, {{$20, $21}}, {{{of}}};"
    return text + "}"


PRODUCTS = tl.constexpr(_products_asm())
ONES = tl.constexpr(
    "{ .reg .b32 one; mov.b32 one, 0x3C003C00;"
    f"{MMA} {{$0, $1, $2, $3}}, {{one, one, one, one}}, {{$4, $5}}, {{$6, $7, $8, $9}}; }}"
)


@triton.constexpr_function
def nibble_unit(i):
    """Value of a raised code of 1 in the masked nibble of column 2 i or 2 i + 1 as a fp16 number."""
    return 2.0**-20 if i % 2 else 2.0**-24


@triton.jit
def lane_places(lane):
    """Where a lane's words lie in a queue: pieces of a line on different banks, as are those that eight lanes read at a
    time."""
    t = lane % 4
    return lane // 32 * 32 + 8 * t + (lane % 32 // 4 + 2 * t) % 8


@triton.constexpr_function
def _take_halves(lanes, slot, behind):
    """PTX: `take` of slot `slot` with words of other lanes, the first half of them from $8 and the second from $9."""
    text = f"cp.async.wait_group {behind}; bar.warp.sync 0xffffffff;"
    for k in range(4):
        place = (2 * slot + k // 2) * lanes * 16
        text += f"ld.shared.v2.b32 {{${2 * k}, ${2 * k + 1}}}, [${8 + k % 2} + {place}];"
    return text + "bar.warp.sync 0xffffffff;"


@triton.jit
def take_halves(queue, lane, SLOT: tl.constexpr, BEHIND: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """`lane_queue.take` of slots of four words, asked for with `lane_places`, with other words of the same neurons.

    A warp has 256 columns. Of each half of them lane group g takes the words 2 g and 2 g + 1."""
    L: tl.constexpr = lane.shape[0]
    g = lane % 32 // 4
    if ASM:
        of_first = (queue[0] + lane // 32 * 512) + (lane % 4 * 8 + (g // 2 + lane % 4 * 2) % 8) * 16 + g % 2 * 8
        of_second = (queue[0] + lane // 32 * 512) + (lane % 4 * 8 + (4 + g // 2 + lane % 4 * 2) % 8) * 16 + g % 2 * 8
        words = assembly(_take_halves(L, SLOT, BEHIND), operands("=&r", 8, "r", 2), (of_first, of_second))
    else:
        own, queue = take(queue, lane, SLOT, 4, BEHIND)
        words = ()
        for row in tl.static_range(2):
            for half in tl.static_range(2):
                source = (4 * half + g // 2) * 4 + lane % 4
                for i in tl.static_range(2):
                    low = from_lane(own[4 * row + i], source)
                    words = words + (tl.where(g % 2 == 0, low, from_lane(own[4 * row + 2 + i], source)),)
    return words, queue


@triton.jit
def factor_pairs(scales, h):
    """The two operands of B: h of four rows times a lane's fp32 scales of them, times FACTOR_UNIT, as fp16 pairs."""
    f = ()
    for j in tl.static_range(4):
        f = f + (scales[j] * (h[j].to(tl.float32) * FACTOR_UNIT),)
    return fp16_pairs(f[0], f[1]), fp16_pairs(f[2], f[3])


@triton.jit
def _factor_numbers(b0, b1):
    """(warps, 8 columns, 16 neurons) fp32 of the B operands (L,): neurons 4 t .. 4 t + 3 of lane t."""
    both = tl.join(tl.join(b0, b1) & 0xFFFF, tl.join(b0, b1) >> 16)  # (L, register, half)
    numbers = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(numbers, (b0.shape[0] // 32, 8, 16))


@triton.jit
def fc2_products(acc, words, b0, b1, ASM: tl.constexpr = ASSEMBLY):
    """acc (16 tiles (L,)) plus a lane's word of each of four neurons times the factors of the columns of B.

    Tile `8 s + 4 q + 2 r + p` of lane (g, t) is column `2 (2 q + r) + s` of the word of lane group g, and in B column
    `2 t + p`. It is multiplied by 2^24 for even columns (r = 0), and by 2^20 for odd ones. Codes are raised ones,
    0..15.
    """
    if ASM:
        more = assembly(PRODUCTS, operands("=&f", 16, "r", 6, "f", 16), words + (b0, b1) + acc, PURE=True)
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
                more = more + (acc[8 * s + 2 * i] + even[i] * nibble_unit(i),)
                more = more + (acc[8 * s + 2 * i + 1] + odd[i] * nibble_unit(i),)
    return more


@triton.jit
def factor_sums(acc, b0, b1, ASM: tl.constexpr = ASSEMBLY):
    """acc (4 tiles (L,)) plus the sums of the columns 2 t, 2 t + 1, 2 t and 2 t + 1 of B."""
    if ASM:
        more = assembly(ONES, operands("=f", 4, "r", 2, "f", 4), (b0, b1) + acc, PURE=True)
    else:
        L: tl.constexpr = b0.shape[0]
        total = tl.sum(_factor_numbers(b0, b1), 2)
        total = tl.reshape(tl.broadcast_to(total[:, None, :], (L // 32, 8, 8)), (L, 2))
        even, odd = tl.split(total)
        more = (acc[0] + even, acc[1] + odd, acc[2] + even, acc[3] + odd)
    return more


STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, $6; }"
)


@triton.jit
def store_four(at, values, there, ASM: tl.constexpr = ASSEMBLY):
    """Four numbers of each lane to `at` (pointers (L,), 16 bytes aligned) where `there`, in one piece."""
    if ASM:
        assembly(STORE, "=r,l,f,f,f,f,r", (at.to(tl.int64),) + values + (there.to(tl.int32),))
    else:
        for j in tl.static_range(4):
            tl.store(at + j, values[j], mask=there)
