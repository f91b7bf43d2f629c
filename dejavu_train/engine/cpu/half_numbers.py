"""Numbers in compiled loops that are fp32 or fp16, the latter as uint16: numba has no fp16 on a CPU.

Processors with F16C turn eight at once. Elsewhere whole numbers do it, which LLVM puts side by side too.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dejavu_train.engine.cpu.level_products import has_features

_HALF, _FLOAT, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
_UP = _FLOAT(2.0**112)  # between the exponents of fp16 and fp32, of the same bits
_SPECIAL = _I32(0x7F800000)  # exponent of what is not finite, in fp32


@intrinsic
def widened(typingctx: Any, number: Any) -> Any:
    """An fp32 number, or the fp16 number with these 16 bits as fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (given,) = args
        if signature.args[0] == types.float32:
            return given
        if has_features("f16c"):
            return builder.fpext(builder.bitcast(given, _HALF), _FLOAT)
        wide = builder.zext(given, _I32)
        sign, size = (builder.and_(wide, _I32(mask)) for mask in (0x8000, 0x7FFF))
        moved = builder.fmul(builder.bitcast(builder.shl(size, _I32(13)), _FLOAT), _UP)
        bits = builder.or_(builder.bitcast(moved, _I32), builder.shl(sign, _I32(16)))
        special = builder.icmp_unsigned(">=", size, _I32(0x7C00))
        return builder.bitcast(builder.or_(bits, builder.select(special, _SPECIAL, _I32(0))), _FLOAT)

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
        near = builder.select(builder.icmp_unsigned(">", size, _SPECIAL), _I32(0x7E00), near)
        sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
        return builder.trunc(builder.or_(near, sign), _I16)

    return array.dtype(array, number), generate
