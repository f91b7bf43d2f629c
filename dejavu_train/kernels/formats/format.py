"""How the entries of a matrix are stored."""

from enum import StrEnum


class Format(StrEnum):
    """Numbers of a floating-point dtype, or codes with scales. No kernel takes float64, which references compute in."""

    FP64 = "float64"
    FP32 = "float32"
    FP16 = "float16"
    BF16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
