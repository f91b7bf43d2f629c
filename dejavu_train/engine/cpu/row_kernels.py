"""Sums over four rows of weights at once, written in LLVM's language: what reads nearly all of a step's bytes.

A loop over one row waits for its last sum and starts the processor's prefetching anew at every row. Four rows side by
side read dense weights as fast as a plain sum reads memory. The loops are written out because products of codes need
instructions that LLVM does not find by itself, see `level_products`.

Rows are padded to whole chunks of CHUNK columns, so no loop has a remainder. Of a list whose length is no multiple of
four the last row is read again, and its result not used.
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
    codes_of,
    levels_of,
    load_vector,
    loop,
    multiply_add,
)
from dejavu_train.engine.cpu_limits import CHUNK, HALF

ROWS = 4
WIDEST_GROUP = 4096  # columns: a lane's sum of 4096 / LANES products of 127 and 32767 is the last below 2^31
_FLOAT, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)
_FUSE = ("contract",)
WHOLE = (types.float32, types.uint16, types.uint32)  # rows without scales: fp32, fp16, pairs of bf16


class Rows:
    """Addresses that one call reads: its four rows, and the four that the next call will read."""

    def __init__(self, context: Any, builder: Any, kinds: Any, rows: Any, numbers: Any, first: Any, n: Any) -> None:
        self.builder = builder
        array = context.make_array(kinds[0])(context, builder, rows)
        stored = builder.extract_value(array.shape, 1)
        self.kind = kinds[0].dtype
        self.packed, self.whole = self.kind == types.uint8, self.kind in WHOLE
        self.element = {types.float32: _FLOAT, types.int8: _I8, types.uint8: _I8}.get(self.kind, _I16)
        self.columns = builder.shl(stored, _I64(1)) if self.kind in (types.uint8, types.uint32) else stored
        listed = context.make_array(kinds[1])(context, builder, numbers).data
        last = builder.sub(n, _I64(1))
        self.indices = []
        for i in range(2 * ROWS):
            wanted = builder.add(first, _I64(i))
            here = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
            self.indices.append(builder.sext(builder.load(builder.gep(listed, [here])), _I64))
        starts = [builder.gep(array.data, [builder.mul(index, stored)]) for index in self.indices]
        self.data = [builder.bitcast(start, self.element.as_pointer()) for start in starts]

    def place(self, row: int, column: Any) -> Any:
        """The address of a column, in packed rows that of its chunk's bytes."""
        at = self.builder.lshr(column, _I64(1)) if self.packed else column
        return self.builder.gep(self.data[row], [at])

    def codes(self, row: int, column: Any, kind: Any, count: int) -> Any:
        """``count`` codes of a row from this column on, as they are stored."""
        return load_vector(self.builder, self.place(row, column), ir.VectorType(kind, count))

    def numbers(self, row: int, column: Any, lanes: int) -> Any:
        """So many columns of a row as fp32, those of codes without their scale."""
        stored, floats = self.codes(row, column, self.element, lanes), ir.VectorType(_FLOAT, lanes)
        if self.kind == types.float32:
            return stored
        if self.kind == types.uint16:
            return widen(self.builder, stored)
        if self.kind == types.uint32:  # bf16 is the upper half of fp32
            wide = ir.VectorType(_I32, lanes)
            raised = self.builder.shl(self.builder.zext(stored, wide), ir.Constant(wide, [16] * lanes))
            return self.builder.bitcast(raised, floats)
        return self.builder.sitofp(stored, floats)

    def scale(self, scales: Any, n_groups: Any, row: int, number: Any, lanes: int = LANES) -> Any:
        """The scale of a group of a row in every lane."""
        at = self.builder.add(self.builder.mul(self.indices[row], n_groups), number)
        return splat(self.builder, self.builder.load(self.builder.gep(scales, [at])), lanes)

    def prefetch(self, column: Any) -> None:
        """Ask for this chunk of the next four rows: processors prefetch along a row, not along a list of them."""
        for start in range(0, CHUNK, HALF if self.element == _I16 else CHUNK):  # a cache line each
            for row in range(ROWS, 2 * ROWS):
                prefetch(self.builder, self.place(row, self.builder.add(column, _I64(start))))


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of an address."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    line = builder.bitcast(address, _I8.as_pointer())
    builder.call(ask, [line, _I32(0), _I32(2), _I32(1)])  # to read, into the second level, data


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has one."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector of a number in every lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def trailing_zeros(builder: Any, value: Any) -> Any:
    """The number of the lowest bit that is set: of a power of two its logarithm."""
    kind = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
    zeros = cgutils.get_or_insert_function(builder.module, kind, "llvm.cttz.i64")
    return builder.call(zeros, [value, ir.IntType(1)(0)])


