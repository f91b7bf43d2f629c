"""The output projection over the selected heads: y[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] mixed[b, j].

j runs over the columns of the selected heads; mixed (B, h * head_dim) fp32 is zero elsewhere; w (d, h * head_dim).
A head's columns of a row are 256 contiguous bytes at head dim 128, so the rows need no transposing: every output has
one owner, and there are no partial sums, no atomics and no second pass; bias and residual cost nothing.

The selection may be read before the wait for the attention kernel: it was written two launches earlier or more, and
the launch before this one lets this one start only after it has waited for everything before it. So the rows are asked
of the L2 while attention, which leaves the memory idle, still runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, n_sms, start_dependents, two_tiles, use_pdl
from kernels.batched import dense_add
from kernels.dense_gemv import RowSettings, load_rows
from kernels.select import Selection

PREFETCH_BYTES = 24 * 2**20  # a part of the L2, so that nothing else is driven out
GROUP = 8  # heads in flight


def project_settings(d: int) -> RowSettings:
    """Launch settings by width with all heads, from benchmarks/sparse_attention.py --sweep."""
    return RowSettings(6, 4, 8) if d <= 4096 else RowSettings(6, 1, 4)


def selected_settings(d: int) -> RowSettings:
    """Launch settings by width with a selection: rows of a program and warps."""
    return RowSettings(0, 8, 8)


def project_heads_reference(mixed, weight, bias, residual, selection, order, out, pdl=False) -> None:
    """Plain torch."""
    out.copy_(torch.nn.functional.linear(mixed.to(weight.dtype), weight).float() + bias.float() + residual)


@triton.jit
def _prefetch(pointers, wanted):
    """Ask the L2 for the 128-byte lines at `pointers` where `wanted`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _project_kernel(
    mixed,
    weight,
    bias,
    residual,
    out,
    n_rows,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    # All heads: rows as in `dense_gemv`, the first ones before the wait.
    c0 = tl.arange(0, D0)
    c1 = c0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    w0, w1 = load_rows(weight, first, n_rows, c0, c1, D, D0, D1, ROWS)
    start_dependents(PDL)
    x0 = tl.load(mixed + c0)
    x1 = x0
    if D1 > 0:
        x1 = tl.load(mixed + c1, mask=c1 < D, other=0.0)
    for line in range(first, n_rows, step):
        next0, next1 = load_rows(weight, line + step, n_rows, c0, c1, D, D0, D1, ROWS)
        value = tl.sum(w0.to(tl.float32) * x0[None, :], 1)
        if D1 > 0:
            value += tl.sum(w1.to(tl.float32) * x1[None, :], 1)
        lines = line + tl.arange(0, ROWS)
        inside = lines < n_rows
        value += tl.load(bias + lines, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(residual + lines, mask=inside, other=0.0)
        tl.store(out + lines, value, mask=inside)
        w0 = next0
        w1 = next1


@triton.jit
def _project_selected_kernel(
    mixed,
    weight,
    bias,
    residual,
    row_bits,
    order,
    out,
    n_rows,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program owns ROWS outputs and walks over the selected heads, GROUP of them at a time.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    at = weight + rows.to(tl.int64)[:, None] * WIDTH
    if PREFETCH > 0:
        column = tl.arange(0, LINES) * LINE
        near = column < PREFETCH
        bits = tl.load(row_bits + tl.minimum(column // HEAD_DIM, H - 1), mask=near, other=0, cache_modifier=".cg")
        _prefetch(at + column[None, :], inside[:, None] & ((bits != 0) & near)[None, :])
    start_dependents(PDL)
    n = tl.load(order + H)
    c = tl.arange(0, HEAD_TILE)
    acc = tl.zeros((ROWS, HEAD_TILE), tl.float32)
    for j in range(0, n, GROUP):
        for k in tl.static_range(GROUP):
            head = tl.load(order + tl.minimum(j + k, n - 1))
            width = tl.where(n - j - k > 0, HEAD_DIM, 0)
            columns = head * HEAD_DIM + c
            w = tl.load(at + columns[None, :], mask=inside[:, None] & (c < width)[None, :], other=0.0)
            x = tl.load(mixed + columns, mask=c < width, other=0.0)
            acc += w.to(tl.float32) * x[None, :]
    value = tl.sum(acc, 1)
    value += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + rows, mask=inside, other=0.0)
    tl.store(out + rows, value, mask=inside)


def project_heads(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    order: Tensor | None,
    out: Tensor,
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """mixed (B, h * head_dim), residual and out (B, d) fp32, weight (d, h * head_dim); selection None = all heads.

    order: (h + 1) int32, the selected heads and their number, as `qkv` writes them. One row runs in one kernel, bitwise
    deterministic; several as a matrix product over all columns: the union of the heads of several rows leaves little
    out. Errors: shapes, a CPU tensor. settings: for a selection, rows of a program and warps.
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
    pdl = use_pdl(pdl, mixed.device)
    if selection is None:
        settings = settings or project_settings(d)
        d0, d1 = two_tiles(width)
        _project_kernel[(min(n_sms(mixed.device) * settings.programs, triton.cdiv(d, settings.rows)),)](
            mixed, weight, bias, residual, out, d, D=width, D0=d0, D1=d1, ROWS=settings.rows, PDL=pdl,
            num_warps=settings.warps if d >= 2048 else 4, launch_pdl=pdl,
        )  # fmt: skip
        return
    if order is None:
        raise ValueError("a selection of heads needs their order, as qkv writes it")
    check_shape("order", order, selection.n + 1)
    settings = settings or selected_settings(d)
    head_dim = width // selection.n
    line = 128 // weight.element_size()
    columns = min(width, int(2 * PREFETCH_BYTES / (d * weight.element_size()))) if pdl else 0
    _project_selected_kernel[(triton.cdiv(d, settings.rows),)](
        mixed,
        weight,
        bias,
        residual,
        selection.row_bits,
        order,
        out,
        d,
        H=selection.n,
        HEAD_DIM=head_dim,
        HEAD_TILE=triton.next_power_of_2(head_dim),
        WIDTH=width,
        ROWS=settings.rows,
        GROUP=GROUP,
        PREFETCH=columns,
        LINES=triton.next_power_of_2(max(1, triton.cdiv(columns, line))),
        LINE=line,
        PDL=pdl,
        num_warps=settings.warps,
        launch_pdl=pdl,
    )
