# mypy: disable-error-code="assignment"
"""A short matrix times a normalised vector, the LayerNorm folded into the product: y[r] = act(sum_j w[r, j] n[j]).

    n = LayerNorm(x) = (x - mean) rstd g + b,  so  y[r] = rstd (sum_j w[r, j] g[j] x[j] - mean sum_j w[r, j] g[j])
                                                          + sum_j w[r, j] b[j]

x (1, d), w (rank, d), y (1, rank) fp32, sums in fp32. The two last sums depend on weights alone (`norm_sums`). The rows
are in registers before the wait for the stage before; after it one pass over x gives products, mean and variance
together, where a LayerNorm in front of the product takes two reductions more. A program also normalises its slice of x
for fc1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import two_tiles
from kernels.launch import (
    FLOAT_TYPES,
    INTERPRET,
    QUANTIZED_TYPES,
    check_input,
    check_tensor,
    next_power_of_two,
    programmatic,
    require,
    wait_for_predecessor,
)
from kernels.layer_norm import LayerNormWeights, layer_norm_reference


@dataclass(frozen=True)
class NormSettings:
    """rows: of a program; warps."""

    rows: int
    warps: int


def norm_settings(d: int) -> NormSettings:
    if INTERPRET:
        return NormSettings(4, 4)
    if d <= 5120:
        return NormSettings(2, 16 if d == 4096 else 8)
    return NormSettings(4, 8) if d <= 7168 else NormSettings(8, 16)


def norm_sums(weight: Tensor, ln: LayerNormWeights) -> tuple[Tensor, Tensor]:
    """Sums of every row of weight (n, d) with the LayerNorm's weight and bias: (n,) fp32 each, without scales."""
    both = torch.stack([ln.weight.float(), ln.bias.float()], dim=1)
    # In parts: a wide copy of a whole fc1 may not fit beside the model.
    gains, shifts = torch.cat([part.float() @ both for part in weight.split(4096)]).T.contiguous()
    return gains, shifts


def norm_gemv_reference(
    x: Tensor, ln: LayerNormWeights, weight: Tensor, scale: Tensor | None = None, relu: bool = False
) -> Tensor:
    """(1, rank) in plain torch; fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = layer_norm_reference(x, ln, wide) @ weight.to(wide).T
    if scale is not None:
        y = y * scale.to(wide)
    return y.relu() if relu else y


@triton.jit
def normalised_rows(
    pid,
    x_ptr,
    gain_ptr,
    shift_ptr,
    w_ptr,
    gains_ptr,
    shifts_ptr,
    normalised_ptr,
    n_rows,
    eps,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products of program pid's ROWS rows with LayerNorm(x), with the wait: (ROWS,) fp32; stores its slice of n."""
    rows = pid * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    c0 = tl.arange(0, D0)
    at = w_ptr + rows.to(tl.int64)[:, None] * D
    w0 = tl.load(at + c0[None, :], mask=inside[:, None], other=0.0)
    g0 = tl.load(gain_ptr + c0)
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        near = c1 < D
        w1 = tl.load(at + c1[None, :], mask=inside[:, None] & near[None, :], other=0.0)
        g1 = tl.load(gain_ptr + c1, mask=near, other=0.0)
    gains = tl.load(gains_ptr + rows, mask=inside, other=0.0)
    shifts = tl.load(shifts_ptr + rows, mask=inside, other=0.0)
    own = pid * SLICE + tl.arange(0, SLICE)
    if normalised_ptr is not None:
        own_gain = tl.load(gain_ptr + own, mask=own < D, other=0.0).to(tl.float32)
        own_shift = tl.load(shift_ptr + own, mask=own < D, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    x0 = tl.load(x_ptr + c0).to(tl.float32)
    if D1 > 0:
        x1 = tl.load(x_ptr + c1, mask=near, other=0.0).to(tl.float32)
    if normalised_ptr is not None:
        own_x = tl.load(x_ptr + own, mask=own < D, other=0.0).to(tl.float32)
    y = tl.sum(w0.to(tl.float32) * (g0.to(tl.float32) * x0)[None, :], 1)
    total = tl.sum(x0, 0)
    squares = tl.sum(x0 * x0, 0)
    if D1 > 0:
        y += tl.sum(w1.to(tl.float32) * (g1.to(tl.float32) * x1)[None, :], 1)
        total += tl.sum(x1, 0)
        squares += tl.sum(x1 * x1, 0)
    mean = total / D
    rstd = tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + eps)
    if normalised_ptr is not None:
        value = (own_x - mean) * rstd * own_gain + own_shift
        tl.store(normalised_ptr + own, value.to(normalised_ptr.dtype.element_ty), mask=own < D)
    return rstd * (y - mean * gains) + shifts


