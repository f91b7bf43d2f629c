# mypy: disable-error-code="assignment"
"""Two to eight inputs times 4-bit rows, which are read once and as codes.

    y[b, i] = act(sum_j code[i, j] scale[i, j // group] x[b, j] + bias[i])           `int4_linear`, weight (n, d)
    y[b, i] = sum_h sum_j code[h, i, j] scale[h, i] x[b, h head_dim + j]             `int4_by_head`, (h, d, head_dim)

x (B, .) fp16; sums in fp32. The first is a program for 16 rows, `int4_mma.int4_tile` with an input in each column of B:
products are exact. The second turns codes into fp16 numbers, rounded, tile by tile in front of a `tl.dot` that the
compiler's pipeline feeds; programs share out the heads, and their sums in fp32 are added up in a fixed order. fc2,
whose rows are neurons, has a kernel of its own (`int4_fc2`). More inputs than eight are worth writing the matrix
out once (`int4_numbers`).
"""

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_dtype, check_shape
from kernels.common.int4 import Int4Rows
from kernels.common.int4_mma import int4_tile, tile_bytes
from kernels.common.lane_queue import lane_queue
from kernels.common.launch import use_pdl, wait_for_predecessor

MOST = 8  # inputs
COLUMNS = tl.constexpr(MOST)
ROWS = 16  # of a program of `int4_linear`, and inputs of a dot, which takes no fewer
SPLITS = 8  # of the heads of `int4_by_head`


def int4_linear_reference(x: Tensor, weight: Int4Rows, bias: Tensor | None, activation: str) -> Tensor:
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.dequantised(wide).flatten(0, -2).T
    if bias is not None:
        y = y + bias
    return y.relu() if activation == "relu" else y


def int4_by_head_reference(x: Tensor, weight: Int4Rows) -> Tensor:
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n_heads, _, head_dim = weight.shape
    return torch.einsum("bhj,hij->bi", x.to(wide).view(-1, n_heads, head_dim), weight.dequantised(wide))


def takes(weight: Tensor | Int4Rows, batch: int) -> TypeGuard[Int4Rows]:
    """Whether these kernels multiply so many inputs with this matrix."""
    return isinstance(weight, Int4Rows) and batch <= MOST and weight.words.shape[:-1].numel() >= ROWS


