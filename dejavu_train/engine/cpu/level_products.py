"""Products of codes and levels, exact in whole numbers, by the instructions that a processor has for them.

A level is a whole number of 16 bits. What is multiplied at once is a *half* of a chunk: 32 columns, in eight lanes.
Levels of a half lie as its even columns and then its odd ones. So shifts alone make 16-bit numbers of codes that are
read as words. VNNI multiplies and adds these in one instruction, AVX2 in two, and elsewhere LLVM finds a way. A lane
has the same columns on every processor, so sums of lanes are the same.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from dejavu_train.engine.cpu_limits import HALF

LANES = 8
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WORDS, _SUMS = ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I32, LANES)
NONE = ir.Constant(_SUMS, [0] * LANES)
Half = list[Any]  # even and odd columns of 32


def has_features(*names: str) -> bool:
    """True where the processor that is compiled for has all these, by LLVM's names. Numba's cache is for one kind."""
    found = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return all(f"+{name}" in found for name in names)


VNNI = has_features("avx512vnni", "avx512vl") or has_features("avxvnni")


def load_vector(builder: Any, address: Any, kind: Any) -> Any:
    """A vector from memory, wherever it begins."""
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def multiply_add(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total (8) int32 plus, in each lane, two neighbouring products of a (16) and b (16) int16."""
    if VNNI:
        kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
        dot = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.vpdpwssd.{32 * LANES}")
        return builder.call(dot, [total, builder.bitcast(a, _SUMS), builder.bitcast(b, _SUMS)])
    if has_features("avx2"):
        kind = ir.FunctionType(_SUMS, [a.type, b.type])
        products = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        return builder.add(total, builder.call(products, [a, b]))
    for parity in range(2):
        lanes = ir.Constant(_SUMS, list(range(parity, 2 * LANES, 2)))
        wide = [builder.sext(builder.shuffle_vector(v, v, lanes), _SUMS) for v in (a, b)]
        total = builder.add(total, builder.mul(*wide))
    return total


def loop(
    builder: Any, start: Any, stop: Any, step: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
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
    following = builder.add(index, step)
    index.add_incoming(following, builder.basic_block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.basic_block)
    builder.cbranch(builder.icmp_signed("<", following, stop), inside, after)
    builder.position_at_end(after)
    return results


def _words(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * 2 * LANES)


def _signed(builder: Any, words: Any, first: int, bits: int) -> Any:
    """The signed numbers in so many bits of words, from the bit ``first`` on."""
    raised = builder.shl(words, _words(16 - bits - first)) if first + bits < 16 else words
    return builder.ashr(raised, _words(16 - bits))


def levels_of(builder: Any, x: Any, column: Any) -> list[Half]:
    """Both halves of a chunk of levels."""
    begin = builder.gep(x, [column])
    vectors = [load_vector(builder, builder.gep(begin, [_I64(2 * LANES * i)]), _WORDS) for i in range(4)]
    return [vectors[:2], vectors[2:]]


def codes_of(builder: Any, address: Any) -> list[Half]:
    """Both halves of a chunk of codes of 8 bits from its address on: even columns, odd columns."""
    halves = [load_vector(builder, builder.gep(address, [_I64(HALF * i)]), _WORDS) for i in range(2)]
    return [[_signed(builder, words, odd, 8) for odd in (0, 8)] for words in halves]


def packed_codes(builder: Any, words: Any) -> list[Half]:
    """The same of a packed chunk. The lower four bits of a byte are of a column in the first half."""
    return [[_signed(builder, words, first + odd, 4) for odd in (0, 8)] for first in (0, 4)]


def add_products(builder: Any, total: Any, codes: Half, levels: Half) -> Any:
    """total (8) int32 plus the products of a half."""
    for code, level in zip(codes, levels, strict=True):
        total = multiply_add(builder, total, code, level)
    return total


@intrinsic
def lay_levels(typingctx: Any, levels: Any) -> Any:
    """Lay levels (D) int16, D in whole halves, as products take them, in their place."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        numbers = ir.VectorType(_I16, HALF)
        order = ir.Constant(ir.VectorType(_I32, HALF), [*range(0, HALF, 2), *range(1, HALF, 2)])

        def half(column: Any, nothing: list[Any]) -> list[Any]:
            place = builder.bitcast(builder.gep(array.data, [column]), numbers.as_pointer())
            whole = builder.load(place, align=1)
            builder.store(builder.shuffle_vector(whole, whole, order), place, align=1)
            return nothing

        loop(builder, _I64(0), builder.extract_value(array.shape, 0), _I64(HALF), [], half)
        return context.get_dummy_value()

    return types.void(levels), generate
