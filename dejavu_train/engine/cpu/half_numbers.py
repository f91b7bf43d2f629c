"""Numbers of 16 bits in compiled loops. Numba has no fp16 on a CPU, so they are uint16 there.

Processors with F16C turn eight at once. Elsewhere whole numbers do it, which LLVM puts side by side too.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dejavu_train.engine.cpu.level_products import has_features

_HALF, _FLOAT, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
_SPECIAL = 0x7F800000  # exponent of what is not finite, in fp32


def widen(builder: Any, bits: Any) -> Any:
    """The fp16 numbers with these 16 bits, one or a vector of them, as fp32."""
    count = getattr(bits.type, "count", 0)

    def kind(of: Any) -> Any:
        return ir.VectorType(of, count) if count else of

    def every(number: Any, of: Any = _I32) -> Any:
        return ir.Constant(kind(of), [number] * count if count else number)

    if has_features("f16c"):
        return builder.fpext(builder.bitcast(bits, kind(_HALF)), kind(_FLOAT))
    wide = builder.zext(bits, kind(_I32))
    sign, size = (builder.and_(wide, every(mask)) for mask in (0x8000, 0x7FFF))
    moved = builder.fmul(builder.bitcast(builder.shl(size, every(13)), kind(_FLOAT)), every(2.0**112, _FLOAT))
    whole = builder.or_(builder.bitcast(moved, kind(_I32)), builder.shl(sign, every(16)))
    special = builder.select(builder.icmp_unsigned(">=", size, every(0x7C00)), every(_SPECIAL), every(0))
    return builder.bitcast(builder.or_(whole, special), kind(_FLOAT))


@intrinsic
def widened(typingctx: Any, number: Any) -> Any:
    """An fp32 number, or the fp16 number with these 16 bits as fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0] if signature.args[0] == types.float32 else widen(builder, args[0])

    return types.float32(number), generate


@intrinsic
def narrowed(typingctx: Any, array: Any, number: Any) -> Any:
    """An fp32 number as elements of an array are: fp32, or the 16 bits of the nearest fp16 number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = args[1]
        if signature.return_type == types.float32:
            return given
        if has_features("f16c"):
            return builder.bitcast(builder.fptrunc(given, _HALF), _I16)
        bits = builder.bitcast(given, _I32)
        size = builder.and_(bits, _I32(0x7FFFFFFF))
        moved = builder.sub(size, _I32(112 << 23))  # the exponent of fp16
        odd = builder.and_(builder.lshr(moved, _I32(13)), _I32(1))
        near = builder.lshr(builder.add(moved, builder.add(odd, _I32(0xFFF))), _I32(13))
        # Below 2^-14 all numbers of 16 bits are as far apart as those of fp32 behind a half.
        behind = builder.bitcast(builder.fadd(builder.bitcast(size, _FLOAT), _FLOAT(0.5)), _I32)
        small = builder.icmp_unsigned("<", size, _I32(113 << 23))
        near = builder.select(small, builder.sub(behind, _I32(126 << 23)), near)
        near = builder.select(builder.icmp_unsigned("<", near, _I32(0x7C00)), near, _I32(0x7C00))
        near = builder.select(builder.icmp_unsigned(">", size, _I32(_SPECIAL)), _I32(0x7E00), near)
        sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
        return builder.trunc(builder.or_(near, sign), _I16)

    return array.dtype(array, number), generate
