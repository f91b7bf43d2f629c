"""Limits and formats of the CPU engine, known without numba."""

from typing import Literal, get_args

Stored = Literal["float32", "float16", "bfloat16", "int8", "int4"]
STORED: tuple[str, ...] = get_args(Stored)  # formats of weights
WHOLE = STORED[:3]  # numbers as they are, not codes

MAX_BATCH = 8
CHUNK = 64  # columns; a cache line of int8 codes
HALF = CHUNK // 2  # columns whose 4-bit codes lie in one half of a chunk's bytes
BLOCK = 8  # scales of a row of 4-bit codes that are read at once
SEED_ROWS = 4  # whose seeds follow each other


def row_seed(seed: int, number: int) -> int:
    """The seed of a call's row, which no row of another seed has. 64 bits."""
    return seed * SEED_ROWS + number % SEED_ROWS + (number // SEED_ROWS << 40)
