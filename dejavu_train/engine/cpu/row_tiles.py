"""Sums over four rows of weights for one batch row or several at once, written in LLVM's language.

Batch rows one after the other load the weights from the cache again and again. Eight take 1.7 times as long as one
that waits for memory. Here a vector of weights is loaded once for a *tile* of one, two or four batch rows. The next
rows of weights are fetched meanwhile, and eight take 1.3 times. Sums and their order are those of a row alone, so a
batch row's result is the same bit for bit, whoever shares its tile.

Batch rows are given as bits, and a tile takes the lowest of them.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dejavu_train.engine.cpu.level_products import LANES, has_features, load_vector, loop
from dejavu_train.engine.cpu.packed_rows import PackedRows, add_packed, dot_packed
from dejavu_train.engine.cpu.row_kernels import ROWS, Rows, add_rows, dot_levels, fused, sum_lanes, trailing_zeros
from dejavu_train.engine.cpu.threads import compiled
from dejavu_train.engine.cpu_limits import CHUNK

WIDE = 2 * LANES  # the even and the odd vector of a row's sums, side by side
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_INTEGERS = ir.VectorType(_I32, LANES)
# Registers for a tile of four. Others spill, and take tiles of two.
HAS_AVX512 = has_features("avx512f", "avx512vl")


class _Tile:
    """The batch rows of the ``count`` lowest of ``bits``, and whether none is left behind them."""

    def __init__(self, context: Any, builder: Any, bits: Any, count: int) -> None:
        self.context, self.builder, self.rows = context, builder, []
        for _ in range(count):
            self.rows.append(trailing_zeros(builder, bits))
            bits = builder.and_(bits, builder.sub(bits, _I64(1)))
        self.last = builder.icmp_signed("==", bits, _I64(0))

    def parts(self, kind: Any, array: Any) -> list[Any]:
        """Where the tile's rows of an array (B, .) begin."""
        held = self.context.make_array(kind)(self.context, self.builder, array)
        width = self.builder.extract_value(held.shape, 1)
        return [self.builder.gep(held.data, [self.builder.mul(row, width)]) for row in self.rows]

    def values(self, kind: Any, array: Any) -> list[Any]:
        """The tile's elements of an array (B,)."""
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        return [self.builder.load(self.builder.gep(data, [row])) for row in self.rows]

    def way(self, read: Rows, fetch: Callable[..., None]) -> tuple[int, Callable[..., None]]:
        """Lanes of a vector, and what asks for the weights that come: ``fetch`` where several rows share them.

        A batch row alone has the processor prefetch along rows of fp32.
        """
        if len(self.rows) > 1:
            return WIDE, fetch
        alone: Callable[..., None] = (lambda read, column: None) if read.kind == types.float32 else Rows.prefetch
        return LANES, alone

    def fetch_floats(self, read: Rows, column: Any) -> None:
        """Half of what comes of a chunk is fetched by the last tile, half by each before: memory is never idle."""
        half = self.builder.select(self.last, _I64(CHUNK // 2), _I64(0))
        for line in range(0, CHUNK // 2, 16):
            read.prefetch(self.builder.add(column, self.builder.add(half, _I64(line))))


def _dot_floats(read: Rows, tile: _Tile, x: list[Any]) -> list[list[Any]]:
    """Sums of number * x over all columns, of each row and each of the tile's operands. Two vectors of sums each."""
    builder, count = read.builder, len(x)
    lanes, fetch = tile.way(read, tile.fetch_floats)
    floats, parts = ir.VectorType(_FLOAT, lanes), WIDE // lanes

    def chunk(column: Any, sums: list[Any]) -> list[Any]:
        fetch(read, column)
        for start in range(0, CHUNK, lanes):
            here = builder.add(column, _I64(start))
            weights = [read.numbers(row, here, lanes) for row in range(ROWS)]
            for b in range(count):
                values = load_vector(builder, builder.gep(x[b], [here]), floats)
                for row in range(ROWS):
                    which = (row * count + b) * parts + start // lanes % parts
                    sums[which] = fused(builder, weights[row], values, sums[which])
        return sums

    zero = ir.Constant(floats, [0.0] * lanes)
    sums = loop(builder, _I64(0), read.columns, _I64(CHUNK), [zero] * (ROWS * count * parts), chunk)
    pairs = (
        [_halves(builder, each) for each in sums] if parts == 1 else [sums[i : i + 2] for i in range(0, 2 * ROWS, 2)]
    )
    totals = [sum_lanes(builder, builder.fadd(*pair)) for pair in pairs]
    return [totals[row * count : (row + 1) * count] for row in range(ROWS)]


def _halves(builder: Any, wide: Any) -> list[Any]:
    starts = (0, LANES)
    return [builder.shuffle_vector(wide, wide, ir.Constant(_INTEGERS, list(range(s, s + LANES)))) for s in starts]


def _dot_tile(count: int) -> Any:
    @intrinsic
    def dot_tile(
        typingctx: Any, rows: Any, scales: Any, group: Any, numbers: Any, first: Any, n: Any, operands: Any,
        units: Any, bits: Any, out: Any,
    ) -> Any:  # fmt: skip
        """Products of four rows of a list of n with the operands of the ``count`` lowest of ``bits``.

        out[b, first : first + 4] = the rows numbers[first : first + 4], each times operands[b] and units[b].
        For operands (., D) fp32, rows (., D) are fp32, fp16 given as uint16, or int16 with one scale a row. Pairs of
        bf16 are uint32 (., D / 2). For operands int16, rows are int8 with scales (., G) for each ``group`` columns.
        Packed rows are uint8 (., D / 2), with fp16 scales given as uint16. Scales of `WHOLE` rows are not read.
        units (.) fp32, out (., at least n + 3) fp32.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            read = Rows(context, builder, (kinds[0], kinds[3]), args[0], args[3], args[4], args[5])
            tile = _Tile(context, builder, args[8], count)
            x, units = tile.parts(kinds[6], args[6]), tile.values(kinds[7], args[7])
            scale_array = context.make_array(kinds[1])(context, builder, args[1])
            if kinds[0].dtype in (types.int8, types.uint8):
                n_groups = builder.extract_value(scale_array.shape, 1)
                found = (
                    dot_packed(PackedRows(read, scale_array, args[2]), x)
                    if read.packed
                    else dot_levels(read, scale_array.data, n_groups, args[2], x)
                )
                totals = [sum_lanes(builder, each) for each in found]
                sums = [totals[row * count : (row + 1) * count] for row in range(ROWS)]
            else:
                sums = _dot_floats(read, tile, x)
                for row in range(ROWS if not read.whole else 0):
                    scale = builder.load(builder.gep(scale_array.data, [read.indices[row]]))
                    sums[row] = [builder.fmul(each, scale) for each in sums[row]]
            for b, start in enumerate(tile.parts(kinds[9], args[9])):
                for row in range(ROWS):
                    place = builder.gep(start, [builder.add(args[4], _I64(row))])
                    builder.store(builder.fmul(sums[row][b], units[b]), place)
            return context.get_dummy_value()

        one = types.int64
        return types.void(rows, scales, one, numbers, one, one, operands, units, one, out), generate

    return dot_tile


def _add_tile(count: int) -> Any:
    @intrinsic
    def add_tile(
        typingctx: Any, out: Any, rows: Any, scales: Any, group: Any, numbers: Any, factors: Any, first: Any, n: Any,
        bits: Any,
    ) -> Any:  # fmt: skip
        """Add factors[b, i] times row numbers[i] to out[b], for i from first to first + 4 in a list of n.

        b are the ``count`` lowest of ``bits``, out (., D) fp32. Rows as `dot_tile` has them: whole, of int8 or packed.
        With packed rows factors are in units, and out holds what `put_floats` turns into numbers.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            read = Rows(context, builder, (kinds[1], kinds[4]), args[1], args[4], args[6], args[7])
            tile = _Tile(context, builder, args[8], count)
            outs, given = tile.parts(kinds[0], args[0]), tile.parts(kinds[5], args[5])
            own = []
            for row in range(ROWS):
                at = builder.add(args[6], _I64(row))
                inside = builder.icmp_signed("<", at, args[7])
                here = builder.select(inside, at, args[6])
                loaded = [builder.load(builder.gep(factors, [here])) for factors in given]
                own.append([builder.select(inside, factor, _FLOAT(0.0)) for factor in loaded])

            scale_array = context.make_array(kinds[2])(context, builder, args[2])
            if read.packed:
                add_packed(PackedRows(read, scale_array, args[3]), outs, own)
                return context.get_dummy_value()
            lanes, fetch = tile.way(read, tile.fetch_floats if read.whole else Rows.prefetch)
            add_rows(read, outs, own, scale_array, args[3], lanes, fetch)
            return context.get_dummy_value()

        one = types.int64
        return types.void(out, rows, scales, one, numbers, factors, one, one, one), generate

    return add_tile


dot_one, dot_two, dot_quad = _dot_tile(1), _dot_tile(2), _dot_tile(4)
add_one, add_two, add_quad = _add_tile(1), _add_tile(2), _add_tile(4)


@compiled()
def without_lowest(bits, count):
    """Bits without the ``count`` lowest of them."""
    for _ in range(count):
        bits &= bits - 1
    return bits
