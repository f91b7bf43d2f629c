"""A norm of one row whose mean and deviation are known only after its input is: products are put right with them.

    z = (x - m) r,   u = z gain, rounded to fp16           m, r: an estimate of x's mean and of 1 / its deviation
    n = norm(x) = a u + c gain + shift,   so   W n = a W u + c W gain + W shift
    a = 1 / sqrt(mean(z^2) - mean(z)^2 + eps r^2),   c = -a mean(z)

So it is of a LayerNorm. Of an RMSNorm m, mean(z) and c are zero.
The kernel that makes x, a stripe of columns in each program, knows neither mean nor deviation. It stores u and adds
sums of z and z^2 to `moments`, as whole numbers, so that their order does not matter. A kernel that multiplies u puts
its products right (`late_factors`): a stage that only normalises, and a launch with it, are saved. The formula is exact
whatever the estimate is. U is rounded where n would be, and as precise where the estimate is near. It is that of the
norm before, of x without what this half added. u beyond 65504 would be infinite: that is n of such a size times
how far the deviations differ.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.launch import sums_together
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind
from dejavu_train.kernels.formats.matrix import Matrix

FIRST_UNIT = tl.constexpr(2.0**32)  # of the sum of z as a whole number: up to 2e9
SECOND_UNIT = tl.constexpr(2.0**24)  # of that of z^2: up to 5e11


@dataclass(frozen=True)
class LateNorm:
    """ln: LayerNorm or RMSNorm. estimate: (2,) fp32, m and r. moments: (2,) int64, of one row. Zero before it is made.
    factors: (T, 2) fp32, a and c of the rows that are kept at T positions."""

    ln: LayerNormWeights
    estimate: Tensor
    moments: Tensor
    factors: Tensor

    @property
    def centred(self) -> bool:
        """Whether it takes the mean off."""
        return self.ln.kind is not NormKind.RMS_NORM

    @classmethod
    def empty(cls, ln: LayerNormWeights, positions: int, estimate: Tensor, moments: Tensor) -> "LateNorm":
        return cls(ln, estimate, moments, torch.zeros(positions, 2, device=moments.device, dtype=torch.float32))


def late_sums(weight: Matrix, ln: LayerNormWeights) -> tuple[Tensor, Tensor]:
    """W gain and W shift of rows (h, ..., d): (h, ...) fp32 each. A head's rows at a time are written out."""
    both = torch.stack(ln.folded, dim=1).float()
    parts = [weight[head].dense() @ both for head in range(weight.shape[0])]
    gains, shifts = torch.stack(parts).movedim(-1, 0).contiguous()
    return gains, shifts


def late_store_reference(norm: LateNorm, before: Tensor, x: Tensor, kept: Tensor) -> None:
    """Plain torch: u of x (1, d) to kept (1, d), moments and estimate. before: the row that the estimate is of."""
    row = before.double()
    norm.estimate[0] = row.mean() if norm.centred else 0.0
    norm.estimate[1] = torch.rsqrt((row - norm.estimate[0]).square().mean() + norm.ln.eps)
    z = (x - norm.estimate[0]) * norm.estimate[1]
    kept.copy_(z * norm.ln.folded[0].float())
    sums = z.double().sum() * FIRST_UNIT.value, z.double().square().sum() * SECOND_UNIT.value
    norm.moments.copy_(torch.stack(sums).round())


def late_factors_reference(norm: LateNorm, d: int) -> Tensor:
    """(2,) fp32: a and c of the row whose moments these are."""
    first, second = norm.moments.double() / d
    mean = first / FIRST_UNIT.value * norm.centred
    variance = (second / SECOND_UNIT.value - mean.square()).clamp_min(0)
    a = torch.rsqrt(variance + norm.ln.eps * norm.estimate[1].double().square())
    return torch.stack([a, -a * mean]).float()


@triton.jit
def add_moments(moments, z):
    """Adds a stripe's sums, where z is zero beyond the row."""
    sums = sums_together((z, z * z), 2)
    tl.atomic_add(moments, (sums[0] * FIRST_UNIT).to(tl.int64), sem="relaxed")
    tl.atomic_add(moments + 1, (sums[1] * SECOND_UNIT).to(tl.int64), sem="relaxed")


@triton.jit
def late_factors(moments, estimate, EPS: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr):
    """(a, c) of the row whose moments these are."""
    mean = 0.0
    if CENTRED:
        mean = tl.load(moments).to(tl.float32) * (1 / (FIRST_UNIT * D))
    square = tl.load(moments + 1).to(tl.float32) * (1 / (SECOND_UNIT * D))
    r = tl.load(estimate + 1)
    a = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + EPS * r * r)
    return a, -a * mean
