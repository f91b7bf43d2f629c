"""Products of a chunk of tokens with 4-bit rows, which are unpacked where they are multiplied:

    y[t, i] = act(unit sum_j x[t, j] w[i, j] + bias[i]) scale + residual[t, i]
    y[t, i] = act(unit sum_j x[t, j] w[j, i] + bias[i]) scale + residual[t, i]    rows are inputs, as those of down
    w[i, j] = code[i, j] * scale[i, j / group], rounded

x (T, n_in) fp16. `formats.int4` has the layout of words. Rows (A, n, d) may hold the inputs of their leading number:
w[i, a d + c], as an output projection has them head by head.

A program owns TOKENS tokens and some outputs, and walks over a part of the inputs. Codes become fp16 numbers in
registers, rounded as `unpack` rounds them, so both ways multiply the same. They are the left operand of the tensor
cores. Lane (g, t) = (lane / 4, lane % 4) takes pairs of columns of the rows g and g + 8. It unpacks whole words, so
that no number moves between lanes:

    rows are outputs    32 columns, four words of four pairs each, are taken as (pair, word), and x in that order
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
from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly
from dejavu_train.kernels.common.checks import check_device, check_dtype, check_shape, check_tensor, require
from dejavu_train.kernels.common.launch import as_dependent, n_sms, wait_for_predecessor
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
    """Fate of a sum: act(unit * sum + bias) * scale."""

    activation: str = "none"
    threshold: float = 0.0
    unit: float = 1.0
    scale: float = 1.0


PLAIN = Ending()


def chunk_product_reference(
    x: Tensor, weight: Int4Rows, bias: Tensor, out: Tensor, kind: Arrangement = Arrangement.COLUMNS,
    ending: Ending = PLAIN, residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch: as `chunk_product`, called alike."""
    rows = unpack_reference(weight, x.dtype, kind is Arrangement.BESIDE).float()
    sums = x.float() @ (rows if kind is Arrangement.ROWS else rows.T)
    value = activation_reference(ending.unit * sums + bias.flatten().float(), ending.activation, ending.threshold)
    out.copy_(value * ending.scale if residual is None else value * ending.scale + residual)


@triton.constexpr_function
def _raised_asm(high):
    """PTX: two nibbles of a word, 16 bits apart, each in the number 1024. The compiler would take two instructions."""
    mask = "0x00F000F0" if high else "0x000F000F"
    return "{ .reg .b32 magic; mov.b32 magic, 0x64006400; lop3.b32 $0, $1, " + mask + ", magic, 0xEA; }"


