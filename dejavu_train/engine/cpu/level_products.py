"""Products of codes and levels, exact in whole numbers, by the instructions that a processor has for them.

A level is a whole number of 16 bits. What is multiplied at once is a *half* of a chunk: 32 columns, in eight lanes.

    bytes    VNNI multiplies four codes without a sign by four signed bytes in each lane. So levels lie as two planes,
             level = 256 high + low, 64 bytes of low and 64 of high a chunk. Codes are raised to be without a sign, and
             what that adds, the same for every row, is taken off.
    pairs    ``vpmaddwd`` multiplies two numbers of 16 bits in each lane. LLVM does not find it by itself.
    plain    Other processors: the same sums by what LLVM finds.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from dejavu_train.engine.cpu_limits import CHUNK, HALF

LANES = 8
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES, _PAIRS, _SUMS = ir.VectorType(_I8, HALF), ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I32, LANES)
NONE = ir.Constant(_SUMS, [0] * LANES)
Half = list[Any]  # vectors that stand for 32 columns


def has_features(*names: str) -> bool:
    """True where the processor that is compiled for has all these, by LLVM's names. Numba's cache is for one kind."""
    found = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return all(f"+{name}" in found for name in names)


PLANES = has_features("avx512vnni", "avx512vl") or has_features("avxvnni")
_DOT_BYTES = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"


def load_vector(builder: Any, address: Any, kind: Any) -> Any:
    """A vector from memory, wherever it begins."""
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def pair_products(builder: Any, a: Any, b: Any) -> Any:
    """a (16) and b (16) int16 -> (8) int32, each the sum of two neighbouring products."""
    if has_features("avx2"):
        kind = ir.FunctionType(_SUMS, [a.type, b.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd"), [a, b])
    sums = []
    for parity in range(2):
        lanes = ir.Constant(_SUMS, list(range(parity, 2 * LANES, 2)))
        wide = [builder.sext(builder.shuffle_vector(v, v, lanes), _SUMS) for v in (a, b)]
        sums.append(builder.mul(*wide))
    return builder.add(*sums)


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


def _dot_bytes(builder: Any, total: Any, codes: Any, levels: Any) -> Any:
    kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
    dot = cgutils.get_or_insert_function(builder.module, kind, _DOT_BYTES)
    return builder.call(dot, [total, builder.bitcast(codes, _SUMS), builder.bitcast(levels, _SUMS)])


def _all_bytes(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * HALF)


def _in_order(builder: Any, codes: Any) -> Half:
    """32 signed bytes as two vectors of 16 numbers."""
    parts = [ir.Constant(ir.VectorType(_I32, 16), list(range(start, start + 16))) for start in (0, 16)]
    return [builder.sext(builder.shuffle_vector(codes, codes, part), _PAIRS) for part in parts]


def levels_of(builder: Any, x: Any, column: Any) -> list[Half]:
    """Both halves of a chunk of levels: planes low and high, or two vectors of 16."""
    if PLANES:
        begin = builder.gep(builder.bitcast(x, _I8.as_pointer()), [builder.shl(column, _I64(1))])
        parts = [load_vector(builder, builder.gep(begin, [_I64(HALF * i)]), _BYTES) for i in range(4)]
        return [[parts[0], parts[2]], [parts[1], parts[3]]]
    begin = builder.gep(x, [column])
    pairs = [load_vector(builder, builder.gep(begin, [_I64(16 * i)]), _PAIRS) for i in range(4)]
    return [pairs[:2], pairs[2:]]


def nibbles(builder: Any, pairs: Any) -> list[Any]:
    """Codes + 8 of both halves of a chunk of 32 bytes. The lower four bits of a byte are of the columns 0 to 31."""
    low = builder.and_(pairs, _all_bytes(15))
    return [low, builder.lshr(pairs, _all_bytes(4))]


def signed_nibbles(builder: Any, pairs: Any) -> list[Any]:
    """The same as signed bytes."""
    return [builder.sub(half, _all_bytes(8)) for half in nibbles(builder, pairs)]


def codes_of(builder: Any, address: Any, packed: bool) -> list[Half]:
    """Both halves of a chunk of codes from its address on, as `add_products` takes them."""
    if packed:
        pairs = load_vector(builder, address, _BYTES)
        if PLANES:
            return [[half] for half in nibbles(builder, pairs)]
        return [_in_order(builder, half) for half in signed_nibbles(builder, pairs)]
    halves = [load_vector(builder, builder.gep(address, [_I64(HALF * i)]), _BYTES) for i in range(2)]
    if PLANES:
        return [[builder.xor(half, _all_bytes(128))] for half in halves]
    return [_in_order(builder, half) for half in halves]


def add_products(builder: Any, total: Any, codes: list[Half], levels: list[Half]) -> Any:
    """total (8) int32 plus the products of some halves. With planes `raised` is to be taken off."""
    if PLANES:
        high = NONE
        for (code,), (_, plane) in zip(codes, levels, strict=True):
            high = _dot_bytes(builder, high, code, plane)
        total = builder.add(total, builder.shl(high, ir.Constant(_SUMS, [8] * LANES)))
        for (code,), (plane, _) in zip(codes, levels, strict=True):
            total = _dot_bytes(builder, total, code, plane)
        return total
    for code, level in zip(codes, levels, strict=True):
        for a, b in zip(code, level, strict=True):
            total = builder.add(total, pair_products(builder, a, b))
    return total


def raised(builder: Any, levels: list[Half], packed: bool) -> Any:
    """The part of a product with these halves that comes from codes being raised, the same for every row."""
    if not PLANES:
        return NONE
    return add_products(builder, NONE, [[_all_bytes(8 if packed else 128)]] * len(levels), levels)


@intrinsic
def lay_planes(typingctx: Any, levels: Any) -> Any:
    """Lay levels (D) int16 as planes, in their place, on a processor that multiplies bytes. Elsewhere nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        numbers, bytes_, eight = ir.VectorType(_I16, CHUNK), ir.VectorType(_I8, CHUNK), ir.IntType(16)(8)

        def chunk(column: Any, nothing: list[Any]) -> list[Any]:
            place = builder.gep(array.data, [column])
            whole = load_vector(builder, place, numbers)
            low = builder.trunc(whole, bytes_)
            high = builder.ashr(builder.sub(whole, builder.sext(low, numbers)), ir.Constant(numbers, [eight] * CHUNK))
            planes = builder.bitcast(place, bytes_.as_pointer())
            builder.store(low, planes, align=1)
            builder.store(builder.trunc(high, bytes_), builder.gep(planes, [_I32(1)]), align=1)
            return nothing

        if PLANES:
            loop(builder, _I64(0), builder.extract_value(array.shape, 0), CHUNK, [], chunk)
        return context.get_dummy_value()

    return types.void(levels), generate
