"""Rows of numbers times one input as it is, column by column: all columns, or those of selected heads.

A program owns ROWS outputs and walks over the columns, those that come next on their way before these are used. Rows
may be longer than registers hold. A head's columns of a row are neighbours, so rows need no transposing. Every output
has one owner: no partial sums, no atomics, bitwise deterministic. The selection, what the sink reads and the first
columns do not depend on the input. They are read before the wait for the stage before.

Two walks: rows in registers, or tiles of outputs on the tensor cores, a selected head a step of a cp.async pipeline.
Tiles round the input to the weights' dtype. They are faster where a selection leaves many rows, at d near 9216.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.listed import keyed
from dejavu_train.kernels.stages.select import selected_heads

VECTOR = 8  # neighbouring columns that one thread sums on its own, at most


@triton.jit
def _step(at, inside, order, begin, n, how: tl.constexpr):
    """(weights (ROWS, BLOCK), their columns (BLOCK,)) of the n selected columns from the begin-th on."""
    RUN: tl.constexpr = how.head_dim & -how.head_dim
    j = begin + tl.arange(0, how.block)
    if order is None:
        columns = j
    else:
        head = tl.gather(order, tl.minimum(j // how.head_dim, order.shape[0] - 1), 0)
        # RUN neighbouring columns lie in one head and side by side: what lets a thread load 16 bytes at once.
        columns = tl.max_contiguous(tl.multiple_of(head * how.head_dim + j % how.head_dim, RUN), RUN)
    w = tl.load(
        at + columns[None, :], mask=(j < n)[None, :] & inside[:, None], other=0.0, eviction_policy="evict_first"
    )
    return w, columns


@triton.jit
def _walk_columns(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    rows = tl.program_id(0) * how.rows + tl.arange(0, how.rows)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * how.d
    c = tl.arange(0, how.block)
    order = None
    n = how.d
    if source is not None:
        order, n_heads = selected_heads(source.row_bits, how.d // how.head_dim, how.heads)
        n = n_heads * how.head_dim
    w, columns = _step(at, inside, order, 0, n, how)
    ahead = sink.ahead(sink, rows, 0, inside, inside, n_rows)
    wait_for_predecessor(PDL)
    acc = tl.zeros((how.rows, how.block // how.vector), tl.float32)
    for begin in range(0, n, how.block):
        own = tl.load(x + columns, mask=begin + c < n, other=0.0)
        coming, next_columns = _step(at, inside, order, begin + how.block, n, how)
        products = w.to(tl.float32) * own[None, :]
        if how.vector > 1:
            products = tl.sum(tl.reshape(products, (how.rows, how.block // how.vector, how.vector)), 2)
        acc += products
        w = coming
        columns = next_columns
    sink.put(sink, tl.sum(acc, 1), ahead, rows, 0, inside, n_rows)


@triton.jit
def walk_tiles(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    rows = tl.program_id(0) * how.rows + tl.arange(0, how.rows)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * how.d
    c = tl.arange(0, how.block)
    heads = tl.arange(0, how.heads)
    b = tl.arange(0, 8)  # the product's narrowest second side; only its first column exists
    order, n = selected_heads(source.row_bits, how.d // how.head_dim, how.heads)
    ahead = sink.ahead(sink, rows, 0, inside, inside, n_rows)
    wait_for_predecessor(PDL)
    y = tl.zeros((how.rows, 8), tl.float32)
    PART: tl.constexpr = how.head_dim // how.parts
    for i in tl.range(0, n * how.parts, num_stages=how.stages):
        if how.parts == 1:
            column = tl.sum(tl.where(heads == i, order, 0)) * how.head_dim + c
        else:
            head = tl.sum(tl.where(heads == i // how.parts, order, 0))
            column = head * how.head_dim + i % how.parts * PART + c
        w = tl.load(at + column[None, :], mask=inside[:, None] & (c < PART)[None, :], other=0.0)
        places = x + b[None, :] * how.d + column[:, None]  # as if of a batch, so that columns lie side by side
        own = tl.load(places, mask=(b == 0)[None, :] & (c < PART)[:, None], other=0.0)
        y = tl.dot(w, own.to(w.dtype), y, input_precision="ieee")
    sink.put(sink, tl.sum(y, 1), ahead, rows, 0, inside, n_rows)


@keyed
class ColumnWalk(NamedTuple):
    """d: columns. head_dim: of a head's columns. heads: of a tile of all heads. rows: of a program.

    block: columns of a step. vector: neighbouring ones that one thread sums on its own. Fewer take more registers, so
    fewer programs fit.
    Of tiles block has the columns of a part of a head, padded. parts: of a head. stages: of the pipeline.
    """

    d: int
    head_dim: int
    heads: int
    rows: int
    block: int
    vector: int = VECTOR
    stages: int = 0
    parts: int = 1
    walk: Any = _walk_columns


class HeadSource(NamedTuple):
    """row_bits: (h,) int32, not zero where a head is selected."""

    row_bits: Any
