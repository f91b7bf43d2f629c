"""Sums over four rows of weights at once, written in LLVM's language: what reads nearly all of a step's bytes.

A loop over one row waits for its last sum and starts the processor's prefetching anew at every row. Four rows side by
side read dense weights as fast as a plain sum reads memory. The loops are written out because products of int8 codes
need ``vpmaddwd``, which LLVM does not find by itself. It makes two 16-bit products and their sum in each 32-bit lane.

Rows are padded to whole chunks of CHUNK columns, so no loop has a remainder. Of a list whose length is no multiple of
four the last row is read again, and its result not used.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dejavu_train.engine.cpu_limits import CHUNK

ROWS = 4
WIDEST_GROUP = 4096  # columns: a lane's sum of 4096 / LANES products of 127 and 32767 is the last below 2^31
LANES = 8
_FLOAT, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)
_FUSE = ("contract",)


class Rows:
    """Addresses that one call reads: its four rows, and the four that the next call will read."""

    def __init__(self, context: Any, builder: Any, kinds: Any, rows: Any, numbers: Any, first: Any, n: Any) -> None:
        self.context, self.builder = context, builder
        array = context.make_array(kinds[0])(context, builder, rows)
        self.columns = builder.extract_value(array.shape, 1)
        listed = context.make_array(kinds[1])(context, builder, numbers).data
        last = builder.sub(n, _I64(1))
        self.indices = []
        for i in range(2 * ROWS):
            wanted = builder.add(first, _I64(i))
            here = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
            self.indices.append(builder.sext(builder.load(builder.gep(listed, [here])), _I64))
        self.data = [builder.gep(array.data, [builder.mul(index, self.columns)]) for index in self.indices]

    def codes(self, row: int, column: Any, kind: Any, count: int) -> Any:
        """``count`` codes of a row from this column on, as they are stored."""
        return load_vector(self.builder, self.builder.gep(self.data[row], [column]), ir.VectorType(kind, count))

    def prefetch(self, column: Any) -> None:
        """Ask for this chunk of the next four rows: processors prefetch along a row, not along a list of them."""
        for row in range(ROWS, 2 * ROWS):
            _prefetch(self.builder, self.builder.gep(self.data[row], [column]))


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    line = builder.bitcast(address, _I8.as_pointer())
    builder.call(prefetch, [line, _I32(0), _I32(2), _I32(1)])  # to read, into the second level, data


def load_vector(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has one."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector of a number in every lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def sum_lanes(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(vector.type.element, [vector.type.element, vector.type])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(reduce, [_FLOAT(0.0), vector], fastmath=("reassoc",))


def loop(
    builder: Any, start: Any, stop: Any, step: int, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """``carried = body(i, carried)`` for i from start to stop, at least once. Returns the last ``carried``."""
    before = builder.basic_block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(_I64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for value, initial in zip(values, carried, strict=True):
        value.add_incoming(initial, before)
    results = body(index, list(values))
    following = builder.add(index, _I64(step))
    index.add_incoming(following, builder.basic_block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.basic_block)
    builder.cbranch(builder.icmp_signed("<", following, stop), inside, after)
    builder.position_at_end(after)
    return results


def pair_products(context: Any, builder: Any, a: Any, b: Any) -> Any:
    """a (16) and b (16) int16 -> (8) int32, each the sum of two neighbouring products."""
    half = ir.VectorType(_I32, LANES)
    if "+avx2" in context.codegen().magic_tuple()[2]:
        kind = ir.FunctionType(half, [a.type, b.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd"), [a, b])
    sums = []
    for parity in range(2):
        lanes = ir.Constant(half, list(range(parity, 2 * LANES, 2)))
        wide = [builder.sext(builder.shuffle_vector(v, v, lanes), half) for v in (a, b)]
        sums.append(builder.mul(*wide))
    return builder.add(*sums)


def _dot_floats(rows: Rows, element: Any, x: Any, prefetch: bool) -> list[Any]:
    """Four sums of code * x over all columns, in fp32. Two vectors of sums for each row."""
    builder = rows.builder

    def chunk(column: Any, sums: list[Any]) -> list[Any]:
        if prefetch:
            rows.prefetch(column)
        for start in range(0, CHUNK, LANES):
            here = builder.add(column, _I64(start))
            values = load_vector(builder, builder.gep(x, [here]), _FLOATS)
            for row in range(ROWS):
                codes = rows.codes(row, here, element, LANES)
                codes = codes if element == _FLOAT else builder.sitofp(codes, _FLOATS)
                which = 2 * row + start // LANES % 2
                sums[which] = fused(builder, codes, values, sums[which])
        return sums

    sums = loop(builder, _I64(0), rows.columns, CHUNK, [_ZERO] * (2 * ROWS), chunk)
    return [sum_lanes(builder, builder.fadd(sums[2 * row], sums[2 * row + 1])) for row in range(ROWS)]


def _dot_levels(rows: Rows, scales: Any, n_groups: Any, group: Any, levels: Any) -> list[Any]:
    """Four sums of code * scale * level: exact in whole numbers over a group, in fp32 over groups."""
    builder = rows.builder
    integers, none = ir.VectorType(_I16, 2 * LANES), ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)

    def chunk(column: Any, totals: list[Any]) -> list[Any]:
        rows.prefetch(column)
        for start in range(0, CHUNK, 2 * LANES):
            here = builder.add(column, _I64(start))
            values = load_vector(builder, builder.gep(levels, [here]), integers)
            for row in range(ROWS):
                codes = builder.sext(rows.codes(row, here, _I8, 2 * LANES), integers)
                totals[row] = builder.add(totals[row], pair_products(rows.context, builder, codes, values))
        return totals

    def add_scaled(number: Any, totals: list[Any], sums: list[Any]) -> list[Any]:
        for row in range(ROWS):
            at = builder.add(builder.mul(rows.indices[row], n_groups), number)
            scale = splat(builder, builder.load(builder.gep(scales, [at])))
            sums[row] = fused(builder, builder.sitofp(totals[row], _FLOATS), scale, sums[row])
        return sums

    def one_chunk(number: Any, sums: list[Any]) -> list[Any]:
        return add_scaled(number, chunk(builder.mul(number, _I64(CHUNK)), [none] * ROWS), sums)

    def one_group(number: Any, sums: list[Any]) -> list[Any]:
        start = builder.mul(number, group)
        stop = builder.add(start, group)
        stop = builder.select(builder.icmp_signed("<", stop, rows.columns), stop, rows.columns)
        return add_scaled(number, loop(builder, start, stop, CHUNK, [none] * ROWS, chunk), sums)

    with builder.if_else(builder.icmp_signed("==", group, _I64(CHUNK))) as (then, otherwise):
        with then:
            narrow, narrow_end = loop(builder, _I64(0), n_groups, 1, [_ZERO] * ROWS, one_chunk), builder.basic_block
        with otherwise:
            wide, wide_end = loop(builder, _I64(0), n_groups, 1, [_ZERO] * ROWS, one_group), builder.basic_block
    sums = []
    for a, b in zip(narrow, wide, strict=True):
        either = builder.phi(_FLOATS)
        either.add_incoming(a, narrow_end)
        either.add_incoming(b, wide_end)
        sums.append(either)
    return [sum_lanes(builder, part) for part in sums]


@intrinsic
def dot_four(
    typingctx: Any, rows: Any, scales: Any, group: Any, numbers: Any, first: Any, n: Any, x: Any, unit: Any, out: Any
) -> Any:
    """out[first : first + 4] = the rows numbers[first : first + 4] of a list of n, each times x, times ``unit``.

    rows (., D) are fp32, or int16 with one scale a row, with x (D) fp32. Or rows are int8 with scales (., G) for each
    ``group`` columns, and x (D) is int16. The scales of fp32 rows are not read. out (at least n + 3) fp32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        read = Rows(context, builder, (kinds[0], kinds[3]), args[0], args[3], args[4], args[5])
        x_data = context.make_array(kinds[6])(context, builder, args[6]).data
        scale_array = context.make_array(kinds[1])(context, builder, args[1])
        if kinds[0].dtype == types.int8:
            n_groups = builder.extract_value(scale_array.shape, 1)
            sums = _dot_levels(read, scale_array.data, n_groups, args[2], x_data)
        elif kinds[0].dtype == types.int16:
            sums = _dot_floats(read, _I16, x_data, True)
            for row in range(ROWS):
                scale = builder.load(builder.gep(scale_array.data, [read.indices[row]]))
                sums[row] = builder.fmul(sums[row], scale)
        else:
            sums = _dot_floats(read, _FLOAT, x_data, False)
        out_data = context.make_array(kinds[8])(context, builder, args[8]).data
        for row in range(ROWS):
            place = builder.gep(out_data, [builder.add(args[4], _I64(row))])
            builder.store(builder.fmul(sums[row], args[7]), place)
        return context.get_dummy_value()

    one = types.int64
    return types.void(rows, scales, one, numbers, one, one, x, types.float32, out), generate


