"""Norms of rows, over the last dimension and in fp32. Kernels are handed one as a `RowNorm`.

    LayerNorm     (x - mean) / sqrt(var + eps) * weight + bias
    LayerNorm1P   (x - mean) / sqrt(var + eps) * (weight + 1) + bias
    RMSNorm       x / sqrt(mean of x^2 + eps) * weight

Each also without weight or bias. For one batch row a norm is no kernel of its own. Kernels that read the residual
stream x (1, d) fp32 normalise it on the way in. For a batch it is one (`stages.norm`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.launch import load_vector


class NormKind(StrEnum):
    LAYER_NORM = "layer_norm"
    LAYER_NORM_1P = "layer_norm_1p"
    RMS_NORM = "rms_norm"


@triton.jit
def _mean(total, D: tl.constexpr):
    return total / D


@triton.jit
def _no_mean(total, D: tl.constexpr):
    return 0.0


@triton.jit
def _scaled(z, gain, shift):
    return z * gain.to(tl.float32) + shift.to(tl.float32)


@triton.jit
def _scaled_1p(z, gain, shift):
    return z * (gain.to(tl.float32) + 1.0) + shift.to(tl.float32)


class RowNorm(NamedTuple):
    """gain, shift: (d,), or None. mean: of a row, from its sum. scaled: what becomes of z = (x - mean) / deviation."""

    gain: Tensor | None
    shift: Tensor | None
    eps: Any
    mean: Any
    scaled: Any


@dataclass(frozen=True)
class LayerNormWeights:
    """weight, bias: (d,) of any float dtype, or None. Eps as in the model's configuration."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float = 1e-5
    kind: NormKind = NormKind.LAYER_NORM

    @property
    def raised(self) -> bool:
        """Whether the weight is stored as what is to be added to one."""
        return self.kind is NormKind.LAYER_NORM_1P and self.weight is not None

    @property
    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) for products that are put right with the mean afterwards. Errors: a weight that counts from 1,
        or none."""
        if self.kind is NormKind.LAYER_NORM_1P or self.weight is None:
            raise ValueError(f"expected a norm with a weight that products can be put right with, got {self.kind}")
        return self.weight, torch.zeros_like(self.weight) if self.bias is None else self.bias

    @classmethod
    def identity(cls, d: int, device: torch.device | str) -> "LayerNormWeights":
        """An RMSNorm that leaves a row as it is: x / sqrt(mean of x^2 + 2^64) * 2^32, in fp32 exact up to x of 2^20.

        It is for kernels that normalise what they read, where that is a norm's output already."""
        return cls(torch.full((d,), 2.0**32, device=device, dtype=torch.float32), None, 2.0**64, NormKind.RMS_NORM)

    def args(self) -> RowNorm:
        """Arguments for a kernel."""
        mean = _no_mean if self.kind is NormKind.RMS_NORM else _mean
        return RowNorm(self.weight, self.bias, tl.constexpr(self.eps), mean, _scaled_1p if self.raised else _scaled)


def layer_norm_reference(x: Tensor, ln: LayerNormWeights, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (B, d) of any float dtype -> (B, d): computed in fp32 (fp64 for fp64 input), rounded to `dtype`."""
    wide = x if x.dtype == torch.float64 else x.float()
    if ln.kind is not NormKind.RMS_NORM:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + ln.eps)
    if ln.weight is not None:
        y = y * (ln.weight.to(y.dtype) + ln.raised)
    if ln.bias is not None:
        y = y + ln.bias.to(y.dtype)
    return y.to(dtype)


@triton.jit
def row_moments(total, squares, norm, D: tl.constexpr):
    """(mean, 1 / deviation) of D values as the norm has them, from their sum and the sum of their squares in fp32."""
    mean = norm.mean(total, D)
    return mean, tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + norm.eps)


@triton.jit
def norm_vectors(norm, c, D: tl.constexpr, BLOCK: tl.constexpr):
    """(gains, shifts) of a row as tuples of tiles (BLOCK,), one and zero where the norm has none."""
    gains = ()
    shifts = ()
    if norm.gain is not None:
        gains = load_vector(norm.gain, c, D, BLOCK)
    if norm.shift is not None:
        shifts = load_vector(norm.shift, c, D, BLOCK)
    for _ in tl.static_range((D + BLOCK - 1) // BLOCK):
        if norm.gain is None:
            gains = gains + (tl.full((BLOCK,), 1.0, tl.float32),)
        if norm.shift is None:
            shifts = shifts + (tl.full((BLOCK,), 0.0, tl.float32),)
    return gains, shifts


@triton.jit
def normalised_pieces(xs, gains, shifts, norm, c, D: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """The norm of a row as a tuple of fp32 pieces (BLOCK,), rounded to TYPE in between, zero beyond D.

    xs: fp32 pieces, zero beyond D. gains, shifts: `norm_vectors`, which are static and may come before a wait.
    """
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    total = xs[0]
    for j in tl.static_range(1, STEPS):
        total += xs[j]
    mean = norm.mean(tl.sum(total, 0), D)
    squares = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STEPS):
        centred = xs[j] - mean
        if (j + 1) * BLOCK > D:
            centred = tl.where(j * BLOCK + c < D, centred, 0.0)
        squares += centred * centred
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + norm.eps)
    n = ()
    for j in tl.static_range(STEPS):
        z = (xs[j] - mean) * scale
        if (j + 1) * BLOCK > D:
            z = tl.where(j * BLOCK + c < D, z, 0.0)
        value = norm.scaled(z, gains[j], shifts[j])
        n = n + (value.to(TYPE).to(tl.float32),)
    return n
