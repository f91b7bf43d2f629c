"""The output projection over the selected heads: y[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] mixed[b, j].

j runs over the columns of the selected heads; mixed (B, h * head_dim) fp32 is zero elsewhere; w (d, h * head_dim) as stored.
A head's columns of a row are 256 contiguous bytes at head dim 128, so the rows need no transposing: every output has
one owner, and there are no partial sums, no atomics and no second pass; bias and residual cost nothing.

The selection may be read before the wait for the attention kernel: it was written two launches earlier, and the
launch before this one lets this one start only after it has waited for everything before it. The first weights are thus
on their way while attention, which leaves the memory idle, still runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, n_sms, start_dependents, two_tiles, use_pdl
from kernels.batched import dense_add
from kernels.dense_gemv import RowSettings
from kernels.select import Selection


def project_settings(d: int) -> RowSettings:
    """Launch settings by width, from benchmarks/sparse_attention.py --sweep."""
    return RowSettings(4, 2, 8) if d <= 4096 else RowSettings(2, 1, 8)


def project_heads_reference(mixed, weight, bias, residual, selection, out, pdl=False) -> None:
    """Plain torch."""
    out.copy_(torch.nn.functional.linear(mixed.to(weight.dtype), weight).float() + bias.float() + residual)


@triton.jit
def _selected_rows(
    weight, line, n_rows, c0, c1, m0, m1, WIDTH: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS rows from `line` on as two tiles, only the columns of m0 and m1; rows from n_rows on are not read."""
    lines = line + tl.arange(0, ROWS)
    inside = (lines < n_rows)[:, None]
    at = weight + lines.to(tl.int64)[:, None] * WIDTH
    w0 = tl.load(at + c0[None, :], mask=inside & m0[None, :], other=0.0, eviction_policy="evict_first")
    w1 = w0
    if D1 > 0:
        w1 = tl.load(at + c1[None, :], mask=inside & m1[None, :], other=0.0, eviction_policy="evict_first")
    return w0, w1


@triton.jit
def _project_kernel(
    mixed,
    weight,
    bias,
    residual,
    row_bits,
    out,
    n_rows,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    c0 = tl.arange(0, D0)
    c1 = c0
    m0 = c0 < WIDTH
    m1 = m0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        m1 = c1 < WIDTH
    if not ALL:
        m0 = tl.load(row_bits + c0 // HEAD_DIM, cache_modifier=".cg") != 0
        if D1 > 0:
            m1 = tl.load(row_bits + c1 // HEAD_DIM, mask=c1 < WIDTH, other=0, cache_modifier=".cg") != 0
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    w0, w1 = _selected_rows(weight, first, n_rows, c0, c1, m0, m1, WIDTH, D1, ROWS)
    start_dependents(PDL)
    x0 = tl.load(mixed + c0, mask=m0, other=0.0)
    x1 = x0
    if D1 > 0:
        x1 = tl.load(mixed + c1, mask=m1, other=0.0)
    for line in range(first, n_rows, step):
        next0, next1 = _selected_rows(weight, line + step, n_rows, c0, c1, m0, m1, WIDTH, D1, ROWS)
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


def project_heads(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """mixed (B, h * head_dim), residual and out (B, d) fp32, weight (d, h * head_dim); selection None = all heads.

    One row runs in one kernel, bitwise deterministic; several as a matrix product over all columns: the union of the
    heads of several rows leaves little out. Errors: shapes, a CPU tensor.
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
    settings = settings or project_settings(d)
    d0, d1 = two_tiles(width)
    pdl = use_pdl(pdl, mixed.device)
    _project_kernel[(min(n_sms(mixed.device) * settings.programs, triton.cdiv(d, settings.rows)),)](
        mixed,
        weight,
        bias,
        residual,
        mixed if selection is None else selection.row_bits,
        out,
        d,
        HEAD_DIM=1 if selection is None else width // selection.n,
        WIDTH=width,
        D0=d0,
        D1=d1,
        ROWS=settings.rows,
        ALL=selection is None,
        PDL=pdl,
        num_warps=settings.warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )
