"""The output projection over the selected heads: y[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] mixed[b, j].

j runs over the columns of the selected heads. mixed (B, h * head_dim) fp32 is zero elsewhere. w (d, h * head_dim).
A head's columns of a row are 256 contiguous bytes at head dim 128, so the rows need no transposing: every output has
one owner, and there are no partial sums, no atomics and no second pass. bias and residual cost nothing.
Two kernels: rows in registers, or, where a selection leaves many rows (d near 9216), tiles of 16 outputs on the tensor
cores, a selected head a step of a cp.async pipeline. These round mixed to the weights' dtype, as the reference does.

The attention kernel lets this one start before it has waited for q/k/v itself. What is older than q/k/v is read before
the wait: selection, bias, residual. So a program's first columns are loaded into registers while q/k/v ends and
attention runs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.attention.out_projection_int4 import (
    HeadRowSettings,
    project_head_rows,
    project_head_rows_reference,
)
from dejavu_train.kernels.common.checks import check_device, check_numbers, check_shape
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Matrix
from dejavu_train.kernels.stages.select import selected_heads

VECTOR = 8  # neighbouring columns that one thread sums on its own


@dataclass(frozen=True)
class ProjectSettings(Settings, stage="project"):
    """Measured in whole steps under the carveout of `launch.share_carveout`. rows: of a program.

    stages: of the pipeline over heads, in tiles on the tensor cores. 0 = rows in registers. width: columns of a step of
    those, at most.
    """

    rows: int
    width: int
    stages: int
    warps: int


def project_heads_reference(
    mixed: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
    settings: object = None,
) -> None:
    """Plain torch."""
    if weight.format is Format.INT4:
        project_head_rows_reference(mixed, weight, bias, residual, selection, out)
        return
    numbers = weight.numbers
    out.copy_(torch.nn.functional.linear(mixed.to(numbers.dtype), numbers).float() + bias.float() + residual)


@triton.jit
def _step(
    at, inside, order, begin, n, HEAD_DIM: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr
):
    """(weights (ROWS, BLOCK), their columns (BLOCK,)) of the n selected columns from the begin-th on."""
    j = begin + tl.arange(0, BLOCK)
    if ALL:
        columns = j
    else:
        head = tl.gather(order, tl.minimum(j // HEAD_DIM, order.shape[0] - 1), 0)
        # RUN neighbouring columns lie in one head and side by side: what lets a thread load 16 bytes at once.
        columns = tl.max_contiguous(tl.multiple_of(head * HEAD_DIM + j % HEAD_DIM, RUN), RUN)
    w = tl.load(
        at + columns[None, :], mask=(j < n)[None, :] & inside[:, None], other=0.0, eviction_policy="evict_first"
    )
    return w, columns


@triton.jit
def _project_kernel(
    mixed,
    weight,
    bias,
    residual,
    row_bits,
    out,
    n_rows,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program owns ROWS outputs and walks over the selected columns, the next ones on their way before these are used.
    # All but `mixed` is old enough to be read before the wait.
    WIDTH: tl.constexpr = H * HEAD_DIM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * WIDTH
    c = tl.arange(0, BLOCK)
    if ALL:
        order = c
        n = WIDTH
    else:
        order, n_heads = selected_heads(row_bits, H, H_TILE)
        n = n_heads * HEAD_DIM
    w, columns = _step(at, inside, order, 0, n, HEAD_DIM, RUN, BLOCK, ALL)
    offset = tl.load(bias + rows, mask=inside, other=0.0)
    base = tl.load(residual + rows, mask=inside, other=0.0, cache_modifier=".cg")
    wait_for_predecessor(PDL)
    acc = tl.zeros((ROWS, BLOCK // VECTOR), tl.float32)
    for begin in range(0, n, BLOCK):
        x = tl.load(mixed + columns, mask=begin + c < n, other=0.0)
        coming, next_columns = _step(at, inside, order, begin + BLOCK, n, HEAD_DIM, RUN, BLOCK, ALL)
        products = tl.reshape(w.to(tl.float32) * x[None, :], (ROWS, BLOCK // VECTOR, VECTOR))
        acc += tl.sum(products, 2)
        w = coming
        columns = next_columns
    value = tl.sum(acc, 1) + offset.to(tl.float32) + base
    tl.store(out + rows, value, mask=inside)


@triton.jit
def _project_tiles_kernel(
    mixed,
    weight,
    bias,
    residual,
    row_bits,
    out,
    n_rows,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = H * HEAD_DIM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * WIDTH
    c = tl.arange(0, HEAD_TILE)
    heads = tl.arange(0, H_TILE)
    b = tl.arange(0, 8)  # the product's narrowest second side; only its first column exists
    order, n = selected_heads(row_bits, H, H_TILE)
    offset = tl.load(bias + rows, mask=inside, other=0.0)
    base = tl.load(residual + rows, mask=inside, other=0.0, cache_modifier=".cg")
    wait_for_predecessor(PDL)
    y = tl.zeros((ROWS, 8), tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        column = tl.sum(tl.where(heads == i, order, 0)) * HEAD_DIM + c
        w = tl.load(at + column[None, :], mask=inside[:, None] & (c < HEAD_DIM)[None, :], other=0.0)
        x_ptrs = mixed + b[None, :] * WIDTH + column[:, None]  # as if of a batch, so that columns lie side by side
        x = tl.load(x_ptrs, mask=(b == 0)[None, :] & (c < HEAD_DIM)[:, None], other=0.0)
        y = tl.dot(w, x.to(w.dtype), y, input_precision="ieee")
    tl.store(out + rows, tl.sum(y, 1) + offset.to(tl.float32) + base, mask=inside)


def project_heads(
    mixed: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
    settings: ProjectSettings | HeadRowSettings | None = None,
) -> None:
    """mixed (B, h * head_dim), residual and out (B, d) fp32, weight (d, h * head_dim). selection None = all heads.

    One row runs in one kernel, bitwise deterministic. Several as a matrix product over all columns: the union of the
    heads of several rows leaves little out. Selection and residual must be older than the two launches before this one.
    4-bit rows lie head by head, Int4Rows (h, d, head_dim), and take mixed in fp16: see `out_projection_int4`. Errors:
    shapes, a CPU tensor.
    """
    if weight.format is Format.INT4:
        if settings is not None and not isinstance(settings, HeadRowSettings):
            raise ValueError("4-bit rows need HeadRowSettings")
        project_head_rows(mixed, weight, bias, residual, selection, out, pdl, settings)
        return
    if isinstance(settings, HeadRowSettings):
        raise ValueError("HeadRowSettings are for 4-bit rows")
    check_device("mixed", mixed)
    batch, width = mixed.shape
    d = weight.shape[0]
    numbers = check_numbers("weight", weight, d, width)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    if batch > 1:
        dense_add(mixed, weight, bias, residual, out, pdl=pdl)
        return
    n_heads = 1 if selection is None else selection.n
    pdl = use_pdl(pdl, mixed.device)
    settings = settings or ProjectSettings.find(weight.format, mixed.device, d=d, all=selection is None)
    head_dim = width // n_heads
    if settings.stages:
        if selection is None:
            raise ValueError("tiles of heads need a selection of heads")
        _project_tiles_kernel[(triton.cdiv(d, settings.rows),)](
            mixed,
            numbers,
            bias,
            residual,
            selection.row_bits,
            out,
            d,
            H=n_heads,
            H_TILE=triton.next_power_of_2(n_heads),
            HEAD_DIM=head_dim,
            HEAD_TILE=triton.next_power_of_2(head_dim),
            ROWS=settings.rows,
            STAGES=settings.stages,
            PDL=pdl,
            num_warps=settings.warps,
            launch_pdl=pdl,
        )
        return
    block = min(settings.width, triton.next_power_of_2(width))
    _project_kernel[(triton.cdiv(d, settings.rows),)](
        mixed,
        numbers,
        bias,
        residual,
        mixed if selection is None else selection.row_bits,
        out,
        d,
        H=n_heads,
        H_TILE=triton.next_power_of_2(n_heads),
        HEAD_DIM=head_dim,
        RUN=head_dim & -head_dim,
        ROWS=settings.rows,
        BLOCK=block,
        VECTOR=VECTOR,
        ALL=selection is None,
        PDL=pdl,
        num_warps=min(settings.warps, max(1, settings.rows * block // (32 * VECTOR))),
        launch_pdl=pdl,
    )
