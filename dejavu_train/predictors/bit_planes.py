"""The map into the neurons as two planes.

The second stage of a cascade reads the 4 bits a weight of the first for every candidate, and 12 for what passes.

A weight of row i is scale_i * q with an integer q = steps_i * u + l. The upper plane is u in -7..7, the lower one l in
-2048..2047. steps says how finely u is cut: with 4095 all weights of a row lie within its range. With fewer steps the
largest lie beyond the last one, and the others are told apart better. The lower plane holds what is left in either
case. So the whole weight has 13 to 16 bits relative to the row's largest. Planes of given scale and steps are a
function of the weights: quantised again, they give the same integers.

Letters: n neurons, d model width, r some rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.ground.errors import UserError

STEPS = (4095, 2048, 1024, 640, 448, 320)


def choose_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """scale (n,) fp32 and steps (n,) int16 of weight (n, d): of a few grids that whose upper plane errs least."""
    weight = weight.float()
    peak = weight.abs().amax(dim=1, keepdim=True)
    peak = torch.where(peak > 0, peak, torch.ones_like(peak))
    best = torch.full_like(peak, torch.inf)
    scale, steps = peak.clone(), torch.zeros_like(peak)
    for count in STEPS:
        step = peak * (count / (7 * count + 2047))
        error = (weight - (weight / step).round().clamp(-7, 7) * step).square().sum(dim=1, keepdim=True)
        better = error < best
        best = torch.minimum(error, best)
        scale = torch.where(better, peak / (7 * count + 2047), scale)
        steps = torch.where(better, float(count), steps)
    return scale[:, 0], steps[:, 0].to(torch.int16)


@dataclass(frozen=True)
class BitPlanes:
    """whole (n, d) int16 = steps u + l, steps (n,) fp32, step (n,) and scale (n,) fp32: weight = step u + scale l."""

    whole: Tensor
    steps: Tensor
    step: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, steps: Tensor) -> "BitPlanes":
        """The planes of weight (n, d) on its device.

        Raises:
            UserError: a width that is no multiple of 8.
        """
        d = weight.shape[1]
        if d % 8:
            raise UserError(f"a cascade reads up in planes and needs a model width that is a multiple of 8, got {d}")
        scale, steps = scale.to(weight.device), steps.to(weight.device).float()
        limit = (7 * steps + 2047)[:, None]
        whole = torch.minimum(torch.maximum((weight.float() / scale[:, None]).round_(), -limit), limit)
        return cls(whole.to(torch.int16), steps, scale * steps, scale)

    def codes(self, rows: Tensor | None = None) -> Tensor:
        """The upper plane as whole numbers u (r, d) fp32, of all rows or those with the given numbers."""
        whole, steps = (t if rows is None else t[rows] for t in (self.whole, self.steps))
        return whole.float().div_(steps[:, None]).round_().clamp_(-7, 7)

    def weight(self, rows: Tensor | None = None) -> Tensor:
        """Both planes: the weights (r, d) fp32 that every backend multiplies with."""
        whole, *each = (t if rows is None else t[rows] for t in (self.whole, self.steps, self.step, self.scale))
        steps, step, scale = (numbers[:, None] for numbers in each)
        upper = self.codes(rows)
        return torch.addcmul(upper * step, whole - upper * steps, scale)


def input_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., d) -> whole numbers in -127..127 (..., d) and their unit (..., 1), fp32: x is about the product."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (x * (127 / largest)).round(), largest / 127


@dataclass(frozen=True)
class SecondStage:
    """The sharper test of a cascade: a neuron passes where its pre-activation by the upper plane exceeds its threshold.

    The test is in whole numbers, of the plane and of the rounded input. Their sums are exact in fp32 up to widths of
    18,000. So every backend decides alike, whatever the order of its sums. bias, stage2_threshold: (n,) fp32.
    """

    planes: BitPlanes
    bias: Tensor
    stage2_threshold: Tensor

    def scores(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Pre-activations (..., r) fp32 by the upper plane, for x (..., d), what the MLP reads."""
        bias, step = (t if rows is None else t[rows] for t in (self.bias, self.planes.step))
        levels, unit = input_levels(x.to(self.bias.device))
        return F.linear(levels, self.planes.codes(rows)) * step * unit + bias

    def passed(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """(..., r) bool."""
        return self.scores(x, rows) > (self.stage2_threshold if rows is None else self.stage2_threshold[rows])


def build_second_stage(
    weight: Tensor, bias: Tensor | None, scale: Tensor, steps: Tensor, stage2_threshold: Tensor
) -> SecondStage:
    """The test for a layer's map into neurons, weight (n, d) and bias (n), on its device."""
    weight = weight.detach()
    bias = (
        torch.zeros(len(weight), device=weight.device, dtype=torch.float32) if bias is None else bias.detach().float()
    )
    return SecondStage(BitPlanes.of(weight, scale, steps), bias, stage2_threshold.to(weight.device))