def sum_lanes(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(vector.type.element, [vector.type.element, vector.type])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(reduce, [_FLOAT(0.0), vector], fastmath=("reassoc",))


def dot_levels(rows: Rows, scales: Any, n_groups: Any, group: Any, x: list[Any]) -> list[Any]:
    """Sums (8) fp32 of code * scale * level, of four rows and each of x: exact over a group, in fp32 over groups."""
    builder, count = rows.builder, len(x)

    def chunk(column: Any, totals: list[Any]) -> list[Any]:
        rows.prefetch(column)
        codes = [codes_of(builder, rows.place(row, column)) for row in range(ROWS)]
        for b in range(count):
            for half, levels in enumerate(levels_of(builder, x[b], column)):
                for row in range(ROWS):
                    i = row * count + b
                    totals[i] = add_products(builder, totals[i], codes[row][half], levels)
        return totals

    def one_group(number: Any, sums: list[Any]) -> list[Any]:
        start = builder.mul(number, group)
        stop = builder.add(start, group)
        stop = builder.select(builder.icmp_signed("<", stop, rows.columns), stop, rows.columns)
        totals = loop(builder, start, stop, _I64(CHUNK), [NONE] * (ROWS * count), chunk)
        for row in range(ROWS):
            scale = rows.scale(scales, n_groups, row, number)
            for i in range(row * count, row * count + count):
                sums[i] = fused(builder, builder.sitofp(totals[i], _FLOATS), scale, sums[i])
        return sums

    return loop(builder, _I64(0), n_groups, _I64(1), [_ZERO] * (ROWS * count), one_group)


def add_rows(
    read: Rows, outs: list[Any], own: list[list[Any]], scales: Any, group: Any, lanes: int, fetch: Callable[..., None]
) -> None:
    """Add own[row][b] times each of four rows to the fp32 vectors outs[b]. fetch: asks for what comes of a chunk."""
    builder, floats = read.builder, ir.VectorType(_FLOAT, lanes)
    n_groups = builder.extract_value(scales.shape, 1)

    def add_to(b: int, column: Any, numbers: list[Any], factors: list[list[Any]]) -> None:
        place = builder.bitcast(builder.gep(outs[b], [column]), floats.as_pointer())
        total = builder.load(place, align=4)
        for row in range(ROWS):
            total = fused(builder, numbers[row], factors[row][b], total)
        builder.store(total, place, align=4)

    def scaled(number: Any) -> list[list[Any]]:
        found = []
        for row in range(ROWS):
            scale = read.scale(scales.data, n_groups, row, number, lanes)
            found.append([builder.fmul(splat(builder, factor, lanes), scale) for factor in own[row]])
        return found

    def chunk(factors: list[list[Any]], column: Any) -> list[Any]:
        fetch(read, column)
        for offset in range(0, CHUNK, lanes):
            here = builder.add(column, _I64(offset))
            numbers = [read.numbers(row, here, lanes) for row in range(ROWS)]
            for b in range(len(outs)):
                add_to(b, here, numbers, factors)
        return []

    def one_group(number: Any, nothing: list[Any]) -> list[Any]:
        start = builder.mul(number, group)
        stop = builder.add(start, group)
        stop = builder.select(builder.icmp_signed("<", stop, read.columns), stop, read.columns)
        factors = scaled(number)
        loop(builder, start, stop, _I64(CHUNK), [], lambda column, _: chunk(factors, column))
        return nothing

    if read.whole:
        factors = [[splat(builder, factor, lanes) for factor in each] for each in own]
        loop(builder, _I64(0), read.columns, _I64(CHUNK), [], lambda column, _: chunk(factors, column))
    else:
        loop(builder, _I64(0), n_groups, _I64(1), [], one_group)


@intrinsic
def dot_nibbles(typingctx: Any, pairs: Any, number: Any, coming: Any, levels: Any) -> Any:
    """Sum of (code + 8) * level, exact: row ``number`` of pairs (., D / 2) uint8, levels (D) int16. int32.

    A byte holds column j in its lower half and column D / 2 + j in its upper half. Row ``coming`` is fetched meanwhile.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        half = builder.extract_value(array.shape, 1)
        row = builder.gep(array.data, [builder.mul(args[1], half)])
        later = builder.gep(array.data, [builder.mul(args[2], half)])
        data = context.make_array(signature.args[3])(context, builder, args[3]).data
        integers, width = ir.VectorType(_I16, 2 * LANES), 2 * LANES

        def part(column: Any, sums: list[Any]) -> list[Any]:
            prefetch(builder, builder.gep(later, [column]))
            for i in range(CHUNK // 2 // width):
                here = builder.add(column, _I64(i * width))
                codes = builder.zext(
                    load_vector(builder, builder.gep(row, [here]), ir.VectorType(_I8, width)), integers
                )
                halves = (
                    (builder.and_(codes, ir.Constant(integers, [15] * width)), here),
                    (builder.lshr(codes, ir.Constant(integers, [4] * width)), builder.add(half, here)),
                )
                for which, (four_bits, at) in enumerate(halves):
                    values = load_vector(builder, builder.gep(data, [at]), integers)
                    sums[which] = multiply_add(builder, sums[which], four_bits, values)
            return sums

        zero = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        sums = loop(builder, _I64(0), half, _I64(CHUNK // 2), [zero, zero], part)
        kind = ir.FunctionType(_I32, [zero.type])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i32")
        return builder.call(reduce, [builder.add(*sums)])

    return types.int32(pairs, types.int64, types.int64, levels), generate
