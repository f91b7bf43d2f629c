"""Products of sixteen rows of 4-bit words with up to eight inputs on the tensor cores (m16n8k16).

Lane (g, t) = (lane / 4, lane % 4) of a warp, V words of a row at a time:

             t = 0  1  2  3   unit: 4 V words, which share a scale (128 columns at V = 4)
    row g        V  V  V  V   A: pairs of codes of the rows g and g + 8
    row g + 8    V  V  V  V   B: pairs of input g, the same columns
    sums of the rows g and g + 8 with the inputs 2 t and 2 t + 1

Products are exact, sums in fp32. The warps of a program add up what they have in the end.
A lane is a thread: tiles are (32 * warps,). Without ASM a twin in plain arithmetic.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly, operands
from dejavu_train.kernels.common.int4_tiles import MMA, codes_asm, codes_of, halves_of, pairs_of
from dejavu_train.kernels.common.lane_queue import ask, ask_lines, drain, line_slot_bytes, take, take_unit


@triton.constexpr_function
def unit_vector(words, group):
    """V: words of a lane, so that the four lanes of a unit share a scale. words: of a row."""
    for vector in (4, 2):
        if group % (32 * vector) == 0 and words % vector == 0:
            return vector
    return 1


@triton.constexpr_function
def segment_units(words, vector):
    """Units of so many words, the last one perhaps not whole."""
    return -(-words // (4 * vector))


@triton.constexpr_function
def pairs_of_a_warp(words, vector, warps, segments=1):
    """Pairs of units of a row, of segments of so many words, that each warp takes, some beyond the end perhaps."""
    pairs = -(-segments * segment_units(words, vector) // 2)
    return -(-pairs // warps)


@triton.jit
def unit_of(step, warp, WARPS: tl.constexpr):
    """The unit of a row that a warp takes as its number `step`: warps take pairs of neighbouring units in turn."""
    return (step // 2 * WARPS + warp) * 2 + step % 2


@triton.constexpr_function
def groups_of(words, group):
    return max(1, 8 * words // group)


@triton.constexpr_function
def units_a_group(group, vector):
    return (group + 32 * vector - 1) // (32 * vector)


# The order in which a sum runs over columns is free. So a word's pairs are already what m16n8k16 wants of a lane: the
# first two pairs for one instruction, the others for a second. By count a word takes 11.5 instructions. Nine make fp16
# numbers of its codes (`int4_tiles`), one is the mma. Eight words share the loads and four multiplications.
@triton.constexpr_function
def _mma_asm(vector):
    """PTX: $0..$3 = sums over `vector` words of two rows with four pairs of x each."""
    text = (
        "{ .reg .b32 rest, magic, minus1032, sixteenth, minus72, p<4>, r<4>; .reg .f32 zero;"
        "mov.b32 magic, 0x64006400; mov.b32 minus1032, 0xE408E408; mov.b32 sixteenth, 0x2C002C00;"
        "mov.b32 minus72, 0xD480D480; mov.b32 zero, 0;"
    )
    for v in range(vector):
        text += codes_asm(f"${4 + v}", "p") + codes_asm(f"${4 + vector + v}", "r")
        for half in (0, 1):
            a, b = 2 * half, 4 + 2 * vector + 4 * v + 2 * half
            before = "$0, $1, $2, $3" if v or half else "zero, zero, zero, zero"
            text += f"{MMA} {{$0, $1, $2, $3}}, {{p{a}, r{a}, p{a + 1}, r{a + 1}}}, {{${b}, ${b + 1}}}, {{{before}}};"
    return text + "}"


@triton.jit
def _plain_products(words, x, RAISED: tl.constexpr, V: tl.constexpr):
    """`int4_mma` in plain arithmetic, of codes that are raised by so much."""
    L: tl.constexpr = words[0].shape[0]
    sums = ()
    for row in tl.static_range(2):
        total = tl.zeros((L // 32, 8, 8), tl.float32)
        for v in tl.static_range(V):
            codes = tl.reshape(codes_of(words[row * V + v]) + RAISED, (L // 32, 8, 1, 32))
            numbers = halves_of(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3])
            total += tl.sum(codes * tl.reshape(numbers, (L // 32, 1, 8, 32)), 3)
        even, odd = tl.split(tl.reshape(total, (L, 2)))
        sums = sums + (even, odd)
    return sums


@triton.jit
def int4_mma(words, x, V: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """fp32 (L,) sums of codes times x: row g for inputs 2 t and 2 t + 1, then row g + 8 for these.

    words: V of row g, then V of row g + 8. x: 4 V planes of pairs of input g's columns.
    """
    if ASM:
        sums = assembly(_mma_asm(V), operands("=&f", 4, "r", 6 * V), words + x, PURE=True)
    else:
        sums = _plain_products(words, x, 0.0, V)
    return sums


# Where inputs serve many rows, no code is converted. A word takes six instructions: a shift, four masks and an mma. The
# nibbles multiply as the small fp16 numbers that they are (`int4_neurons`), and the sums of the inputs, times eight, go
# off. Even and odd pairs of a word differ by 2^4, and have sums of their own.
RAISED_UNIT = tl.constexpr(2.0**-20)  # what sums of raised codes times x are multiplied by


@triton.constexpr_function
def _raised_asm(vector):
    """PTX: $0..$3 = the last two operands, of both rows, plus sums of `vector` words of two rows with their x."""
    text = "{ .reg .b32 rest, p<4>, r<4>; .reg .f32 zero, low<4>; mov.b32 zero, 0;"
    last = 4 + 6 * vector
    for v in range(vector):
        for pairs, word in (("p", f"${4 + v}"), ("r", f"${4 + vector + v}")):
            text += f"shr.u32 rest, {word}, 8;"
            text += f"and.b32 {pairs}0, {word}, 0x000F000F; and.b32 {pairs}1, {word}, 0x00F000F0;"
            text += f"and.b32 {pairs}2, rest, 0x000F000F; and.b32 {pairs}3, rest, 0x00F000F0;"
        for k, sums, begin in (
            (0, "low0, low1, low2, low3", "zero, zero, zero, zero"),
            (1, "$0, $1, $2, $3", f"${last}, ${last + 1}, ${last}, ${last + 1}"),
        ):
            b = 4 + 2 * vector + 4 * v + k
            text += f"{MMA} {{{sums}}}, {{p{k}, r{k}, p{k + 2}, r{k + 2}}}, {{${b}, ${b + 2}}}, "
            text += f"{{{sums if v else begin}}};"
    for k in range(4):
        text += f"fma.rn.f32 ${k}, low{k}, 0f41800000, ${k};"  # 16
    return text + "}"


@triton.constexpr_function
def _offset_asm(vector):
    """PTX: $0, $1 = the sums of 4 `vector` pairs of x of the inputs 2 t and 2 t + 1, times minus 8 RAISED_UNIT."""
    text = "{ .reg .b32 one; .reg .f32 zero, other<2>; mov.b32 one, 0x3C003C00; mov.b32 zero, 0;"
    for k in range(2 * vector):
        b = 2 + k // 2 * 4 + k % 2  # pairs of registers as in `_raised_asm`
        before = "$0, $1, other0, other1" if k else "zero, zero, zero, zero"
        text += f"{MMA} {{$0, $1, other0, other1}}, {{one, one, one, one}}, {{${b}, ${b + 2}}}, {{{before}}};"
    return text + "mul.rn.f32 $0, $0, 0fB7000000; mul.rn.f32 $1, $1, 0fB7000000; }"  # -2^-17


@triton.jit
def raised_offset(x, V: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """Start of `raised_mma`, two fp32 (L,): the sums of x of a lane's two inputs, by which codes are raised."""
    L: tl.constexpr = x[0].shape[0]
    if ASM:
        sums = assembly(_offset_asm(V), operands("=&f", 2, "r", 4 * V), x, PURE=True)
    else:
        total = tl.zeros((L // 32, 8), tl.float32)
        for v in tl.static_range(V):
            numbers = halves_of(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3])
            total += tl.sum(tl.reshape(numbers, (L // 32, 8, 32)), 2)
        every = tl.broadcast_to(total[:, None, :], (L // 32, 8, 8))
        even, odd = tl.split(tl.reshape(every * (-8 * RAISED_UNIT), (L, 2)))
        sums = (even, odd)
    return sums


@triton.jit
def raised_mma(words, x, offset, V: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """RAISED_UNIT times `int4_mma`. offset: `raised_offset` of x."""
    if ASM:
        sums = assembly(_raised_asm(V), operands("=&f", 4, "r", 6 * V, "f", 2), words + x + offset, PURE=True)
    else:
        own = _plain_products(words, x, 8.0, V)
        sums = ()
        for k in tl.static_range(4):
            sums = sums + (own[k] * RAISED_UNIT + offset[k % 2],)
    return sums


@triton.jit
def from_lane(values, number, ASM: tl.constexpr = ASSEMBLY):
    """int32 or fp32 (L,): to all lanes of a warp what its lane `number` holds, a number of all or of each."""
    L: tl.constexpr = values.shape[0]
    source = tl.zeros((L,), tl.int32) + number
    if ASM:
        text: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        found = assembly(text, "=f,f,r" if values.dtype == tl.float32 else "=r,r,r", (values, source), PURE=True)
    else:
        lanes = tl.reshape(values, (L // 32, 1, 32))
        wanted = tl.reshape(source, (L // 32, 32, 1))
        found = tl.reshape(tl.sum(tl.where(tl.arange(0, 32)[None, None, :] == wanted, lanes, 0), 2), (L,))
    return found


@triton.jit
def fp16_pairs(low, high, ASM: tl.constexpr = ASSEMBLY):
    """int32 pairs of fp16 of two fp32 tiles."""
    if ASM:
        pairs = assembly("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", (low, high), PURE=True)
    else:
        pairs = pairs_of(low.to(tl.float16), high.to(tl.float16))
    return pairs


# Words come through a queue (`lane_queue`), as pairs of units, 128 bytes of a row. A load takes four rows: loads of
# eight rows, half as wide, take longer.
@triton.jit
def _ask_pair(queue, at, unit, lane, PAIR: tl.constexpr, W: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr):
    """The queue with a warp's words of its units `unit` + 2 PAIR and the next of 16 rows on their way, in slot PAIR.

    at: where `unit` begins in the first row. Beyond the rows' end zeros.
    """
    left = W - (unit + 2 * PAIR) * (4 * V)
    return ask_lines(queue, lane, at, 16, left, PAIR, V, W, PAIR * 8 * V, not WHOLE)


@triton.jit
def _ask_input(queue, x, unit, lane, SLOT: tl.constexpr, W: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr):
    """The queue with a lane's input of `unit` on its way, two asks, zeros beyond the end. x: its int32 pairs."""
    place = unit * (4 * V) + lane % 4 * V
    there = place < W
    at = x + 4 * place
    queue = ask(queue, lane, at, at + V, there, there, SLOT, V, not WHOLE, True)
    return ask(queue, lane, at + 2 * V, at + 3 * V, there, there, SLOT + 1, V, not WHOLE, True)


@triton.jit
def _unit_scales(scales, unit, W: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """A lane's scales of `unit` of the row at `scales` and of the eighth row behind it, zero beyond the end."""
    at = scales + unit // units_a_group(GROUP, V)
    there = unit * (4 * V) < W
    return (tl.load(at, mask=there, other=0.0), tl.load(at + 8 * groups_of(W, GROUP), mask=there, other=0.0))


@triton.jit
def either(first, one, two, N: tl.constexpr):
    """N numbers of the tuple `one` where `first`, else of `two`."""
    chosen = ()
    for k in tl.static_range(N):
        chosen = chosen + (tl.where(first, one[k], two[k]),)
    return chosen


@triton.jit
def scaled(acc, part, first, second):
    """Four sums plus those of a unit times their rows' scales."""
    one = first.to(tl.float32)
    two = second.to(tl.float32)
    return (acc[0] + part[0] * one, acc[1] + part[1] * one, acc[2] + part[2] * two, acc[3] + part[3] * two)


@triton.jit
def tile_sums(acc, L: tl.constexpr, INPUTS: tl.constexpr):
    """Rows (16) by inputs (2, 4 or 8) of a program's tile: the sums of its warps, and of units side by side."""
    lanes = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))  # (L, row half, input parity)
    total = tl.sum(tl.reshape(lanes, (L // 32, 32, 2, 2)), 0)
    values = tl.permute(tl.sum(tl.reshape(total, (8, 8 // INPUTS, INPUTS // 2, 2, 2)), 1), (2, 0, 1, 3))
    return tl.reshape(values, (16, INPUTS))


# One input needs no column of B for itself. It lies in all of them, eight units side by side, unit s in column s. There
# only unit s's products are meant, and the others get a scale of zero. `stages.int4_rows` multiplies so. Two or four
# inputs lie in `int4_tile` as four or two units each, of which a lane group reads one. So nothing is read twice.
@triton.constexpr_function
def units_beside(inputs, steps):
    """How many units of an input lie side by side in the columns of B."""
    assert inputs in (2, 4, 8)
    side = min(8 // inputs, steps)
    least = max(side, 2)  # pairs of units are read together
    assert steps % least == 0, f"{steps} units at once with {inputs} inputs: expected a multiple of {least}"
    return side


@triton.constexpr_function
def whole_rows(words, group, lanes, steps):
    """Whether the warps' steps end with the row."""
    return words % (4 * unit_vector(words, group) * (lanes // 32) * steps) == 0


@triton.constexpr_function
def tile_bytes(words, group, lanes, steps, inputs, turn=0):
    """Shared memory of the queue of an `int4_tile`: pairs of units of the next steps, and the next turn's inputs."""
    turn = turn or steps
    return lanes * unit_vector(words, group) * (8 * steps + 16 * (turn // units_beside(inputs, turn)))


@triton.jit
def ask_words(
    queue, words, line, W: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr,
    ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """Asks for the words with which an `int4_tile` begins, the same for any number of inputs.

    Without ASM nothing is asked for here: that queue gives back in the order of the asks, where inputs lie between.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    if ASM:
        lane = tl.arange(0, L)
        unit = lane // 32 * STEPS
        at = words + line.to(tl.int64) * W + unit * (4 * V)
        for pair in tl.static_range(STEPS // 2):
            _ask_pair(queue, at, unit, lane, pair, W, V, whole_rows(W, GROUP, L, STEPS))


@triton.jit
def ask_inputs(
    queue, x, W: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr, INPUTS: tl.constexpr,
    TURN: tl.constexpr, ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """Asks for the inputs with which an `int4_tile` begins. Without ASM for nothing, see `ask_words`."""
    V: tl.constexpr = unit_vector(W, GROUP)
    SIDE: tl.constexpr = units_beside(INPUTS, TURN)
    if ASM:
        lane = tl.arange(0, L)
        unit = lane // 32 * STEPS + lane % 32 // 4 // INPUTS % SIDE
        for k in tl.static_range(TURN // SIDE):
            _ask_input(queue, x, unit + k * SIDE, lane, STEPS + 2 * k, W, V, whole_rows(W, GROUP, L, STEPS))


@triton.jit
def first_scales(
    scales, line, W: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr, INPUTS: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """The scales with which an `int4_tile` begins."""
    V: tl.constexpr = unit_vector(W, GROUP)
    SIDE: tl.constexpr = units_beside(INPUTS, TURN)
    lane = tl.arange(0, L)
    at = scales + (line + lane % 32 // 4).to(tl.int64) * groups_of(W, GROUP)
    found = ()
    for k in tl.static_range(TURN // SIDE):
        unit = lane // 32 * STEPS + k * SIDE + lane % 4 // (INPUTS // 2)
        found = found + _unit_scales(at, unit, W, GROUP, V)
    return found


@triton.jit
def int4_tile(
    queue, words, scales, line, x, W: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr,
    INPUTS: tl.constexpr, begun=None, TURN: tl.constexpr = 0, ASM: tl.constexpr = ASSEMBLY,
):  # fmt: skip
    """Rows line .. line + 15 times INPUTS = 2, 4 or 8 inputs, (16, INPUTS) fp32.

    x: for each lane (L,) where input g % INPUTS begins, as pairs (4 W int32). Two inputs have four units each side by
    side in B, four inputs have two. So a lane reads a quarter or half of an input. queue: an empty one of `tile_bytes`.
    Inputs go through it as well: a load of these into registers is issued 25 instructions before what needs it, which
    waits.
    begun: `first_scales` of a tile for which `ask_words` and `ask_inputs` were called. What these asked for is waited
    for at once, because it was not asked for in the order in which it is taken. Later asks are. Such a tile may take
    STEPS units in turns of TURN. The words of STEPS units are then on their way, and the inputs of TURN alone.
    """
    V: tl.constexpr = unit_vector(W, GROUP)
    UNITS: tl.constexpr = (W + 4 * V - 1) // (4 * V)
    STRIDE: tl.constexpr = L // 32 * STEPS
    EACH_TURN: tl.constexpr = TURN or STEPS
    TURNS: tl.constexpr = STEPS // EACH_TURN
    WHOLE: tl.constexpr = whole_rows(W, GROUP, L, STEPS)
    SIDE: tl.constexpr = units_beside(INPUTS, EACH_TURN)
    CHUNK: tl.constexpr = max(SIDE, 2)  # units whose inputs are taken before their words, of which two are one ask
    EACH: tl.constexpr = CHUNK // SIDE  # inputs of a chunk
    ASKS: tl.constexpr = EACH_TURN // 2 + 2 * (EACH_TURN // SIDE)  # of a turn
    BEGUN: tl.constexpr = begun is not None and ASM
    lane = tl.arange(0, L)
    group = lane % 32 // 4
    scale_at = scales + (line + group).to(tl.int64) * groups_of(W, GROUP)
    unit = lane // 32 * STEPS
    at = words + line.to(tl.int64) * W + unit * (4 * V)
    beside = group // INPUTS % SIDE  # which unit's input this lane reads, and below whose products it takes
    own = lane % 4 // (INPUTS // 2)
    if BEGUN:
        drain(lane)
        now = begun
    else:
        now = ()
        for chunk in tl.static_range(EACH_TURN // CHUNK):
            for k in tl.static_range(chunk * EACH, chunk * EACH + EACH):
                queue = _ask_input(queue, x, unit + k * SIDE + beside, lane, STEPS + 2 * k, W, V, WHOLE)
                now = now + _unit_scales(scale_at, unit + k * SIDE + own, W, GROUP, V)
            for pair in tl.static_range(chunk * CHUNK // 2, (chunk + 1) * CHUNK // 2):
                queue = _ask_pair(queue, at, unit, lane, pair, W, V, WHOLE)
    zero = tl.zeros((L,), tl.float32)
    acc = (zero, zero, zero, zero)
    turn = 0  # of TURNS
    for _ in range(0, (UNITS + STRIDE - 1) // STRIDE * TURNS):
        step = STRIDE  # to the next turn's units
        if TURNS > 1:
            step = tl.where(turn < TURNS - 1, EACH_TURN, STRIDE - (TURNS - 1) * EACH_TURN)
        lines = queue
        later = step  # to the units whose words take the place of those that are taken
        if BEGUN:
            later = STRIDE
            if TURNS > 1:
                lines = (queue[0] + turn * (EACH_TURN // 2 * line_slot_bytes(L, V)),)
        coming = ()
        for k in tl.static_range(EACH_TURN // SIDE):
            coming = coming + _unit_scales(scale_at, unit + step + k * SIDE + own, W, GROUP, V)
        for chunk in tl.static_range(EACH_TURN // CHUNK):
            inputs = ()
            for k in tl.static_range(chunk * EACH, chunk * EACH + EACH):
                first, queue = take(queue, lane, STEPS + 2 * k, V, ASKS - 1)
                second, queue = take(queue, lane, STEPS + 2 * k + 1, V, ASKS - 2)
                inputs = inputs + first + second
                queue = _ask_input(queue, x, unit + step + k * SIDE + beside, lane, STEPS + 2 * k, W, V, False)
            for s in tl.static_range(chunk * CHUNK, chunk * CHUNK + CHUNK):
                if BEGUN:
                    w, _ = take_unit(lines, lane, s // 2, s % 2, V, TURNS * ASKS - 1)
                else:
                    w, queue = take_unit(queue, lane, s // 2, s % 2, V, ASKS - 1)
                part = int4_mma(
                    w, inputs[(s - chunk * CHUNK) // SIDE * 4 * V : ((s - chunk * CHUNK) // SIDE + 1) * 4 * V], V
                )
                more = scaled(acc, part, now[s // SIDE * 2], now[s // SIDE * 2 + 1])
                acc = either(own == s % SIDE, more, acc, 4)
                if s % 2 == 1:
                    if BEGUN:
                        _ask_pair(lines, at + later * (4 * V), unit + later, lane, s // 2, W, V, False)
                    else:
                        queue = _ask_pair(queue, at + later * (4 * V), unit + later, lane, s // 2, W, V, False)
        unit += step
        at += step * (4 * V)
        now = coming
        if TURNS > 1:
            turn = (turn + 1) % TURNS
    drain(lane)  # a program's next tile begins with the same slots
    return tile_sums(acc, L, INPUTS)


@triton.jit
def column_sums(first, second, L: tl.constexpr):
    """Rows (16) of a program's tile with one input: the sums of its warps and of the four lanes of a row."""
    total = tl.sum(tl.reshape(tl.join(first, second), (L // 32, 8, 4, 2)), 0)
    return tl.reshape(tl.trans(tl.sum(total, 1)), (16,))
