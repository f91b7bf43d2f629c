"""How a block of a predictor's second matrix is read and multiplied: what `select.select_block` is given.

    sums[i, b] = sum_r up[i, r] hidden[b, r]      rows i of a block of `up`, numbers or codes without their scales

A way is a pair of functions. The first reads what may be on its way before a program waits. place: the first row of a
block, and the end of its rows.

| way | rows of the batch | formats | before the wait | where |
| --- | --- | --- | --- | --- |
| `registers` | 1 | numbers, int8 | all rows | multiplied and added in fp32 |
| `tiles` | 1 to 32 | all | nothing | tensor cores, tiles through a pipeline |
| `row_words` | 1 | nibbles, rank a multiple of 8 | all rows | tensor cores, words of eight codes (`int4_mma`) |
| `words` | 2 to 8 | nibbles, rank a multiple of 8 | all rows | the same |

The tensor cores multiply 16 bits. A hidden value is a sum of parts of 16 bits, each a column of the product, so nothing
is lost. In fp16 two parts hold up to 131008: a larger value counts as that. Products are exact, sums in fp32.

Byte b of a row of nibbles holds column b in its low half and column rank / 2 + b in its high one. Four bytes are a word
of `int4_mma`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly
from dejavu_train.kernels.common.int4_mma import fp16_pairs, int4_mma
from dejavu_train.kernels.common.int4_tiles import neighbours, word_vector
from dejavu_train.kernels.common.launch import THROUGH_L1
from dejavu_train.kernels.formats.codes import nibble_halves, to_float


class BlockSizes(NamedTuple):
    """Constants of a program that selects.

    block: neurons. rank: of the predictor. width: elements of a row of `up`, bytes of two codes where they are nibbles.
    batch: rows of the batch, padded. chunk: elements of a piece of a row. stages: of the pipeline. parts: of a hidden
    value. lanes: threads, where a lane's place counts.
    """

    block: int
    rank: int
    width: int
    batch: int = 1
    chunk: int = 16
    stages: int = 1
    parts: int = 1
    lanes: int = 32


@triton.jit
def saturated(z, TYPE: tl.constexpr):
    """fp32 z in TYPE. Beyond fp16's range its largest value, where a plain conversion gives an infinity."""
    if TYPE == tl.float16:
        bounded = tl.clamp(z, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)  # two instructions, keeps a NaN
    else:
        bounded = z
    return bounded.to(TYPE)


@triton.jit
def block_rows(place, S: tl.constexpr):
    """(rows of a block (block,), whether they are there)."""
    rows = place[0] + tl.arange(0, S.block)
    return rows, rows < place[1]


