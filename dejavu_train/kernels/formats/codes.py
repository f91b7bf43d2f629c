"""How the weights of predictors lie, and as what kernels read them.

They are numbers, or int8 codes or nibbles with a scale a row. Rows of uint8 are nibbles as a bundle stores them.
A row has H = ceil(d / 2) bytes. Byte j holds u = code + 8 of column j in its low nibble, of column H + j in the high
one. Kernels read them as floats 1 + u / 16, the nibble in the mantissa of 1.0 (`nibble_floats`). Eight floats take four
instructions and eight byte permutations. For the tensor cores they are read as fp16 codes (`nibble_halves`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CODE_TYPES = (torch.int8, torch.uint8)


def nibble_codes(stored: Tensor, columns: int) -> Tensor:
    """Codes (n, columns) int8 of stored nibbles (n, ceil(columns / 2)) uint8."""
    wide = stored.to(torch.int16)
    return (torch.cat([wide & 15, wide >> 4], dim=1)[:, :columns] - 8).to(torch.int8)


def stored_width(weight: Tensor, columns: int) -> int:
    """Elements of this weight in a row of `columns`: half as many where they are nibbles."""
    return (columns + 1) // 2 if weight.dtype == torch.uint8 else columns


def unscaled(weight: Tensor, scale: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor:
    """weight (n, columns), or its nibbles, in `dtype`, rows times their scales (n,) where it has some."""
    if weight.dtype == torch.uint8:
        weight = nibble_codes(weight, columns)
    return weight.to(dtype) if scale is None else weight.to(dtype) * scale[:, None].to(dtype)


# PTX: $0..$3 = four int8 codes of $4, raised by 128, each the end of the mantissa of 2^23.
CODES_ASM = tl.constexpr(
    "{ .reg .b32 bytes; xor.b32 bytes, $4, 0x80808080;"
    + "".join(f"prmt.b32 ${i}, bytes, 0x4B000000, 0x765{i};" for i in range(4))
    + "}"
)
# PTX: $0..$3 = the low nibbles of the bytes of $8, $4..$7 = the high ones, each in the mantissa of 1.0.
FLOATS_ASM = tl.constexpr(
    "{ .reg .b32 low, high, ones; mov.b32 ones, 0x80808080; shl.b32 low, $8, 3; shr.u32 high, $8, 1;"
    "lop3.b32 low, low, 0x78787878, ones, 0xEA; lop3.b32 high, high, 0x78787878, ones, 0xEA;"
    + "".join(f"prmt.b32 ${i}, {'high' if i > 3 else 'low'}, 0x3F000000, 0x7{i % 4}44;" for i in range(8))
    + "}"
)
# PTX: $0 and $1 = pairs of the codes in the low nibbles of $4, $2 and $3 = of those in the high ones.
HALVES_ASM = tl.constexpr(
    "{ .reg .b32 low, high, magic, minus1032; mov.b32 magic, 0x64646464; mov.b32 minus1032, 0xE408E408;"
    "and.b32 low, $4, 0x0F0F0F0F; shr.u32 high, $4, 4; and.b32 high, high, 0x0F0F0F0F;"
    "prmt.b32 $0, low, magic, 0x4140; prmt.b32 $1, low, magic, 0x4342;"
    "prmt.b32 $2, high, magic, 0x4140; prmt.b32 $3, high, magic, 0x4342;"
    + "".join(f"add.rn.f16x2 ${i}, ${i}, minus1032;" for i in range(4))
    + "}"
)


@triton.jit
def to_float(tile):
    """fp32, exactly. The GPU converts int8 at a quarter of its rate for sums. Here a code's byte becomes the end of the
    mantissa of 2^23, four codes at a time. Then 2^23 is subtracted, with the 128 that makes a code positive."""
    if tile.dtype == tl.int8 and not INTERPRETED:
        floats = tl.inline_asm_elementwise(CODES_ASM, "=r,=r,=r,=r,r", [tile], dtype=tl.float32, is_pure=True, pack=4)
        floats = floats - 8388736.0
    else:
        floats = tile.to(tl.float32)
    return floats


@triton.jit
def nibble_floats(tile):
    """(1 + low nibble / 16, 1 + high nibble / 16) of bytes, fp32."""
    if INTERPRETED:
        wide = tile.to(tl.int32)
        floats = (1 + (wide & 15).to(tl.float32) / 16, 1 + ((wide >> 4) & 15).to(tl.float32) / 16)
    else:
        floats = tl.inline_asm_elementwise(
            FLOATS_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r", [tile], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    return floats


@triton.jit
def nibble_halves(tile):
    """Codes of the low nibbles and of the high ones of bytes, fp16: each becomes the end of the mantissa of 1024."""
    if INTERPRETED:
        wide = tile.to(tl.int32)
        halves = (((wide & 15) - 8).to(tl.float16), (((wide >> 4) & 15) - 8).to(tl.float16))
    else:
        halves = tl.inline_asm_elementwise(
            HALVES_ASM, "=&r,=&r,=&r,=&r,r", [tile], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return halves
