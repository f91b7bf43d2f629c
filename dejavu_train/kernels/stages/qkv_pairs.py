"""Parts that the programs of q/k/v share, whatever their rows' format: which pairs a head lacks, where values go.

A pair is (batch row, position). Of a head of K and V, batch row b lacks the positions from first[b] on. ends[b]: how
many pairs there are up to its last one. A program multiplies a tile of a head's rows with several of its pairs at once.
A head's rows are those of the heads of q that share it, then its own of k and of v. In a tile they are all of q, of k
or of v. Where there is a table (`common.positions`), rows of q and k are turned with the position that they are of. In
back-fill that is the one that is filled in.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dejavu_train.kernels.common.positions import angles, turned


class QkvRows(NamedTuple):
    """weight (h, r + 2, head_dim, d): numbers, or words with scales. bias, gains: (h, r + 2, head_dim).

    scales, gains: or None. Gains are of a norm that comes late, as bias then is.
    """

    weight: Any
    scales: Any
    bias: Any
    gains: Any


class HeadNeeds(NamedTuple):
    """row_bits (h,), position (B,), and watermark (B, h), which only back-fill reads."""

    row_bits: Any
    position: Any
    watermark: Any


class QkvOutputs(NamedTuple):
    """q (B, h, r, head_dim), the caches, and the table of a rotation or None."""

    q: Any
    k_cache: Any
    v_cache: Any
    capacity: Any
    table: Any


class QkvSizes(NamedTuple):
    """Constants. H: heads of K and V. SHARE: heads of q for each. GROUP: columns that share a scale, 0 of numbers.

    FILLS: watermarks say what each head lacks. Else that is the present position. The others: a launch's
    tiles, see `qkv.QkvSettings`.
    """

    B: int
    H: int
    SHARE: int
    HEAD_DIM: int
    D: int
    ROWS: int
    PAIRS: int
    WIDE: int
    BLOCK: int
    STAGES: int
    GROUP: int
    ROOM: int
    FILLS: bool


@triton.jit
def places(i, start, first, ends, B: tl.constexpr):
    """(batch row, position) of the pairs start + i."""
    j = start + i
    if B == 1:
        of_row = tl.zeros_like(j)
        p = tl.sum(first) + start + i
    else:
        b = tl.arange(0, first.shape[0])
        passed = ends[None, :] <= j[:, None]
        of_row = tl.minimum(tl.sum(passed.to(tl.int32), 1), B - 1)
        begin = tl.max(tl.where(passed, ends[None, :], 0), 1)
        p = tl.sum(tl.where(of_row[:, None] == b[None, :], first[None, :], 0), 1) + j - begin
    return of_row, p


@triton.jit
def lacking_positions(wanted, b, heads, S: tl.constexpr):
    """(each row's last position, how many positions it lacks of each head): (B,), (B, H), padded."""
    inside = (b < S.B)[:, None] & (heads < S.H)[None, :]
    last = tl.load(wanted.position + b, mask=b < S.B, other=0)
    marks = tl.load(wanted.watermark + b[:, None] * S.H + heads[None, :], mask=inside, other=0)
    return last, tl.where(inside, last[:, None] + 1 - tl.minimum(marks, last[:, None]), 0)


@triton.jit
def turning(table, row, p, exists, R: tl.constexpr, S: tl.constexpr):
    """Turns of the R rows of a head from `row` on at positions p (N,), see `angles`. () without a table."""
    by = ()
    if table is not None:
        HEAD_DIM: tl.constexpr = S.HEAD_DIM
        OF_Q: tl.constexpr = S.SHARE * S.HEAD_DIM
        rows = (row + tl.arange(0, R))[:, None]
        turns = exists[None, :] & (rows < OF_Q + HEAD_DIM)  # not those of v
        by = angles(table, rows % HEAD_DIM, p[None, :], turns, HEAD_DIM)
    return by


@triton.jit
def store_rows(values, by, head, row, rows, of_row, p, exists, stored, S: tl.constexpr):
    """Stores the values (R, N) of a head's rows (R,), row and its next, of N pairs those that exist. by: `turning`."""
    OF_Q: tl.constexpr = S.SHARE * S.HEAD_DIM
    if stored.table is not None:
        values = turned(values, by)
    pair = of_row * S.H + head
    slots = (pair * stored.capacity + p).to(tl.int64)[None, :] * S.HEAD_DIM + (rows % S.HEAD_DIM)[:, None]
    mask = exists[None, :] & (rows >= 0)[:, None]
    if row < OF_Q:
        tl.store(stored.q + pair[None, :] * OF_Q + rows[:, None], values, mask=mask)
    elif row < OF_Q + S.HEAD_DIM:
        tl.store(stored.k_cache + slots, values.to(stored.k_cache.dtype.element_ty), mask=mask)
    else:
        tl.store(stored.v_cache + slots, values.to(stored.v_cache.dtype.element_ty), mask=mask)
