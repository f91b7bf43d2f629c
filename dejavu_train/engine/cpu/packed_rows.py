"""Sums over four packed rows at once, written in LLVM's language: two codes a byte, with fp16 scales of groups.

Products with an operand are exact in whole numbers over half a chunk, and in fp32 over halves. A sum of rows is of
whole numbers to its end. There a row's factor times a group's scale is a level of 16 bits, in a unit that all rows of a
list share. Two rows lie side by side in a register, so that one instruction multiplies and adds both.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dejavu_train.engine.cpu.half_numbers import widen
from dejavu_train.engine.cpu.level_products import (
    LANES,
    NONE,
    add_products,
    levels_of,
    load_vector,
    loop,
    multiply_add,
    packed_codes,
)
from dejavu_train.engine.cpu.row_kernels import ROWS, Rows, fused, prefetch, splat, trailing_zeros
from dejavu_train.engine.cpu_limits import BLOCK, CHUNK, HALF

_FLOAT, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _SUMS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I16, 2 * LANES)
# Words of two rows in turn: those that x86 puts side by side in one instruction, and the others.
_SIDE = [[4 * which + i // 2 + 4 * (i // 8) + 16 * (i % 2) for i in range(2 * LANES)] for which in range(2)]


class PackedRows:
    """Four packed rows with their scales, (n, G) fp16 for all rows, G in whole blocks, of ``group`` columns each."""

    def __init__(self, read: Rows, scales: Any, group: Any) -> None:
        self.read, self.builder, self.data = read, read.builder, scales.data
        self.n_groups = read.builder.extract_value(scales.shape, 1)
        self.shift = trailing_zeros(read.builder, group)

    def scales(self, row: int, number: Any) -> Any:
        """Scales (8) fp32 of the block that begins at this group."""
        return widen(self.builder, load_vector(self.builder, self._place(row, number), ir.VectorType(_I16, LANES)))

    def _place(self, row: int, number: Any) -> Any:
        at = self.builder.add(self.builder.mul(self.read.indices[row], self.n_groups), number)
        return self.builder.gep(self.data, [at])

    def words(self, row: int, column: Any) -> Any:
        """A chunk of a row."""
        return load_vector(self.builder, self.read.place(row, column), _WORDS)

    def of_half(self, held: Any, column: Any, half: int) -> Any:
        """The number that a block of eight has for half a chunk, in every lane."""
        group = self.builder.lshr(self.builder.add(column, _I64(half * HALF)), self.shift)
        at = self.builder.and_(group, _I64(BLOCK - 1))
        return splat(self.builder, self.builder.load(self.builder.gep(held, [_I64(0), at])))

    def over_chunks(
        self, carried: list[Any], prepare: Callable[[Any], None], chunk: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """``carried = chunk(column, carried)`` for all chunks, ``prepare(number)`` before those of eight groups."""
        builder = self.builder
        width = builder.shl(_I64(BLOCK), self.shift)

        def block(begin: Any, carried: list[Any]) -> list[Any]:
            number = builder.lshr(begin, self.shift)
            prepare(number)
            for row in range(ROWS, 2 * ROWS):
                prefetch(builder, self._place(row, number))
            stop = builder.add(begin, width)
            stop = builder.select(builder.icmp_signed("<", stop, self.read.columns), stop, self.read.columns)
            return loop(builder, begin, stop, _I64(CHUNK), carried, chunk)

        return loop(builder, _I64(0), self.read.columns, width, carried, block)

    def held(self, kind: Any) -> Any:
        """Place on the stack for a number of each group of a block."""
        return cgutils.alloca_once(self.builder, ir.ArrayType(kind, BLOCK))

    def put(self, held: Any, vector: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(held, vector.type.as_pointer()), align=4)


def dot_packed(rows: PackedRows, x: list[Any]) -> list[Any]:
    """Sums (8) fp32 of code * scale * level, of each row and each of x."""
    builder, count = rows.builder, len(x)
    held = [rows.held(_FLOAT) for _ in range(ROWS)]

    def prepare(number: Any) -> None:
        for row in range(ROWS):
            rows.put(held[row], rows.scales(row, number))

    def chunk(column: Any, sums: list[Any]) -> list[Any]:
        rows.read.prefetch(column)
        levels = [levels_of(builder, each, column) for each in x]
        for row in range(ROWS):
            codes = packed_codes(builder, rows.words(row, column))
            for half in range(2):
                scale = rows.of_half(held[row], column, half)
                for b in range(count):
                    i = row * count + b
                    total = add_products(builder, NONE, codes[half], levels[b][half])
                    sums[i] = fused(builder, builder.sitofp(total, _FLOATS), scale, sums[i])
        return sums

    return rows.over_chunks([ir.Constant(_FLOATS, [0.0] * LANES)] * (ROWS * count), prepare, chunk)


def add_packed(rows: PackedRows, outs: list[Any], own: list[list[Any]]) -> None:
    """Add own[row][b], in units, times each of four rows to the whole numbers outs[b].

    A chunk of those lies as its products are made, see `put_floats`.
    """
    builder = rows.builder
    held = [[rows.held(_I32) for _ in range(ROWS // 2)] for _ in outs]

    def level(factor: Any, scales: Any) -> Any:
        product = builder.fmul(splat(builder, factor), scales)
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
        return builder.fptosi(builder.call(nearest, [product]), _SUMS)

    def prepare(number: Any) -> None:
        scales = [rows.scales(row, number) for row in range(ROWS)]
        for b, pairs in enumerate(held):
            levels = [level(own[row][b], scales[row]) for row in range(ROWS)]
            for pair, place in enumerate(pairs):
                low = builder.and_(levels[2 * pair], ir.Constant(_SUMS, [0xFFFF] * LANES))
                high = builder.shl(levels[2 * pair + 1], ir.Constant(_SUMS, [16] * LANES))
                rows.put(place, builder.or_(low, high))

    def chunk(column: Any, nothing: list[Any]) -> list[Any]:
        rows.read.prefetch(column)
        words = [rows.words(row, column) for row in range(ROWS)]
        for which, side in enumerate(_SIDE):
            pairs = [
                builder.shuffle_vector(*words[row : row + 2], ir.Constant(ir.VectorType(_I32, 2 * LANES), side))
                for row in range(0, ROWS, 2)
            ]
            codes = [packed_codes(builder, pair) for pair in pairs]
            for b, out in enumerate(outs):
                for half in range(2):
                    levels = [rows.of_half(place, column, half) for place in held[b]]
                    for parity in range(2):
                        at = builder.add(column, _I64(LANES * (4 * half + 2 * which + parity)))
                        place = builder.bitcast(builder.gep(out, [at]), _SUMS.as_pointer())
                        total = builder.load(place, align=4)
                        for pair, own_levels in enumerate(levels):
                            numbers = builder.bitcast(own_levels, _WORDS)
                            total = multiply_add(builder, total, codes[pair][half][parity], numbers)
                        builder.store(total, place, align=4)
        return nothing

    rows.over_chunks([], prepare, chunk)


@intrinsic
def put_floats(typingctx: Any, out: Any, unit: Any) -> Any:
    """Turn the sums that `add_packed` left in out (D,) into fp32 numbers in the order of columns, times ``unit``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        units = splat(builder, args[1])
        turns = [ir.Constant(_SUMS, [first + i // 2 + LANES * (i % 2) for i in range(LANES)]) for first in (0, 4)]

        def chunk(column: Any, nothing: list[Any]) -> list[Any]:
            places = [builder.gep(array.data, [builder.add(column, _I64(at))]) for at in range(0, CHUNK, LANES)]
            sums = [load_vector(builder, place, _SUMS) for place in places]
            for first in range(0, len(sums), 2):  # of half a chunk: columns 0 to 7 and 16 to 23, then the others
                half, which = divmod(first // 2, 2)
                for i, turn in enumerate(turns):
                    numbers = builder.sitofp(builder.shuffle_vector(sums[first], sums[first + 1], turn), _FLOATS)
                    place = builder.bitcast(places[4 * half + which + 2 * i], _FLOATS.as_pointer())
                    builder.store(builder.fmul(numbers, units), place, align=4)
            return nothing

        loop(builder, _I64(0), builder.extract_value(array.shape, 0), _I64(CHUNK), [], chunk)
        return context.get_dummy_value()

    return types.void(out, unit), generate
