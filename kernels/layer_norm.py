"""LayerNorm as a prologue: y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in fp32.

It is never a kernel of its own: the kernels that read the residual stream x (B, d) fp32 normalise it on the way in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerNormWeights:
    """weight, bias: (d,) of any float dtype; eps as in the model's configuration."""

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
