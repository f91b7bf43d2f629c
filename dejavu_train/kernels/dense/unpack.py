"""Rows of 4 bits written out as numbers, at the rate of the memory: what a product of many tokens multiplies with.

    out[r, c] = code[r, c] * scale[r, c / group]

`formats.int4` has the layout of words. Rows (A, n, d) may go to columns of their leading number: out[r, a d + c].
So an output projection that lies head by head becomes one matrix. A program owns ROWS rows and COLUMNS columns. Eight
neighbouring columns read one word, which the hardware loads once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, require
from dejavu_train.kernels.formats.int4 import Int4Rows

ROWS, COLUMNS = 8, 256


def unpack_reference(rows: Int4Rows, dtype: torch.dtype, beside: bool = False) -> Tensor:
    """Plain torch: as `unpack`, called alike."""
    whole = rows.dense(dtype)
    return whole.transpose(0, 1).flatten(1) if beside else whole.flatten(0, -2)


@triton.jit
def _unpack_kernel(
    words, scales, out, n_rows, columns, inner, row_stride, block_stride, group, n_groups,
    ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    c = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    there = (r < n_rows)[:, None] & (c < columns)[None, :]
    row = r.to(tl.int64)
    word = tl.load(words + (row * (columns // 8))[:, None] + (c // 8)[None, :], mask=there, other=0)
    shift = 4 * (c % 8 // 2) + 16 * (c % 2)
    code = (word >> shift[None, :] & 15) - 8
    scale = tl.load(scales + (row * n_groups)[:, None] + (c // group)[None, :], mask=there, other=0.0)
    value = code.to(tl.float32) * scale.to(tl.float32)
    to = (row // inner * block_stride + row % inner * row_stride)[:, None] + c[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=there)


def unpack(rows: Int4Rows, dtype: torch.dtype, beside: bool = False) -> Tensor:
    """The matrix (n, d) as numbers.

    Args:
        rows: with any leading dimensions, which count as one.
        beside: of (A, n, d), matrices that stand side by side: (n, A d).

    Raises:
        ValueError: groups that do not divide the columns, or a device without kernels.
    """
    check_device("words", rows.words)
    *leading, columns = rows.shape
    require(columns % rows.scales.shape[-1] == 0, f"{rows.scales.shape[-1]} groups do not divide {columns} columns")
    n_rows = rows.words.numel() // (columns // 8)
    inner = leading[-1] if beside else n_rows
    width = columns * (n_rows // inner)
    out = torch.empty(inner, width, dtype=dtype, device=rows.words.device)
    grid = triton.cdiv(n_rows, ROWS), triton.cdiv(columns, COLUMNS)
    _unpack_kernel[grid](
        rows.words, rows.scales, out, n_rows, columns, inner, width, columns, rows.group, rows.scales.shape[-1],
        ROW_TILE=ROWS, COLUMN_TILE=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
