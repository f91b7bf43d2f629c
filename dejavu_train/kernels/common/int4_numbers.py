"""4-bit rows written out in fp16, for products of several inputs: what the kernels of 4-bit rows do not take.

    out[r, j] = fp16(code[r, j] * scale[r, j // group])

It reads half a byte and writes two a weight, and the product reads the two again. So a matrix takes more than twice the
time of its product in fp16. Batches gain memory by it, not time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device
from dejavu_train.kernels.common.int4_tiles import codes_of
from dejavu_train.kernels.common.launch import as_dependent, wait_for_predecessor
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import COLUMNS_PER_WORD, Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix

BLOCK = 1024  # words of a program


@triton.jit
def _write_out_kernel(
    words, scales, out, n_words, n_rows, outer_stride, row_stride, W: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < n_words
    row = number // W
    word = number % W
    codes = codes_of(tl.load(words + number, mask=inside, other=0))
    scale = tl.load(scales + row * (8 * W // GROUP) + word * 8 // GROUP, mask=inside, other=0.0).to(tl.float32)
    at = out + row // n_rows * outer_stride + row % n_rows * row_stride + word * 8
    tl.store(at[:, None] + tl.arange(0, 8)[None, :], (codes * scale[:, None]).to(tl.float16), mask=inside[:, None])


def numbers_of(weight: Matrix, pdl: bool = False) -> Tensor:
    """A matrix of any format as numbers."""
    return written_out(weight, pdl) if weight.format is Format.INT4 else weight.numbers


def written_out(weight: Int4Rows, pdl: bool = False) -> Tensor:
    """fp16 numbers of the matrix's shape. A CPU tensor only under the interpreter."""
    return _write_out(weight, torch.empty(weight.shape, dtype=torch.float16, device=weight.words.device), pdl)


def written_out_by_output(weight: Int4Rows, pdl: bool = False) -> Tensor:
    """An output projection's rows by head, (h, d, head_dim), as the matrix (d, h * head_dim) in fp16."""
    n_heads, d, head_dim = weight.shape
    out = torch.empty(d, n_heads * head_dim, dtype=torch.float16, device=weight.words.device)
    _write_out(weight, out.view(d, n_heads, head_dim).transpose(0, 1), pdl)
    return out


def _write_out(weight: Int4Rows, out: Tensor, pdl: bool) -> Tensor:
    check_device("weight", weight.words)
    *_, n, d = weight.shape
    n_words = weight.words.numel()
    _write_out_kernel[(triton.cdiv(n_words, BLOCK),)](
        weight.words, weight.scales, out, n_words, n, out.stride(-3) if out.dim() > 2 else 0, out.stride(-2),
        W=d // COLUMNS_PER_WORD, GROUP=weight.group, BLOCK=BLOCK, num_warps=8,
        **as_dependent(pdl, out.device),
    )  # fmt: skip
    return out