@triton.jit
def read_registers(up, place, S: tl.constexpr):
    """The block in pieces (block, chunk), and what is left of the columns behind them."""
    rows, there = block_rows(place, S)
    inside = there[:, None]
    at = up + rows.to(tl.int64)[:, None] * S.width
    columns = tl.arange(0, S.chunk)
    tiles = ()
    for j in tl.static_range(S.width // S.chunk):
        tiles = tiles + (tl.load(at + (j * S.chunk + columns)[None, :], mask=inside, other=0.0),)
    if S.width % S.chunk > 0:
        last = _last_columns(S)
        whole: tl.constexpr = last.shape[0] == S.width % S.chunk
        there = inside if whole else inside & (last < S.width)[None, :]
        tiles = tiles + (tl.load(at + last[None, :], mask=there, other=0.0),)
    return tiles


@triton.jit
def _last_columns(S: tl.constexpr):
    """Columns past the pieces: at least as many values as a program has threads, or copies of a sum would be written to
    one word. In the pieces of ranks below 8 that happens, and is harmless."""
    REST: tl.constexpr = S.width % S.chunk
    WIDE: tl.constexpr = triton.next_power_of_2(REST) if REST > 8 else 8
    return S.width // S.chunk * S.chunk + tl.arange(0, WIDE)


@triton.jit
def multiply_registers(tiles, hidden, up, place, batch, S: tl.constexpr, MADE_HERE: tl.constexpr):
    columns = tl.arange(0, S.chunk)
    acc = tl.zeros((S.block, S.chunk), tl.float32)
    for j in tl.static_range(S.width // S.chunk):
        acc += to_float(tiles[j]) * tl.load(hidden + (j * S.chunk + columns))[None, :]
    sums = tl.sum(acc, 1)
    if S.width % S.chunk > 0:
        last = _last_columns(S)
        z = tl.load(hidden + last, mask=last < S.width, other=0.0)
        sums += tl.sum(to_float(tiles[S.width // S.chunk]) * z[None, :], 1)
    return sums


@triton.jit
def read_nothing(up, place, S: tl.constexpr):
    return ()


@triton.constexpr_function
def product_columns(batch, parts):
    """Columns of each batch row in a product of tiles, which has eight or more. One where a row's parts have no room
    side by side and take a product each."""
    return 8 // batch if 8 // batch >= parts else 1


@triton.jit
def _parts(hidden, place, end, batch, TYPE: tl.constexpr, S: tl.constexpr, MADE_HERE: tl.constexpr):
    """Hidden values at `place` (CHUNK,), zero from `end` on, as operands (CHUNK, batch * EACH) of products whose sums
    over columns are those of hidden."""
    EACH: tl.constexpr = product_columns(S.batch, S.parts)
    CACHE: tl.constexpr = ".cg" if MADE_HERE else ""  # not out of the L1
    column = tl.arange(0, S.batch * EACH)
    if S.batch == 1:
        z = tl.load(hidden + place, mask=place < end, other=0.0, cache_modifier=CACHE)[:, None]
    else:
        row = column // EACH
        there = (place < end)[:, None] & (row < batch)[None, :]
        z = tl.load(hidden + row[None, :] * S.rank + place[:, None], mask=there, other=0.0, cache_modifier=CACHE)
    part = (column % EACH)[None, :]
    operands = ()
    for number in tl.static_range(S.parts):
        near = saturated(z, TYPE)
        if EACH == 1:
            operands = operands + (near,)
        elif number == 0:
            columns = tl.where(part == 0, near.to(tl.float32), 0.0)
        else:
            columns = tl.where(part == number, near.to(tl.float32), columns)
        if number + 1 < S.parts:
            z = z - near.to(tl.float32)
    if EACH > 1:
        operands = (columns.to(TYPE),)
    return operands


@triton.jit
def _add_products(sums, w, operands):
    for number in tl.static_range(len(operands)):
        sums = tl.dot(w, operands[number], sums, input_precision="ieee")
    return sums


@triton.jit
def multiply_tiles(_, hidden, up, place, batch, S: tl.constexpr, MADE_HERE: tl.constexpr):
    STORED: tl.constexpr = up.dtype.element_ty
    TYPE: tl.constexpr = STORED if STORED == tl.float32 or STORED == tl.bfloat16 else tl.float16
    EACH: tl.constexpr = product_columns(S.batch, S.parts)
    rows, there = block_rows(place, S)
    inside = there[:, None]
    k = tl.arange(0, S.chunk)
    at = up + rows.to(tl.int64)[:, None] * S.width + k[None, :]
    sums = tl.zeros((S.block, S.batch * EACH), tl.float32)
    for column in tl.range(0, S.width, S.chunk, num_stages=S.stages):
        if S.width % S.chunk == 0:
            w = tl.load(at + column, mask=inside, other=0.0)
        else:
            w = tl.load(at + column, mask=inside & (column + k < S.width)[None, :], other=0.0)
        z = _parts(hidden, column + k, S.width, batch, TYPE, S, MADE_HERE)
        if STORED == tl.uint8:
            low, high = nibble_halves(w)
            sums = _add_products(sums, low, z)
            more = _parts(hidden, S.width + column + k, S.rank, batch, TYPE, S, MADE_HERE)
            sums = _add_products(sums, high, more)
        else:
            sums = _add_products(sums, w.to(TYPE), z)
    if S.batch > 1 and EACH > 1:
        sums = tl.sum(tl.reshape(sums, (S.block, S.batch, EACH)), 2)
    elif S.batch == 1:
        sums = tl.sum(sums, 1)
    return sums


@triton.jit
def row_words(rows, at, there, first_unit, lane, W: tl.constexpr, UNITS: tl.constexpr, STRIDE: tl.constexpr):
    """A lane's words of UNITS units, every STRIDE-th from first_unit on: for each V of row g, then V of row g + 8.

    rows: how many words lie between rows g and g + 8. at: to a lane's row g. there: whether either row is one.
    """
    V: tl.constexpr = word_vector(W)
    words = ()
    for k in tl.static_range(UNITS):
        word = (first_unit + k * STRIDE) * (4 * V) + lane % 4 * V
        words = words + neighbours(at + word, there[0] & (word < W), V) + neighbours(
            at + rows + word, there[1] & (word < W), V
        )  # fmt: skip
    return words


@triton.constexpr_function
def units_of(words):
    """Units of a row: what the four lanes of a group read at once."""
    return -(-words // (4 * word_vector(words)))


@triton.jit
def read_words(up, place, S: tl.constexpr):
    """All words of the block, in rounds of L / 2 rows."""
    W: tl.constexpr = S.rank // 8
    HALF: tl.constexpr = S.lanes // 2
    lane = tl.arange(0, S.lanes)
    words = ()
    for k in tl.static_range(S.block // HALF):
        row = place[0] + k * HALF + lane // 32 * 16 + lane % 32 // 4
        at = up.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * W
        words = words + row_words(8 * W, at, (row < place[1], row + 8 < place[1]), 0, lane, W, units_of(W), 1)
    return words


@triton.jit
def _stacked(rounds, ROUNDS: tl.constexpr):
    """Tiles (R, T) of all rounds, one below the other."""
    R: tl.constexpr = rounds[0].shape[0]
    T: tl.constexpr = rounds[0].shape[1]
    if ROUNDS == 1:
        tile = rounds[0]
    elif ROUNDS == 2:
        tile = tl.reshape(tl.permute(tl.join(rounds[0], rounds[1]), (2, 0, 1)), (2 * R, T))
    else:
        both = tl.join(tl.join(rounds[0], rounds[2]), tl.join(rounds[1], rounds[3]))  # (R, T, high bit, low bit)
        tile = tl.reshape(tl.permute(both, (2, 3, 0, 1)), (4 * R, T))
    return tile


@triton.jit
def _part(z, part):
    """Nearest fp16 number of z (L,) fp32, or where `part` is 1 that of the rest."""
    rest = z - saturated(z, tl.float16).to(tl.float32)
    return tl.where(part == 0, z, rest)


@triton.jit
def _halves(low, high):
    """int32 pairs of fp16 of two tiles, beyond fp16's range its largest number."""
    return fp16_pairs(saturated(low, tl.float16).to(tl.float32), saturated(high, tl.float16).to(tl.float32))


@triton.jit
def _unit_planes(hidden, lane, W: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """4 V planes for each four units of a row of W words: of the unit and the part that are a lane group's.

    The two parts of hidden lie in neighbouring columns of the product, four units of a row side by side.
    """
    V: tl.constexpr = word_vector(W)
    part = lane % 32 // 4 % 2
    planes = ()
    for four in tl.static_range((W + 16 * V - 1) // (16 * V)):
        word = (4 * four + lane % 32 // 8) * (4 * V) + lane % 4 * V
        for v in tl.static_range(V):
            there = word + v < W
            low = neighbours(hidden + 4 * (word + v), there, 4, CACHE)
            high = neighbours(hidden + 4 * W + 4 * (word + v), there, 4, CACHE)
            planes = planes + (
                _halves(_part(low[0], part), _part(low[2], part)),
                _halves(_part(high[0], part), _part(high[2], part)),
                _halves(_part(low[1], part), _part(low[3], part)),
                _halves(_part(high[1], part), _part(high[3], part)),
            )
    return planes


@triton.jit
def multiply_row_words(words, hidden, up, place, batch, S: tl.constexpr, MADE_HERE: tl.constexpr):
    W: tl.constexpr = S.rank // 8
    V: tl.constexpr = word_vector(W)
    UNITS: tl.constexpr = units_of(W)
    ROUNDS: tl.constexpr = S.block // (S.lanes // 2)
    lane = tl.arange(0, S.lanes)
    if MADE_HERE:
        planes = _unit_planes(hidden, lane, W, ".cg")
    else:
        planes = _unit_planes(hidden, lane, W)
    rounds = ()
    for k in tl.static_range(ROUNDS):
        first = tl.zeros((S.lanes,), tl.float32)
        second = tl.zeros((S.lanes,), tl.float32)
        for unit in tl.static_range(UNITS):
            own = words[(k * UNITS + unit) * 2 * V : (k * UNITS + unit + 1) * 2 * V]
            parts = int4_mma(own, planes[unit // 4 * 4 * V : unit // 4 * 4 * V + 4 * V], V)
            mine = lane % 4 == unit % 4
            first = tl.where(mine, first + parts[0] + parts[1], first)
            second = tl.where(mine, second + parts[2] + parts[3], second)
        total = tl.sum(tl.reshape(tl.join(first, second), (S.lanes // 32, 8, 4, 2)), 2)
        rounds = rounds + (tl.reshape(tl.permute(total, (0, 2, 1)), (S.lanes // 2, 1)),)
    return tl.reshape(_stacked(rounds, ROUNDS), (S.block,))


@triton.jit
def _touch(at, ASM: tl.constexpr = ASSEMBLY):
    """Loads what lies there, and 32 bytes around it, into the L1. Nobody waits for it."""
    if ASM:
        assembly("ld.global.b32 $0, [$1];", "=r,l", (at,))


@triton.jit
def _planes(planes, word, W: tl.constexpr):
    """The planes of hidden for V words of a row of `up`. planes: to a lane's row and part."""
    V: tl.constexpr = word_vector(W)
    found = ()
    for v in tl.static_range(V):
        found = found + neighbours(planes + 4 * (word + v), word + v < W, 4)
    return found


@triton.jit
def multiply_words(words, planes, up, place, batch, S: tl.constexpr, MADE_HERE: tl.constexpr):
    """planes: hidden as `predict_rows.predict_words` leaves it, int32 pairs (2, B, rank / 8, 4) of both parts.

    Up to four batch rows have their two parts in neighbouring columns, more take a product each.
    """
    W: tl.constexpr = S.rank // 8
    V: tl.constexpr = word_vector(W)
    UNITS: tl.constexpr = units_of(W)
    ROUNDS: tl.constexpr = S.block // (S.lanes // 2)
    PAIRED: tl.constexpr = S.batch == 4
    lane = tl.arange(0, S.lanes)
    group = lane % 32 // 4
    if PAIRED:
        token = group // 2
        first = planes + group % 2 * batch * (4 * W)
    else:
        token = group
        first = planes
    first += tl.minimum(token, batch - 1) * (4 * W)
    zero = tl.zeros((S.lanes,), tl.float32)
    # All of hidden comes to the L1 at once, not unit after unit.
    for k in tl.static_range((S.batch * W + S.lanes - 1) // S.lanes):
        _touch(planes + 8 * tl.minimum(k * S.lanes + lane, batch * W - 1))
    sums = ()
    for _ in tl.static_range(ROUNDS):
        sums = sums + (zero, zero, zero, zero)
    for unit in tl.static_range(UNITS):
        word = unit * (4 * V) + lane % 4 * V
        parts = (_planes(first, word, W),)
        if not PAIRED:
            parts = parts + (_planes(first + batch * (4 * W), word, W),)
        more = ()
        for k in tl.static_range(ROUNDS):
            own = words[(k * UNITS + unit) * 2 * V : (k * UNITS + unit + 1) * 2 * V]
            total = sums[4 * k : 4 * k + 4]
            for part in tl.static_range(1 if PAIRED else 2):
                found = int4_mma(own, parts[part], V)
                total = (total[0] + found[0], total[1] + found[1], total[2] + found[2], total[3] + found[3])
            more = more + total
        sums = more
    rounds = ()
    for k in tl.static_range(ROUNDS):
        if PAIRED:  # a lane's two columns are the two parts of one batch row
            upper = sums[4 * k] + sums[4 * k + 1]
            lower = sums[4 * k + 2] + sums[4 * k + 3]
            lanes = tl.reshape(tl.join(upper, lower), (S.lanes // 32, 8, 4, 2))
            tile = tl.permute(lanes, (0, 3, 1, 2))
        else:
            evens = tl.join(sums[4 * k], sums[4 * k + 2])
            odds = tl.join(sums[4 * k + 1], sums[4 * k + 3])
            lanes = tl.reshape(tl.join(evens, odds), (S.lanes // 32, 8, 4, 2, 2))
            tile = tl.permute(lanes, (0, 3, 1, 2, 4))
        rounds = rounds + (tl.reshape(tile, (S.lanes // 2, S.batch)),)
    return _stacked(rounds, ROUNDS)
