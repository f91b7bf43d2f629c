"""The output projection over the selected heads: y[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] mixed[b, j].

j runs over the columns of the selected heads; mixed (B, h * head_dim) fp32 is zero elsewhere; w (d, h * head_dim).
A head's columns of a row are 256 contiguous bytes at head dim 128, so the rows need no transposing: every output has
one owner, and there are no partial sums, no atomics and no second pass; bias and residual cost nothing.
Two kernels: rows in registers, or, where a selection leaves many rows (d near 9216), tiles of 16 outputs on the tensor
cores, a selected head a step of a cp.async pipeline; these round mixed to the weights' dtype, as the reference does.

The selection's order, the bias and the residual are read before the wait for the attention kernel: they were written
two launches earlier or more, and the launch before this one lets this one start only after it has waited for
everything before it. So a program's first columns are loaded into registers while attention still runs, and what
remains afterwards waits for no list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, use_pdl
from kernels.batched import dense_add
from kernels.select import Selection

VECTOR = 8  # neighbouring columns that one thread sums on its own


@dataclass(frozen=True)
class ProjectSettings:
    """rows: of a program; width: columns of a step, at most."""

    rows: int
    width: int
    warps: int


@dataclass(frozen=True)
class HeadTileSettings:
    """rows: of a program; stages: of the pipeline over heads."""

    rows: int
    stages: int
    warps: int


def project_settings(d: int, all_heads: bool) -> ProjectSettings | HeadTileSettings:
    """Launch settings by width, measured in whole steps under the carveout of `launch.share_carveout`."""
    if 8192 <= d <= 9216 and not all_heads:
        return HeadTileSettings(16, 4, 1)
    if d <= 4096 or all_heads:
        return ProjectSettings(8, 1024, 4)
    return ProjectSettings(16 if d <= 7168 else 8, 512, 4)


def project_heads_reference(mixed, weight, bias, residual, selection, order, out, pdl=False) -> None:
    """Plain torch."""
    out.copy_(torch.nn.functional.linear(mixed.to(weight.dtype), weight).float() + bias.float() + residual)


@triton.jit
def _heads(order, begin, n, H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """The heads (BLOCK,) of the selected columns from the begin-th on, n columns in all."""
    j = begin + tl.arange(0, BLOCK)
    heads = tl.zeros_like(j)
    if not ALL:
        heads = tl.load(order + tl.minimum(j // HEAD_DIM, H), mask=j < n, other=0, cache_modifier=".cg")
    return heads


@triton.jit
def _columns(heads, begin, HEAD_DIM: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Where they lie in a row. RUN neighbours lie side by side: what lets a thread load 16 bytes at once."""
    columns = begin + tl.arange(0, BLOCK)
    if not ALL:
        columns = tl.max_contiguous(tl.multiple_of(heads * HEAD_DIM + columns % HEAD_DIM, RUN), RUN)
    return columns


