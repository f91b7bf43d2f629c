"""Activations of hidden values, as functions that kernels are handed. All take and give fp32, and keep a NaN.

With x the value, all of it elementwise:

    relu       x where x > threshold, else 0; the threshold is FATReLU's
    relu2      relu(x)^2
    gelu       x Phi(x)
    gelu_tanh  0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    silu       x / (1 + exp(-x))
    none       x
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

SQRT_HALF = tl.constexpr(0.7071067811865476)
TANH_SLOPE = tl.constexpr(-1.5957691216057308)  # -2 sqrt(2 / pi)


@triton.jit
def unchanged(values, threshold: tl.constexpr = 0.0):
    return values


@triton.jit
def relu(values, threshold: tl.constexpr = 0.0):
    return tl.where(values <= threshold, 0.0, values)


@triton.jit
def relu2(values, threshold: tl.constexpr = 0.0):
    kept = tl.where(values <= threshold, 0.0, values)
    return kept * kept


@triton.jit
def gelu(values, threshold: tl.constexpr = 0.0):
    return 0.5 * values * (1.0 + tl.erf(values * SQRT_HALF))


@triton.jit
def gelu_tanh(values, threshold: tl.constexpr = 0.0):
    # 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2 u))
    return values / (1.0 + tl.exp((values + 0.044715 * values * values * values) * TANH_SLOPE))


@triton.jit
def silu(values, threshold: tl.constexpr = 0.0):
    return values / (1.0 + tl.exp(-values))


ACTIVATIONS = {
    "none": unchanged, "relu": relu, "relu2": relu2, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu,
}  # fmt: skip


def activation_of(name: str, threshold: float = 0.0) -> Any:
    """The function of a name. Errors: an unknown name, a threshold of what is no ReLU."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if threshold < 0 or (threshold and not name.startswith("relu")):
        raise ValueError(f"expected a threshold of relu or relu2, 0 or more, got {threshold} of {name}")
    return ACTIVATIONS[name]


def activation_reference(values: Tensor, name: str, threshold: float = 0.0) -> Tensor:
    """Plain torch, in the values' dtype."""
    if name in ("relu", "relu2"):
        kept = torch.where(values <= threshold, 0.0, values)
        return kept if name == "relu" else kept * kept
    if name.startswith("gelu"):
        return F.gelu(values, approximate="tanh" if name == "gelu_tanh" else "none")
    return F.silu(values) if name == "silu" else values
