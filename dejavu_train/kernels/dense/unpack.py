"""Rows of 4 bits written out as numbers, at the rate of the memory: what a product of many tokens multiplies with.

    out[r, c] = code[r, c] * scale[r, c / group]

`formats.int4` has the layout of words. Rows (A, n, d) may go to columns of their leading number: out[r, a d + c].
So an output projection that lies head by head becomes one matrix. A program owns
ROWS rows and WORDS words of each. A thread writes the eight columns of a word at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, require
from dejavu_train.kernels.common.launch import as_dependent, wait_for_predecessor
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix

ROWS, WORDS = 4, 64


def unpack_reference(rows: Int4Rows, dtype: torch.dtype, beside: bool = False, pdl: bool = False) -> Tensor:
    """Plain torch: as `unpack`, called alike. ``pdl`` means nothing to it."""
    whole = rows.dense(dtype)
    return whole.transpose(0, 1).flatten(1) if beside else whole.flatten(0, -2)


def numbers_of(weight: Matrix, pdl: bool = False) -> Tensor:
    """A matrix of any format as numbers, of 4 bits in fp16."""
    return unpack(weight, torch.float16, pdl=pdl) if weight.format is Format.INT4 else weight.numbers


@triton.jit
def _unpack_kernel(
    words, scales, out, n_rows, n_words, inner, row_stride, block_stride, group, n_groups,
    ROW_TILE: tl.constexpr, WORD_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    r = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    w = tl.program_id(1) * WORD_TILE + tl.arange(0, WORD_TILE)
    i = tl.arange(0, 8)
    there = (r < n_rows)[:, None] & (w < n_words)[None, :]
    row = r.to(tl.int64)[:, None]
    word = tl.load(words + row * n_words + w[None, :], mask=there, other=0)
    scale = tl.load(scales + row * n_groups + (8 * w // group)[None, :], mask=there, other=0.0).to(tl.float32)
    code = (word[:, :, None] >> (4 * (i // 2) + 16 * (i % 2))[None, None, :] & 15) - 8
    value = (code.to(tl.float32) * scale[:, :, None]).to(out.dtype.element_ty)
    to = row // inner * block_stride + row % inner * row_stride + 8 * w[None, :]
    tl.store(out + to[:, :, None] + i[None, None, :], value, mask=there[:, :, None])


def unpack(rows: Int4Rows, dtype: torch.dtype, beside: bool = False, pdl: bool = False) -> Tensor:
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
    require(rows.group % 8 == 0, f"a scale of {rows.group} columns, expected a multiple of 8: a word's have one")
    n_rows = rows.words.numel() // (columns // 8)
    inner = leading[-1] if beside else n_rows
    width = columns * (n_rows // inner)
    out = torch.empty(inner, width, dtype=dtype, device=rows.words.device)
    grid = triton.cdiv(n_rows, ROWS), triton.cdiv(columns // 8, WORDS)
    _unpack_kernel[grid](
        rows.words, rows.scales, out, n_rows, columns // 8, inner, width, columns, rows.group, rows.scales.shape[-1],
        ROW_TILE=ROWS, WORD_TILE=WORDS, num_warps=4, **as_dependent(pdl, out.device),
    )  # fmt: skip
    return out