@triton.jit
def _weights(at, inside, columns, begin, n, BLOCK: tl.constexpr):
    mask = (begin + tl.arange(0, BLOCK) < n)[None, :] & inside[:, None]
    return tl.load(at + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _project_kernel(
    mixed,
    weight,
    bias,
    residual,
    order,
    out,
    n_rows,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program owns ROWS outputs and walks over the selected columns, the next ones on their way before these are used,
    # and the heads of those after them. All but `mixed` is old enough to be read before the wait.
    WIDTH: tl.constexpr = H * HEAD_DIM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * WIDTH
    c = tl.arange(0, BLOCK)
    if ALL:
        n = WIDTH
    else:
        n = tl.load(order + H, cache_modifier=".cg") * HEAD_DIM
    heads = _heads(order, 0, n, H, HEAD_DIM, BLOCK, ALL)
    second = _heads(order, BLOCK, n, H, HEAD_DIM, BLOCK, ALL)
    w = _weights(at, inside, _columns(heads, 0, HEAD_DIM, RUN, BLOCK, ALL), 0, n, BLOCK)
    offset = tl.load(bias + rows, mask=inside, other=0.0)
    base = tl.load(residual + rows, mask=inside, other=0.0, cache_modifier=".cg")
    start_dependents(PDL)
    acc = tl.zeros((ROWS, BLOCK // VECTOR), tl.float32)
    for begin in range(0, n, BLOCK):
        x = tl.load(mixed + _columns(heads, begin, HEAD_DIM, RUN, BLOCK, ALL), mask=begin + c < n, other=0.0)
        after = begin + BLOCK
        coming = _weights(at, inside, _columns(second, after, HEAD_DIM, RUN, BLOCK, ALL), after, n, BLOCK)
        third = _heads(order, begin + 2 * BLOCK, n, H, HEAD_DIM, BLOCK, ALL)
        products = tl.reshape(w.to(tl.float32) * x[None, :], (ROWS, BLOCK // VECTOR, VECTOR))
        acc += tl.sum(products, 2)
        w = coming
        heads = second
        second = third
    value = tl.sum(acc, 1) + offset.to(tl.float32) + base
    tl.store(out + rows, value, mask=inside)


@triton.jit
def _project_tiles_kernel(
    mixed,
    weight,
    bias,
    residual,
    order,
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
    n = tl.load(order + H, cache_modifier=".cg")
    chosen = tl.load(order + heads, mask=heads < H, other=0, cache_modifier=".cg")
    offset = tl.load(bias + rows, mask=inside, other=0.0)
    base = tl.load(residual + rows, mask=inside, other=0.0, cache_modifier=".cg")
    start_dependents(PDL)
    y = tl.zeros((ROWS, 8), tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        column = tl.sum(tl.where(heads == i, chosen, 0)) * HEAD_DIM + c
        w = tl.load(at + column[None, :], mask=inside[:, None] & (c < HEAD_DIM)[None, :], other=0.0)
        x_ptrs = mixed + b[None, :] * WIDTH + column[:, None]  # as if of a batch, so that columns lie side by side
        x = tl.load(x_ptrs, mask=(b == 0)[None, :] & (c < HEAD_DIM)[:, None], other=0.0)
        y = tl.dot(w, x.to(w.dtype), y, input_precision="ieee")
    tl.store(out + rows, tl.sum(y, 1) + offset.to(tl.float32) + base, mask=inside)


def project_heads(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    order: Tensor | None,
    out: Tensor,
    pdl: bool = False,
    settings: ProjectSettings | HeadTileSettings | None = None,
) -> None:
    """mixed (B, h * head_dim), residual and out (B, d) fp32, weight (d, h * head_dim); selection None = all heads.

    order: (h + 1) int32, the selected heads and their number, as `qkv` writes them. One row runs in one kernel, bitwise
    deterministic; several as a matrix product over all columns: the union of the heads of several rows leaves little
    out. The residual must be older than the launch before this one.
    Errors: shapes, a CPU tensor, a selection without its order.
    """
    check_device("mixed", mixed)
    batch, width = mixed.shape
    d = weight.shape[0]
    check_shape("weight", weight, d, width)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    if batch > 1:
        dense_add(mixed, weight, bias, residual, out, pdl=pdl)
        return
    n_heads = 1 if selection is None else selection.n
    if selection is not None:
        if order is None:
            raise ValueError("a selection of heads needs their order, as qkv writes it")
        check_shape("order", order, n_heads + 1)
    pdl = use_pdl(pdl, mixed.device)
    settings = settings or project_settings(d, selection is None)
    head_dim = width // n_heads
    if isinstance(settings, HeadTileSettings):
        _project_tiles_kernel[(triton.cdiv(d, settings.rows),)](
            mixed,
            weight,
            bias,
            residual,
            order,
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
        weight,
        bias,
        residual,
        mixed if order is None else order,
        out,
        d,
        H=n_heads,
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
