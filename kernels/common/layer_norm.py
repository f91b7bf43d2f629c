"""LayerNorm as a prologue: y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in fp32.

For one batch row it is no kernel of its own. Kernels that read the residual stream x (1, d) fp32 normalise it on the
way in. For a batch it is one (`layer_norm`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_tensor
from dejavu_train.kernels.common.launch import next_power_of_two, programmatic, wait_for_predecessor


@dataclass(frozen=True)
class LayerNormWeights:
    """weight, bias: (d,) of any float dtype. Eps as in the model's configuration."""

    weight: Tensor
    bias: Tensor
    eps: float = 1e-5


def layer_norm_reference(x: Tensor, ln: LayerNormWeights, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (B, d) of any float dtype -> (B, d): computed in fp32 (fp64 for fp64 input), rounded to `dtype`."""
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).square().mean(-1, keepdim=True)
    y = (wide - mean) * torch.rsqrt(variance + ln.eps) * ln.weight.to(wide.dtype) + ln.bias.to(wide.dtype)
    return y.to(dtype)


@triton.jit
def mean_and_rstd(total, squares, D: tl.constexpr, eps):
    """Of D values, from their sum and the sum of their squares in fp32."""
    mean = total / D
    return mean, tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + eps)


@triton.jit
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    y = centred * rstd * weight + bias
    tl.store(out_ptr + row * D + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, ln: LayerNormWeights, out: Tensor, pdl: bool = False) -> None:
    """x (B, d) -> out (B, d), one program a row, where every consumer of its own would cost more."""
    batch, d = check_input("x", x)
    check_tensor("out", out, (batch, d), FLOAT_TYPES, x)
    has_pdl, use_pdl = programmatic(x, pdl)
    _layer_norm_kernel[(batch,)](
        x,
        ln.weight,
        ln.bias,
        out,
        ln.eps,
        D=d,
        BLOCK=next_power_of_two(d),
        PDL=has_pdl,
        num_warps=16,
        launch_pdl=use_pdl,
    )
