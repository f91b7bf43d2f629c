"""The (batch row, position) pairs that a head lacks, counted on through the rows, and where their q/k/v are kept.

Of a head, batch row b lacks the positions from first[b] on. ends[b]: how many pairs there are up to its last one. For
programs that multiply a tile of a head's rows with several of its pairs at once (`qkv`, `qkv_int4`).
"""

import triton
import triton.language as tl


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
def store_rows(
    values, head, row, rows, of_row, p, exists, valid, q, k_cache, v_cache, capacity, H: tl.constexpr,
    HEAD_DIM: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Stores the values (R, N) of a head's rows (R,), row and its next, of N pairs those that exist.

    The rows are all of q, all of k or all of v.
    """
    N: tl.constexpr = values.shape[1]
    pair = of_row * H + head
    slots = (pair * capacity + p).to(tl.int64)[None, :] * HEAD_DIM + (rows % HEAD_DIM)[:, None]
    mask = exists[None, :] & (rows >= 0)[:, None]
    if row < HEAD_DIM:
        tl.store(q + pair[None, :] * HEAD_DIM + rows[:, None], values, mask=mask)
    elif row < 2 * HEAD_DIM:
        tl.store(k_cache + slots, values.to(k_cache.dtype.element_ty), mask=mask)
    else:
        tl.store(v_cache + slots, values.to(v_cache.dtype.element_ty), mask=mask)
        if POLICY == 2:
            if row == 2 * HEAD_DIM:
                tl.store(valid + pair * capacity + p, tl.full((N,), 1, tl.uint8), mask=exists)
