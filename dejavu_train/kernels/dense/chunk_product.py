"""Products of a chunk of tokens with 4-bit rows, which are unpacked where they are multiplied:

    y[t, i] = act(unit sum_j x[t, j] w[i, j] + bias[i]) scale        w[i, j] = code[i, j] * scale[i, j / group], rounded
    y[t, i] = act(unit sum_j x[t, j] w[j, i] + bias[i]) scale        where rows are inputs, as those of down are

x (T, n_in) fp16 or bf16, T a multiple of 16. `formats.int4` has the layout of words. Rows (A, n, d) may hold the inputs
of their leading number: w[i, a d + c], as an output projection has them head by head.

A program owns TOKENS tokens and OUTPUTS outputs, and walks over a part of the inputs. Codes become numbers of x's dtype
in registers, rounded as `unpack` rounds them, so both ways multiply the same. Where the inputs are split, sums of the
parts are added in their order by a second kernel. Weights are read once for each TOKENS tokens. More tokens than
a measured number are worth writing the matrix out (`unpack`).
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_of, activation_reference
from dejavu_train.kernels.common.checks import check_device, check_dtype, check_shape, require
from dejavu_train.kernels.common.launch import n_sms
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.unpack import unpack_reference
from dejavu_train.kernels.formats.int4 import COLUMNS_PER_WORD, Int4Rows

SUM_BLOCK = 1024  # outputs of a program that adds parts


class Arrangement(StrEnum):
    """Where inputs lie in rows of 4 bits."""

    COLUMNS = "columns"
    BESIDE = "beside"  # in the columns of matrices that stand side by side
    ROWS = "rows"


@dataclass(frozen=True)
class ChunkSettings(Settings, stage="chunk"):
    """tokens, outputs, inputs: of a program's tile. flipped: the product's rows are outputs, not tokens.

    programs: of a multiprocessor, at least, by splitting the inputs.
    """

    tokens: int
    outputs: int
    inputs: int
    flipped: int
    programs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Ending:
    """What becomes of a sum: act(unit * sum + bias) * scale."""

    activation: str = "none"
    threshold: float = 0.0
    unit: float = 1.0
    scale: float = 1.0


PLAIN = Ending()


def chunk_product_reference(
    x: Tensor, weight: Int4Rows, bias: Tensor, out: Tensor, kind: Arrangement = Arrangement.COLUMNS,
    ending: Ending = PLAIN,
) -> None:  # fmt: skip
    """Plain torch: as `chunk_product`, called alike."""
    rows = unpack_reference(weight, x.dtype, kind is Arrangement.BESIDE).float()
    sums = x.float() @ (rows if kind is Arrangement.ROWS else rows.T)
    value = activation_reference(ending.unit * sums + bias.flatten().float(), ending.activation, ending.threshold)
    out.copy_(value * ending.scale)


@triton.jit
def _values(words, scales, DTYPE: tl.constexpr):
    """Numbers (R, 8 W) of words (R, W), whose scales are (R, W) or (R, 1)."""
    column = tl.arange(0, 8)
    raised = (words[:, :, None] >> (4 * (column // 2) + 16 * (column % 2))[None, None, :]) & 15
    if DTYPE == tl.float16:
        codes = (raised | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0  # 1024 + raised, exactly
        numbers = codes * scales[:, :, None]
    else:
        numbers = ((raised - 8).to(tl.float32) * scales.to(tl.float32)[:, :, None]).to(DTYPE)
    return tl.reshape(numbers, (words.shape[0], 8 * words.shape[1]))


@triton.jit
def _ended(sums, bias, outputs, there, unit, scale, ACT: tl.constexpr, THRESHOLD: tl.constexpr):
    offset = tl.load(bias + outputs, mask=there, other=0.0).to(tl.float32)
    return ACT(unit * sums + offset, THRESHOLD) * scale


@triton.jit
def _chunk_kernel(
    x, words, scales, bias, out, n_tokens, n_out, n_in, width, group, n_groups, part, unit, scale,
    ACT: tl.constexpr, THRESHOLD: tl.constexpr, KIND: tl.constexpr, ONE_SCALE: tl.constexpr, SPLIT: tl.constexpr,
    FLIPPED: tl.constexpr, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.program_id(1) * T + tl.arange(0, T)
    begin = tl.program_id(2) * part
    end = tl.minimum(n_in, begin + part)
    if FLIPPED:
        sums = tl.zeros((N, T), tl.float32)
    else:
        sums = tl.zeros((T, N), tl.float32)
    for first in range(begin, end, K):
        k = first + tl.arange(0, K)
        asked = (t < n_tokens)[:, None] & (k < end)[None, :]
        given = tl.load(x + t[:, None] * n_in + k[None, :], mask=asked, other=0.0)
        if KIND == "rows":
            row, column = k.to(tl.int64)[:, None], tl.program_id(0) * (N // 8) + tl.arange(0, N // 8)[None, :]
            there, known = (k < end)[:, None] & (8 * column < n_out), (k < end)[:, None]
            one = tl.program_id(0) * N // group
        else:
            w = first // 8 + tl.arange(0, K // 8)[None, :]
            row, column, one = n.to(tl.int64)[:, None], w, first // group
            if KIND == "beside":
                row, column, one = row + w // (width // 8) * n_out, w % (width // 8), first % width // group
            there, known = (n < n_out)[:, None] & (8 * w < end), (n < n_out)[:, None]
        word = tl.load(words + row * (width // 8) + column, mask=there, other=0)
        if ONE_SCALE:
            if KIND == "beside":
                row = n.to(tl.int64)[:, None] + first // width * n_out
            step = tl.load(scales + row * n_groups + one, mask=known, other=0.0)
        else:
            step = tl.load(scales + row * n_groups + 8 * column // group, mask=there, other=0.0)
        numbers = _values(word, step, x.dtype.element_ty)
        if FLIPPED:
            if KIND == "rows":
                numbers = tl.trans(numbers)
            sums = tl.dot(numbers, tl.trans(given), sums)
        else:
            if KIND != "rows":
                numbers = tl.trans(numbers)
            sums = tl.dot(given, numbers, sums)
    if FLIPPED:
        sums = tl.trans(sums)
    at = t.to(tl.int64)[:, None] * n_out + n[None, :]
    inside = (t < n_tokens)[:, None] & (n < n_out)[None, :]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * n_tokens * n_out + at, sums, mask=inside)
    else:
        value = _ended(sums, bias, n[None, :], (n < n_out)[None, :], unit, scale, ACT, THRESHOLD)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts_kernel(
    parts, bias, out, size, n_out, unit, scale, ACT: tl.constexpr, THRESHOLD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    value = _ended(sums, bias, at % n_out, at < size, unit, scale, ACT, THRESHOLD)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


def chunk_product(
    x: Tensor, weight: Int4Rows, bias: Tensor, out: Tensor, kind: Arrangement = Arrangement.COLUMNS,
    ending: Ending = PLAIN,
) -> None:  # fmt: skip
    """Products of tokens x (T, n_in) with all rows of a matrix, written to out (T, n_out) of any dtype.

    Args:
        weight: rows with any leading dimensions, which count as one. Matrices (A, n, d) where ``kind`` is "beside".
        bias: (n_out,) with any dimensions.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a device without kernels.
    """
    check_device("x", x)
    check_dtype("x", x, (torch.float16, torch.bfloat16))
    *leading, columns = weight.shape
    n_rows, groups, group = weight.words.numel() // (columns // COLUMNS_PER_WORD), weight.scales.shape[-1], weight.group
    require(group * groups == columns, f"{groups} groups do not divide {columns} columns")
    require(group % COLUMNS_PER_WORD == 0, f"a scale of {group} columns, expected a multiple of 8: a word's have one")
    n_out, n_in = n_rows, columns
    if kind is Arrangement.ROWS:
        n_out, n_in = columns, n_rows
    elif kind is Arrangement.BESIDE:
        n_out, n_in = leading[-1], columns * (n_rows // leading[-1])
    tokens = len(x)
    check_shape("x", x, tokens, n_in)
    check_shape("out", out, tokens, n_out)
    require(bias.numel() == n_out, f"a bias of {bias.numel()} numbers, expected {n_out}")
    settings = ChunkSettings.find("int4", x.device, tokens=tokens, out=n_out, rows=kind is Arrangement.ROWS)
    tile_n, tile_k = settings.outputs, min(settings.inputs, max(16, columns & -columns))
    tile_t = min(settings.tokens, max(16, triton.next_power_of_2(tokens)))
    whole = columns % tile_k == 0 and group % tile_k == 0
    one_scale = (
        group % tile_n == 0 if kind is Arrangement.ROWS else whole or kind is not Arrangement.BESIDE and groups == 1
    )
    grid = triton.cdiv(n_out, tile_n), triton.cdiv(tokens, tile_t)
    wanted = triton.cdiv(settings.programs * n_sms(x.device), grid[0] * grid[1])
    part = triton.cdiv(triton.cdiv(n_in, tile_k), wanted) * tile_k
    parts = triton.cdiv(n_in, part)
    to = out if parts == 1 else torch.empty(parts, tokens, n_out, dtype=torch.float32, device=x.device)
    numbers = ending.unit, ending.scale
    constants = {"ACT": activation_of(ending.activation, ending.threshold), "THRESHOLD": ending.threshold}
    _chunk_kernel[(*grid, parts)](
        x, weight.words, weight.scales, bias, to, tokens, n_out, n_in, columns, group, groups, part, *numbers,
        **constants, KIND=str(kind), ONE_SCALE=one_scale, SPLIT=parts > 1, FLIPPED=bool(settings.flipped), T=tile_t,
        N=tile_n, K=tile_k, num_warps=settings.warps, num_stages=settings.stages,
    )  # fmt: skip
    if parts > 1:
        size = tokens * n_out
        _add_parts_kernel[(triton.cdiv(size, SUM_BLOCK),)](
            to, bias, out, size, n_out, *numbers, **constants, PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4
        )  # fmt: skip
