"""Rows of numbers times one normalised row, in registers, rows after rows of a matrix.

Programs stride over the rows, ROWS at a time. Rows that come next are always on their way before these are summed. The
first ones are before the wait for the stage before: weights depend on nothing. x stays in registers, in one-dimensional
pieces spread over all threads of a program. So a width of 7168 takes seven pieces of a power of two, and no padding.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.launch import load_vector, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import norm_vectors, normalised_pieces
from dejavu_train.kernels.stages.listed import keyed


@triton.jit
def row_pieces(weight, line, n_rows, c, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows line .. line + ROWS - 1 as a tuple of pieces (BLOCK,), row by row. Rows from n_rows on are not read.

    weight: of D columns, numbers or words of an integer type.
    """
    tiles = ()
    for r in tl.static_range(ROWS):
        width = tl.where(line + r < n_rows, D, 0)
        at = weight + (line + r).to(tl.int64) * D
        for j in tl.static_range((D + BLOCK - 1) // BLOCK):
            column = j * BLOCK + c
            tiles = tiles + (tl.load(at + column, mask=column < width, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def row_product(w, n, r, D: tl.constexpr, BLOCK: tl.constexpr):
    """Each thread's part of the product of row r of the pieces w with the pieces n, fp32 (BLOCK,)."""
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    acc = w[r * STEPS].to(tl.float32) * n[0]
    for j in tl.static_range(1, STEPS):
        acc += w[r * STEPS + j].to(tl.float32) * n[j]
    return acc


@triton.jit
def _walk_numbers(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    c = tl.arange(0, how.block)
    TOGETHER: tl.constexpr = sink.together
    first = tl.program_id(0) * how.rows
    step = tl.num_programs(0) * how.rows
    w = row_pieces(weight, first, n_rows, c, how.d, how.block, how.rows)
    wait_for_predecessor(PDL)
    xs = load_vector(x, c, how.d, how.block)
    gains, shifts = norm_vectors(norm, c, how.d, how.block)
    n = normalised_pieces(xs, gains, shifts, norm, c, how.d, how.block, weight.dtype.element_ty)
    for begin in range(first, n_rows, step):
        coming = row_pieces(weight, begin + step, n_rows, c, how.d, how.block, how.rows)
        ahead = ()
        for r in tl.static_range(0, how.rows, TOGETHER):
            line = tl.cast(begin + r, tl.int32)
            if TOGETHER == 2:
                line = line + tl.arange(0, 2)
            ahead = ahead + (sink.ahead(sink, line, 0, line < n_rows, line < n_rows, n_rows),)
        for r in tl.static_range(0, how.rows, TOGETHER):
            acc = row_product(w, n, r, how.d, how.block)
            line = tl.cast(begin + r, tl.int32)
            if TOGETHER == 2:
                both = tl.join(tl.sum(acc, 0), tl.sum(row_product(w, n, r + 1, how.d, how.block), 0))
                line = line + tl.arange(0, 2)
                sink.put(sink, both, ahead[r // 2], line, 0, line < n_rows, n_rows)
            elif line < n_rows:
                sink.put(sink, tl.sum(acc, 0), ahead[r], line, 0, line < n_rows, n_rows)
        w = coming


@keyed
class NumberWalk(NamedTuple):
    """d: columns. block: of a piece of a row. rows: of a step."""

    d: int
    block: int
    rows: int
    walk: Any = _walk_numbers