@triton.jit
def _linear_kernel(
    x,
    words,
    scales,
    bias,
    y,
    n_rows,
    batch,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    line = tl.minimum(tl.program_id(0) * 16, n_rows - 16)  # the last program shares rows with the one before
    its = tl.minimum(tl.arange(0, L) % 32 // 4, batch - 1)
    queue = lane_queue(tl.arange(0, L), tile_bytes(D // 8, GROUP, L, STEPS, COLUMNS))
    values = int4_tile(queue, words, scales, line, x + its.to(tl.int64) * (D // 2), D // 8, GROUP, L, STEPS, COLUMNS)
    rows = line + tl.arange(0, 16)
    if HAS_BIAS:
        values += tl.load(bias + rows).to(tl.float32)[:, None]
    if RELU:
        values = tl.where(values <= 0, 0.0, values)  # keeps a NaN
    b = tl.arange(0, 8)
    at = y + b.to(tl.int64)[None, :] * n_rows + rows[:, None]
    tl.store(at, values.to(y.dtype.element_ty), mask=(b < batch)[None, :])


def int4_linear(
    x: Tensor, weight: Int4Rows, bias: Tensor | None = None, activation: str = "none", pdl: bool = False
) -> Tensor:
    """x (B, d) fp16, weight (..., d) of at least 16 rows -> (B, n) fp16. Errors: shapes, dtypes, a CPU tensor."""
    check_device("x", x)
    batch, d = x.shape
    n = weight.words.shape[:-1].numel()
    weight.check("weight", (*weight.shape[:-1], d), x)
    _check_inputs(x, batch, d)
    if n < ROWS:
        raise ValueError(f"weight has {n} rows, expected at least {ROWS}")
    if activation not in ("none", "relu"):
        raise ValueError(f"activation must be none or relu, got {activation}")
    y = torch.empty(batch, n, dtype=torch.float16, device=x.device)
    warps, steps = (1, 2) if INTERPRET else (4, 2)
    pdl = use_pdl(pdl, x.device)
    _linear_kernel[(triton.cdiv(n, ROWS),)](
        x.view(torch.int32),
        weight.words,
        weight.scales,
        x if bias is None else bias,
        y,
        n,
        batch,
        D=d,
        GROUP=weight.group,
        L=32 * warps,
        STEPS=steps,
        HAS_BIAS=bias is not None,
        RELU=activation == "relu",
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return y


@triton.jit
def _numbers(words, scale):
    """fp16 numbers (R, 8 W) of words (R, W) whose scales (R, W) are fp16: code + 1024 lies in the bits as it is."""
    column = tl.arange(0, 8)
    shift = 4 * (column // 2) + 16 * (column % 2)
    bits = ((words[:, :, None] >> shift[None, None, :]) & 15) | 0x6400
    numbers = (bits.to(tl.int16).to(tl.float16, bitcast=True) - 1032.0) * scale[:, :, None]
    return tl.reshape(numbers, (words.shape[0], 8 * words.shape[1]))


@triton.jit
def _by_head_kernel(
    x,
    words,
    scales,
    partials,
    n_rows,
    share,
    batch,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    b = tl.arange(0, 16)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, W)
    column = tl.arange(0, 8 * W)
    mask = (row < n_rows)[:, None] & (word < HEAD_DIM // 8)[None, :]
    first = tl.program_id(1) * share
    sums = tl.zeros((16, ROWS), tl.float32)
    for head in tl.range(first, tl.minimum(first + share, H), num_stages=STAGES):
        line = (head * n_rows + row).to(tl.int64)
        w = tl.load(words + line[:, None] * (HEAD_DIM // 8) + word[None, :], mask=mask, other=0)
        s = tl.load(scales + line, mask=row < n_rows, other=0.0)
        own = (b < batch)[:, None] & (column < HEAD_DIM)[None, :]
        its = tl.load(x + b[:, None] * (H * HEAD_DIM) + head * HEAD_DIM + column[None, :], mask=own, other=0.0)
        numbers = _numbers(w, tl.broadcast_to(s[:, None], (ROWS, W)))
        sums = tl.dot(its, tl.trans(numbers), sums)
    at = partials + (tl.program_id(1) * batch + b)[:, None] * n_rows + row[None, :]
    tl.store(at, sums, mask=(b < batch)[:, None] & (row < n_rows)[None, :])


def int4_by_head(x: Tensor, weight: Int4Rows, pdl: bool = False) -> Tensor:
    """x (B, h * head_dim) fp16, weight (h, d, head_dim) with a scale a row -> (B, d) fp32.

    Errors: shapes, dtypes, a CPU tensor.
    """
    check_device("x", x)
    batch = len(x)
    n_heads, d, head_dim = weight.shape
    weight.check("weight", (n_heads, d, head_dim), x)
    check_shape("weight.scales", weight.scales, n_heads, d, 1)
    _check_inputs(x, batch, n_heads * head_dim)
    share = triton.cdiv(n_heads, SPLITS)
    partials = torch.empty(triton.cdiv(n_heads, share), batch, d, dtype=torch.float32, device=x.device)
    rows = 16 if INTERPRET else 64
    pdl = use_pdl(pdl, x.device)
    _by_head_kernel[(triton.cdiv(d, rows), len(partials))](
        x,
        weight.words,
        weight.scales,
        partials,
        d,
        share,
        batch,
        H=n_heads,
        HEAD_DIM=head_dim,
        W=max(2, triton.next_power_of_2(head_dim // 8)),
        ROWS=rows,
        STAGES=4,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return partials.sum(0)


def _check_inputs(x: Tensor, batch: int, n: int) -> None:
    check_dtype("x", x, (torch.float16,))
    check_shape("x", x, batch, n)
    if batch > MOST:
        raise ValueError(f"{batch} inputs, expected at most {MOST}")