@intrinsic
def add_four(
    typingctx: Any, out: Any, rows: Any, scales: Any, group: Any, numbers: Any, factors: Any, first: Any, n: Any
) -> Any:
    """Add factors[i] times row numbers[i] to out (D) fp32, for i from first to first + 4 in a list of n.

    rows (., D) fp32, or int8 with scales (., G) for each ``group`` columns.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        read = Rows(context, builder, (kinds[1], kinds[4]), args[1], args[4], args[6], args[7])
        out_data = context.make_array(kinds[0])(context, builder, args[0]).data
        factor_data = context.make_array(kinds[5])(context, builder, args[5]).data
        own = []
        for row in range(ROWS):
            at = builder.add(args[6], _I64(row))
            inside = builder.icmp_signed("<", at, args[7])
            factor = builder.load(builder.gep(factor_data, [builder.select(inside, at, args[6])]))
            own.append(builder.select(inside, factor, _FLOAT(0.0)))
        whole = kinds[1].dtype == types.float32
        scale_array = context.make_array(kinds[2])(context, builder, args[2])

        def add_columns(start: Any, stop: Any, factors: list[Any], element: Any) -> None:
            vectors = [splat(builder, factor) for factor in factors]

            def chunk(column: Any, nothing: list[Any]) -> list[Any]:
                if not whole:
                    read.prefetch(column)
                for offset in range(0, CHUNK, LANES):
                    here = builder.add(column, _I64(offset))
                    place = builder.bitcast(builder.gep(out_data, [here]), _FLOATS.as_pointer())
                    total = builder.load(place, align=4)
                    for row in range(ROWS):
                        codes = read.codes(row, here, element, LANES)
                        codes = codes if whole else builder.sitofp(codes, _FLOATS)
                        total = fused(builder, codes, vectors[row], total)
                    builder.store(total, place, align=4)
                return nothing

            loop(builder, start, stop, CHUNK, [], chunk)

        def one_group(number: Any, nothing: list[Any]) -> list[Any]:
            start = builder.mul(number, args[3])
            stop = builder.add(start, args[3])
            stop = builder.select(builder.icmp_signed("<", stop, read.columns), stop, read.columns)
            scaled = []
            for row in range(ROWS):
                at = builder.add(builder.mul(read.indices[row], n_groups), number)
                scaled.append(builder.fmul(own[row], builder.load(builder.gep(scale_array.data, [at]))))
            add_columns(start, stop, scaled, _I8)
            return nothing

        if whole:
            add_columns(_I64(0), read.columns, own, _FLOAT)
        else:
            n_groups = builder.extract_value(scale_array.shape, 1)
            loop(builder, _I64(0), n_groups, 1, [], one_group)
        return context.get_dummy_value()

    one = types.int64
    return types.void(out, rows, scales, one, numbers, factors, one, one), generate


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
            _prefetch(builder, builder.gep(later, [column]))
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
                    products = pair_products(context, builder, four_bits, values)
                    sums[which] = builder.add(sums[which], products)
            return sums

        zero = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        sums = loop(builder, _I64(0), half, CHUNK // 2, [zero, zero], part)
        kind = ir.FunctionType(_I32, [zero.type])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i32")
        return builder.call(reduce, [builder.add(*sums)])

    return types.int32(pairs, types.int64, types.int64, levels), generate
