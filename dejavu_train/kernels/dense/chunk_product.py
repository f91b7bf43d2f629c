"""Products of a chunk of tokens with 4-bit rows, which are unpacked where they are multiplied:

    y[t, i] = act(unit sum_j x[t, j] w[i, j] + bias[i]) scale        w[i, j] = code[i, j] * scale[i, j / group], rounded
    y[t, i] = act(unit sum_j x[t, j] w[j, i] + bias[i]) scale        where rows are inputs, as those of down are

x (T, n_in) fp16. `formats.int4` has the layout of words. Rows (A, n, d) may hold the inputs of their leading number:
w[i, a d + c], as an output projection has them head by head.

A program owns TOKENS tokens and some outputs, and walks over a part of the inputs. Codes become fp16 numbers in
registers, rounded as `unpack` rounds them, so both ways multiply the same. They are the left operand of the tensor
cores, whose lane (g, t) = (lane / 4, lane % 4) takes pairs of columns of the rows g and g + 8. A lane unpacks whole
words, so that no number moves between lanes:

    rows are outputs    32 columns, four words of four pairs each, are taken as (pair, word). x is put in that order
    rows are inputs     32 words, (warp, g), are 256 outputs in the order (pair, warp, half, g), and stored from it

Where the inputs are split, a second kernel adds the parts in their order. Weights are read once for each TOKENS tokens.
More tokens than a measured number are worth writing the matrix out (`unpack`).
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
LANE_COLUMNS = 32  # columns whose words four lanes have
ROW_OUTPUTS = 256  # outputs of a program where rows are inputs


class Arrangement(StrEnum):
    """Where inputs lie in rows of 4 bits."""

    COLUMNS = "columns"
    BESIDE = "beside"  # in the columns of matrices that stand side by side
    ROWS = "rows"


@dataclass(frozen=True)
class ChunkSettings(Settings, stage="chunk"):
    """tokens, outputs, inputs: of a program's tile. Outputs are `ROW_OUTPUTS` where rows are inputs.

    programs: of a multiprocessor, at least, by splitting the inputs.
    """

    tokens: int
    outputs: int
    inputs: int
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
def _halves(words, SHIFT: tl.constexpr):
    """1024 plus the raised codes of a pair of columns, (.., 2) fp16."""
    raised = ((words >> SHIFT) & 0x000F000F) | 0x64006400
    low = raised.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, (raised >> 16).to(tl.int16).to(tl.float16, bitcast=True))


@triton.jit
def _numbers(words, scales):
    """fp16 of words (R, W): (R, W, 2, 2, 2), column 2 i + s of a word at [s, i % 2, i / 2]."""
    raised = tl.join(tl.join(_halves(words, 0), _halves(words, 4)), tl.join(_halves(words, 8), _halves(words, 12)))
    return (raised - 1032.0) * scales[:, :, None, None, None]


@triton.jit
def _ended(sums, bias, outputs, there, unit, scale, ACT: tl.constexpr, THRESHOLD: tl.constexpr):
    offset = tl.load(bias + outputs, mask=there, other=0.0).to(tl.float32)
    return ACT(unit * sums + offset, THRESHOLD) * scale


@triton.jit
def _chunk_kernel(
    x, words, scales, bias, out, n_tokens, n_out, n_in, width, group, n_groups, part, unit, scale,
    ACT: tl.constexpr, THRESHOLD: tl.constexpr, KIND: tl.constexpr, ONE_SCALE: tl.constexpr, SPLIT: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * T + tl.arange(0, T)
    begin = tl.program_id(2) * part
    end = tl.minimum(n_in, begin + part)
    sums = tl.zeros((N, T), tl.float32)
    for first in range(begin, end, K):
        k = first + tl.arange(0, K)
        asked = (t < n_tokens)[:, None] & (k < end)[None, :]
        given = tl.load(x + t[:, None] * n_in + k[None, :], mask=asked, other=0.0)
        if KIND == "rows":
            row, column = k.to(tl.int64)[:, None], tl.program_id(0) * (N // 8) + tl.arange(0, N // 8)[None, :]
            there = (k < end)[:, None] & (8 * column < n_out)
        else:
            row = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)[:, None]
            column = first // 8 + tl.arange(0, K // 8)[None, :]
            there = (row < n_out) & (8 * column < end)
            if KIND == "beside":
                row, column = row + column // (width // 8) * n_out, column % (width // 8)
        word = tl.load(words + row * (width // 8) + column, mask=there, other=0)
        if ONE_SCALE:
            row = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)[:, None]
            known = row < n_out
            if KIND == "beside":
                row += first // width * n_out
            step = tl.load(scales + row * n_groups + first % width // group, mask=known, other=0.0)
        else:
            step = tl.load(scales + row * n_groups + 8 * column // group, mask=there, other=0.0)
        numbers = _numbers(word, step)
        if KIND == "rows":
            numbers = tl.permute(tl.reshape(numbers, (K, N // 64, 8, 2, 2, 2)), (5, 4, 1, 3, 2, 0))
        else:
            numbers = tl.permute(tl.reshape(numbers, (N, K // 32, 4, 2, 2, 2)), (0, 1, 5, 4, 2, 3))
        sums = tl.dot(tl.reshape(numbers, (N, K)), tl.trans(given), sums)
    n = tl.arange(0, N)
    if KIND == "rows":
        n = 8 * (n // 16 % (N // 64) * 8 + n % 8) + 2 * (n // (N // 4) % 2 + 2 * (n // (N // 2))) + n // 8 % 2
    n += tl.program_id(0) * N
    at = t.to(tl.int64)[None, :] * n_out + n[:, None]
    inside = (t < n_tokens)[None, :] & (n < n_out)[:, None]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * n_tokens * n_out + at, sums, mask=inside)
    else:
        value = _ended(sums, bias, n[:, None], (n < n_out)[:, None], unit, scale, ACT, THRESHOLD)
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


def in_lane_order(x: Tensor) -> Tensor:
    """x (T, n) fp16 with each 32 columns, (word, pair, 2), in the order (pair, word, 2)."""
    pairs = x.view(torch.int32).view(len(x), -1, 4, 4)
    return pairs.transpose(2, 3).contiguous().view(torch.float16).view(x.shape)


def multiplies(weight: Int4Rows, dtype: torch.dtype, kind: Arrangement) -> bool:
    """Whether `chunk_product` takes a matrix for tokens of a dtype."""
    *leading, columns = weight.shape
    inputs = columns * (leading[0] if kind is Arrangement.BESIDE else 1)
    return dtype == torch.float16 and (kind is Arrangement.ROWS or inputs % LANE_COLUMNS == 0)


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
    check_dtype("x", x, (torch.float16,))
    *leading, columns = weight.shape
    n_rows, groups, group = weight.words.numel() // (columns // COLUMNS_PER_WORD), weight.scales.shape[-1], weight.group
    require(group * groups == columns, f"{groups} groups do not divide {columns} columns")
    require(group % COLUMNS_PER_WORD == 0, f"a scale of {group} columns, expected a multiple of 8: a word's have one")
    n_out, n_in = n_rows, columns
    if kind is Arrangement.ROWS:
        n_out, n_in = columns, n_rows
    elif kind is Arrangement.BESIDE:
        n_out, n_in = leading[-1], columns * (n_rows // leading[-1])
    require(multiplies(weight, x.dtype, kind), f"{n_in} inputs in words, expected a multiple of {LANE_COLUMNS}")
    tokens, by_row = len(x), kind is Arrangement.ROWS
    check_shape("x", x, tokens, n_in)
    check_shape("out", out, tokens, n_out)
    require(bias.numel() == n_out, f"a bias of {bias.numel()} numbers, expected {n_out}")
    settings = ChunkSettings.find("int4", x.device, tokens=tokens, rows=by_row)
    tile_n, tile_k = ROW_OUTPUTS if by_row else settings.outputs, settings.inputs
    tile_t = min(settings.tokens, max(16, triton.next_power_of_2(tokens)))
    grid = triton.cdiv(n_out, tile_n), triton.cdiv(tokens, tile_t)
    wanted = max(1, settings.programs * n_sms(x.device) // (grid[0] * grid[1]))
    part = triton.cdiv(triton.cdiv(n_in, tile_k), wanted) * tile_k
    parts = triton.cdiv(n_in, part)
    to = out if parts == 1 else torch.empty(parts, tokens, n_out, dtype=torch.float32, device=x.device)
    numbers = ending.unit, ending.scale
    constants = {"ACT": activation_of(ending.activation, ending.threshold), "THRESHOLD": ending.threshold}
    _chunk_kernel[(*grid, parts)](
        x if by_row else in_lane_order(x), weight.words, weight.scales, bias, to, tokens, n_out, n_in, columns, group,
        groups, part, *numbers, **constants, KIND=str(kind), ONE_SCALE=not by_row and group % tile_k == 0,
        SPLIT=parts > 1, T=tile_t, N=tile_n, K=tile_k, num_warps=settings.warps, num_stages=settings.stages,
    )  # fmt: skip
    if parts > 1:
        size = tokens * n_out
        _add_parts_kernel[(triton.cdiv(size, SUM_BLOCK),)](
            to, bias, out, size, n_out, *numbers, **constants, PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4
        )  # fmt: skip