@triton.jit
def _codes(words, HIGH: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """Codes of a pair of columns, (.., 2) fp16: those in the low nibble of a byte, or in the high one. Exact."""
    if ASM:
        raised = assembly(_raised_asm(HIGH), "=r,r", (words,), PURE=True)
    else:
        raised = (words & (0x00F000F0 if HIGH else 0x000F000F)) | 0x64006400
    low = raised.to(tl.int16).to(tl.float16, bitcast=True)
    pair = tl.join(low, (raised >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    if HIGH:
        pair = pair * 0.0625 - 72.0  # of 1024 + 16 times the raised code
    else:
        pair -= 1032.0
    return pair


@triton.jit
def _numbers(words, scales):
    """fp16 of words (R, W): (R, W, 2, 2, 2), column 2 i + s of a word at [s, i % 2, i / 2]."""
    later = words >> 8
    codes = tl.join(
        tl.join(_codes(words, False), _codes(words, True)), tl.join(_codes(later, False), _codes(later, True))
    )
    return codes * scales[:, :, None, None, None]


@triton.jit
def _store_ended(
    out, at, sums, bias, outputs, residual, inside, unit, scale, ACT: tl.constexpr, THRESHOLD: tl.constexpr
):
    """out[at] where `inside`, of sums for these outputs."""
    offset = tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    value = ACT(unit * sums + offset, THRESHOLD) * scale
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _place(own, first, end, n_out, KIND: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """(row, word of the row, whether it is there) of the words that inputs from ``first`` on have for outputs of a
    program."""
    if KIND == "rows":
        row, column = (first + tl.arange(0, K)).to(tl.int64)[:, None], own // 8 + tl.arange(0, N // 8)[None, :]
        there = (row < end) & (8 * column < n_out)
    else:
        row, column = (own + tl.arange(0, N)).to(tl.int64)[:, None], first // 8 + tl.arange(0, K // 8)[None, :]
        there = (row < n_out) & (8 * column < end)
        if KIND == "beside":
            row, column = row + column // (WIDTH // 8) * n_out, column % (WIDTH // 8)
    return row, column, there


@triton.jit
def _scales_of(
    scales, own, first, end, n_out, KIND: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Scales of these words, or where a row has one for all of them (N, 1)."""
    if KIND != "rows" and GROUP % K == 0:
        row, column, there = _place(own, first, end, n_out, KIND, WIDTH, N, 8)
    else:
        row, column, there = _place(own, first, end, n_out, KIND, WIDTH, N, K)
    at = scales + row * (WIDTH // GROUP) + column // (GROUP // 8)
    if WHOLE:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=there, other=0.0)
    return found


@triton.jit
def _chunk_kernel(
    x, words, scales, bias, residual, out, n_tokens, n_out, n_in, part, unit, scale, ACT: tl.constexpr,
    THRESHOLD: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    t = tl.program_id(1) * T + tl.arange(0, T)
    own = tl.program_id(0) * N
    begin = tl.program_id(2) * part
    end = tl.minimum(n_in, begin + part)
    sums = tl.zeros((N, T), tl.float32)
    i = tl.arange(0, K)
    if KIND != "rows":  # 32 columns, (word, pair, 2), in the order (pair, word, 2)
        i = tl.max_contiguous(tl.multiple_of(i // 32 * 32 + i // 2 % 4 * 8 + i // 8 % 4 * 2 + i % 2, 2), 2)
    for first in range(begin, end, K):
        k = first + i
        row, column, there = _place(own, first, end, n_out, KIND, WIDTH, N, K)
        at, from_x = words + row * (WIDTH // 8) + column, x + t[:, None] * n_in + k[None, :]
        if WHOLE:
            given, word = tl.load(from_x), tl.load(at)
        else:
            given = tl.load(from_x, mask=(t < n_tokens)[:, None] & (k < end)[None, :], other=0.0)
            word = tl.load(at, mask=there, other=0)
        numbers = _numbers(word, _scales_of(scales, own, first, end, n_out, KIND, WIDTH, GROUP, WHOLE, N, K))
        if KIND == "rows":
            numbers = tl.permute(tl.reshape(numbers, (K, N // 64, 8, 2, 2, 2)), (5, 4, 1, 3, 2, 0))
        else:
            numbers = tl.permute(tl.reshape(numbers, (N, K // 32, 4, 2, 2, 2)), (0, 1, 5, 4, 2, 3))
        sums = tl.dot(tl.reshape(numbers, (N, K)), tl.trans(given), sums)
    n = tl.arange(0, N)
    if KIND == "rows":
        n = 8 * (n // 16 % (N // 64) * 8 + n % 8) + 2 * (n // (N // 4) % 2 + 2 * (n // (N // 2))) + n // 8 % 2
    n += own
    at = t.to(tl.int64)[None, :] * n_out + n[:, None]
    inside = (t < n_tokens)[None, :] & (n < n_out)[:, None]
    if SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * n_tokens * n_out + at, sums, mask=inside)
    else:
        _store_ended(out, at, sums, bias, n[:, None], residual, inside, unit, scale, ACT, THRESHOLD)


@triton.jit
def _add_parts_kernel(
    parts, bias, residual, out, size, n_out, unit, scale, ACT: tl.constexpr, THRESHOLD: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    _store_ended(out, at, sums, bias, at % n_out, residual, at < size, unit, scale, ACT, THRESHOLD)


def multiplies(weight: Int4Rows, dtype: torch.dtype, kind: Arrangement) -> bool:
    """Say whether `chunk_product` takes a matrix for tokens of a dtype."""
    *leading, columns = weight.shape
    inputs = columns * (leading[0] if kind is Arrangement.BESIDE else 1)
    return dtype == torch.float16 and (kind is Arrangement.ROWS or inputs % LANE_COLUMNS == 0)


def chunk_product(
    x: Tensor, weight: Int4Rows, bias: Tensor, out: Tensor, kind: Arrangement = Arrangement.COLUMNS,
    ending: Ending = PLAIN, residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Products of tokens x (T, n_in) with all rows of a matrix, written to out (T, n_out) of any dtype.

    Args:
        weight: rows with any leading dimensions, which count as one. Matrices (A, n, d) where ``kind`` is "beside".
        bias: (n_out,) with any dimensions. residual: as out, in fp32.

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
    require(tokens > 0, "x: no tokens, expected one or more")
    for name, tensor in (("bias", bias), ("words", weight.words), ("scales", weight.scales)):
        check_shape(name, tensor, *tensor.shape)
    check_shape("x", x, tokens, n_in)
    check_shape("out", out, tokens, n_out)
    if residual is not None:
        check_tensor("residual", residual, (tokens, n_out), (torch.float32,), x)
    require(bias.numel() == n_out, f"a bias of {bias.numel()} numbers, expected {n_out}")
    settings = ChunkSettings.find("int4", x.device, tokens=tokens, rows=by_row)
    tile_n, tile_k = ROW_OUTPUTS if by_row else settings.outputs, settings.inputs
    tile_t = min(settings.tokens, max(16, triton.next_power_of_2(tokens)))
    grid = triton.cdiv(n_out, tile_n), triton.cdiv(tokens, tile_t)
    wanted = max(1, settings.programs * n_sms(x.device) // (grid[0] * grid[1]))
    part = triton.cdiv(triton.cdiv(n_in, tile_k), wanted) * tile_k
    parts = triton.cdiv(n_in, part)
    to = out if parts == 1 else torch.empty(parts, tokens, n_out, dtype=torch.float32, device=x.device)
    constants = {"ACT": activation_of(ending.activation, ending.threshold), "THRESHOLD": ending.threshold}
    constants |= as_dependent(True, x.device)
    whole = tokens % tile_t == n_out % tile_n == n_in % tile_k == 0
    _chunk_kernel[(*grid, parts)](
        x, weight.words, weight.scales, bias, residual, to, tokens, n_out, n_in, part, ending.unit, ending.scale,
        KIND=str(kind), WIDTH=columns, GROUP=group, WHOLE=whole, SPLIT=parts > 1, T=tile_t, N=tile_n, K=tile_k,
        num_warps=settings.warps, num_stages=settings.stages, **constants,
    )  # fmt: skip
    if parts > 1:
        size = tokens * n_out
        _add_parts_kernel[(triton.cdiv(size, SUM_BLOCK),)](
            to, bias, residual, out, size, n_out, ending.unit, ending.scale, PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4,
            **constants,
        )  # fmt: skip