@triton.jit(do_not_specialize=["n_rows"])
def _norm_gemv_kernel(
    x_ptr,
    gain_ptr,
    shift_ptr,
    w_ptr,
    scale_ptr,
    gains_ptr,
    shifts_ptr,
    out_ptr,
    normalised_ptr,
    n_rows,
    eps,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + rows, mask=inside, other=0.0)
    y = normalised_rows(
        pid, x_ptr, gain_ptr, shift_ptr, w_ptr, gains_ptr, shifts_ptr, normalised_ptr, n_rows, eps, D, D0, D1, ROWS,
        SLICE, PDL,
    )  # fmt: skip
    if scale_ptr is not None:
        y = y * scale
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
    tl.store(out_ptr + rows, y, mask=inside)


def norm_gemv(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Tensor,
    sums: tuple[Tensor, Tensor],
    out: Tensor,
    scale: Tensor | None = None,
    relu: bool = False,
    normalised_out: Tensor | None = None,
    pdl: bool = False,
    settings: NormSettings | None = None,
) -> None:
    """x (1, d) fp32/fp16/bf16; weight (rank, d) as x, or int8/fp8 with scale (rank,) fp32; out (1, rank) fp32.

    sums: as `norm_sums` gives them. normalised_out: (1, d), receives LN(x). Sums in fp32, in a fixed order.
    Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    require(batch == 1, f"the LayerNorm is folded into the product of one row, got {batch}")
    rank = weight.shape[0]
    check_tensor("weight", weight, (rank, d), FLOAT_TYPES + QUANTIZED_TYPES, x)
    check_tensor("LayerNorm weight", ln.weight, (d,), FLOAT_TYPES, x)
    check_tensor("LayerNorm bias", ln.bias, (d,), FLOAT_TYPES, x)
    check_tensor("out", out, (1, rank), (torch.float32,), x)
    require(weight.dtype not in QUANTIZED_TYPES or scale is not None, f"a weight of {weight.dtype} needs a scale a row")
    for total in sums:
        check_tensor("sums", total, (rank,), (torch.float32,), x)
    if scale is not None:
        check_tensor("scale", scale, (rank,), (torch.float32,), x)
    if normalised_out is not None:
        check_tensor("normalised_out", normalised_out, (1, d), FLOAT_TYPES, x)
    programs, constants, warps = norm_launch(d, rank, settings)
    has_pdl, use_pdl = programmatic(x, pdl)
    _norm_gemv_kernel[(programs,)](
        x,
        ln.weight,
        ln.bias,
        weight,
        scale,
        *sums,
        out,
        normalised_out,
        rank,
        ln.eps,
        **constants,
        RELU=relu,
        PDL=has_pdl,
        num_warps=warps,
        launch_pdl=use_pdl,
    )


def norm_launch(d: int, n_rows: int, settings: NormSettings | None = None) -> tuple[int, dict[str, int], int]:
    """(programs, constants, warps) of `normalised_rows`, the same in every kernel that calls it."""
    settings = settings or norm_settings(d)
    programs = -(-n_rows // settings.rows)
    d0, d1 = two_tiles(d)
    constants = {
        "D": d,
        "D0": d0,
        "D1": d1,
        "ROWS": settings.rows,
        "SLICE": next_power_of_two(-(-d // programs)),
    }
    return programs, constants, min(settings.warps, max(1, (d1 or d0) // 32))  # no more threads than columns
