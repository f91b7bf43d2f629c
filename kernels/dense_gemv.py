"""A dense matrix times one normalised vector: y[i] = act(sum_j w[i, j] n[j] + bias[i]),  n = LayerNorm(x).

x (1, d) fp32, w (n, d) row-major, y (1, n) fp32; sums in fp32. Programs stride over the rows, ROWS at a time; the rows
that come next are always on their way before these are summed, the first ones before the wait for the stage before
(weights depend on nothing). x stays in registers, spread over all threads of a program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, n_sms, start_dependents, two_tiles, use_pdl
from kernels.batched import dense_hidden
from kernels.layer_norm import LayerNormWeights, layer_norm_reference


@dataclass(frozen=True)
class RowSettings:
    """programs: per multiprocessor; rows: of a step."""

    programs: int
    rows: int
    warps: int


def row_settings(d: int) -> RowSettings:
    """Launch settings by width, from benchmarks/sparse_attention.py --sweep."""
    return RowSettings(4, 2, 8) if d <= 4096 else RowSettings(4, 1, 8)


def dense_rows_reference(x, ln, weight, bias, activation, out, pdl=False) -> None:
    """Plain torch, any batch."""
    y = torch.nn.functional.linear(layer_norm_reference(x, ln, weight.dtype), weight)
    if bias is not None:
        y = y + bias
    out.copy_(y.relu() if activation == "relu" else y)


@triton.jit
def load_rows(weight, line, n_rows, c0, c1, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows from `line` on as two tiles (ROWS, D0) and (ROWS, D1); rows from n_rows on are not read."""
    lines = line + tl.arange(0, ROWS)
    width = tl.where(lines < n_rows, D, 0)
    at = weight + lines.to(tl.int64)[:, None] * D
    w0 = tl.load(at + c0[None, :], mask=c0[None, :] < width[:, None], other=0.0, eviction_policy="evict_first")
    w1 = w0
    if D1 > 0:
        w1 = tl.load(at + c1[None, :], mask=c1[None, :] < width[:, None], other=0.0, eviction_policy="evict_first")
    return w0, w1


@triton.jit
def normalised(x, g0, a0, g1, a1, c0, c1, D: tl.constexpr, D1: tl.constexpr, EPS: tl.constexpr, TYPE: tl.constexpr):
    """LayerNorm(x) as two fp32 tiles, rounded to TYPE in between."""
    x0 = tl.load(x + c0)
    total = tl.sum(x0)
    x1 = x0
    if D1 > 0:
        x1 = tl.load(x + c1, mask=c1 < D, other=0.0)
        total += tl.sum(x1)
    mean = total / D
    square = tl.sum((x0 - mean) * (x0 - mean))
    if D1 > 0:
        square += tl.sum(tl.where(c1 < D, (x1 - mean) * (x1 - mean), 0.0))
    scale = 1.0 / tl.sqrt(square / D + EPS)
    n0 = ((x0 - mean) * scale * g0 + a0).to(TYPE).to(tl.float32)
    n1 = n0
    if D1 > 0:
        n1 = ((x1 - mean) * scale * g1 + a1).to(TYPE).to(tl.float32)
    return n0, n1


@triton.jit
def norm_parameters(norm_weight, norm_bias, c0, c1, D: tl.constexpr, D1: tl.constexpr):
    """Weight and bias of a LayerNorm as two fp32 tiles each."""
    g0 = tl.load(norm_weight + c0).to(tl.float32)
    a0 = tl.load(norm_bias + c0).to(tl.float32)
    g1 = g0
    a1 = a0
    if D1 > 0:
        g1 = tl.load(norm_weight + c1, mask=c1 < D, other=0.0).to(tl.float32)
        a1 = tl.load(norm_bias + c1, mask=c1 < D, other=0.0).to(tl.float32)
    return g0, a0, g1, a1


@triton.jit
def _dense_rows_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    out,
    n_rows,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    c0 = tl.arange(0, D0)
    c1 = c0
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
    step = tl.num_programs(0) * ROWS
    w0, w1 = load_rows(weight, tl.program_id(0) * ROWS, n_rows, c0, c1, D, D0, D1, ROWS)
    g0, a0, g1, a1 = norm_parameters(norm_weight, norm_bias, c0, c1, D, D1)
    start_dependents(PDL)
    n0, n1 = normalised(x, g0, a0, g1, a1, c0, c1, D, D1, EPS, weight.dtype.element_ty)
    for line in range(tl.program_id(0) * ROWS, n_rows, step):
        next0, next1 = load_rows(weight, line + step, n_rows, c0, c1, D, D0, D1, ROWS)
        value = tl.sum(w0.to(tl.float32) * n0[None, :], 1)
        if D1 > 0:
            value += tl.sum(w1.to(tl.float32) * n1[None, :], 1)
        lines = line + tl.arange(0, ROWS)
        inside = lines < n_rows
        if HAS_BIAS:
            value += tl.load(bias + lines, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(out + lines, value, mask=inside)
        w0 = next0
        w1 = next1


def dense_rows(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """x (B, d) fp32, weight (n, d), bias (n) or None, activation "none" or "relu" -> out (B, n) fp32.

    One row runs in one kernel, bitwise deterministic; several as a matrix product.
    Errors: shapes, a CPU tensor, an unknown activation.
    """
    check_device("x", x)
    batch, d = x.shape
    n = weight.shape[0]
    check_shape("weight", weight, n, d)
    check_shape("out", out, batch, n)
    if activation not in ("none", "relu"):
        raise ValueError(f"activation must be none or relu, got {activation}")
    if batch > 1:
        out.copy_(dense_hidden(x, ln, weight, bias, activation, pdl))
        return
    settings = settings or row_settings(d)
    d0, d1 = two_tiles(d)
    pdl = use_pdl(pdl, x.device)
    _dense_rows_kernel[(min(n_sms(x.device) * settings.programs, triton.cdiv(n, settings.rows)),)](
        x,
        ln.weight,
        ln.bias,
        weight,
        x if bias is None else bias,
        out,
        n,
        D=d,
        D0=d0,
        D1=d1,
        ROWS=settings.rows,
        HAS_BIAS=bias is not None,
        RELU=activation == "relu",
        EPS=ln.eps,
        PDL=pdl,
        num_warps=settings.warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )
