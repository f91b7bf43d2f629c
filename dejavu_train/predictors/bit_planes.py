"""The map into the neurons as two planes.

The second stage of a cascade reads the 4 bits a weight of the first for every candidate, and 12 for what passes.

A weight of row i is scale_i * q with an integer q = steps_i * u + l: u in -7..7 is the upper plane, l in -2048..2047
the lower one. steps says how finely: with 4095 all weights of a row lie within 7.5 steps, with fewer the largest are
beyond the last one and the others are distinguished better. The lower plane holds what is left in either case, so the
whole weight is a number of 13 to 16 bits relative to the row's largest. Planes of given scale and steps are a function
of the weights: quantised again, they give the same integers.

Words of 32 bits, so that kernels read 16 bytes a thread and multiply contiguous parts of the input: with W = d / 8,
nibble k of upper[i, w] is u + 8 of column k W + w. rest[i] holds W words of the upper nibbles of l + 2048, in the same
order, then 2 W words of its low bytes: byte k of word w is that of column k W + w, in the second W words of column
(4 + k) W + w.

Letters: n neurons, d model width, r some rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.errors import UserError

STEPS = (4095, 2048, 1024, 640, 448, 320)
ROWS_AT_ONCE = 2048


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
    """upper (n, d / 8) int32, rest (n, 3 d / 8) int32, step (n,) and scale (n,) fp32: weight = step u + scale l."""

    upper: Tensor
    rest: Tensor
    step: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, steps: Tensor) -> "BitPlanes":
        """The planes of weight (n, d) on its device.

        Raises:
            UserError: a width that is no multiple of 8.
        """
        n, d = weight.shape
        if d % 8:
            raise UserError(f"a cascade reads up in planes and needs a model width that is a multiple of 8, got {d}")
        scale, count = scale.to(weight.device), steps.to(weight.device).float()
        parts = [
            _pack(weight[i : i + ROWS_AT_ONCE], scale[i : i + ROWS_AT_ONCE, None], count[i : i + ROWS_AT_ONCE, None])
            for i in range(0, n, ROWS_AT_ONCE)
        ]
        upper, rest = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(upper, rest, scale * count, scale)

    def codes(self, rows: Tensor | None = None) -> Tensor:
        """The upper plane as whole numbers u (r, d) fp32, of all rows or those with the given numbers."""
        return _nibbles(self.upper if rows is None else self.upper[rows]).sub_(8).float()

    def coarse(self, rows: Tensor | None = None) -> Tensor:
        """The upper plane alone as weights (r, d) fp32."""
        return self.codes(rows).mul_((self.step if rows is None else self.step[rows])[:, None])

    def weight(self, rows: Tensor | None = None) -> Tensor:
        """Both planes: the weights (r, d) fp32 that every backend multiplies with."""
        rest, scale = (self.rest, self.scale) if rows is None else (self.rest[rows], self.scale[rows])
        words = rest.shape[1] // 3
        low = torch.cat([_bytes(rest[:, words : 2 * words]), _bytes(rest[:, 2 * words :])], dim=1)
        lower = (_nibbles(rest[:, :words]) << 8).add_(low).sub_(2048)
        return torch.addcmul(self.coarse(rows), lower.float(), scale[:, None])


def _pack(weight: Tensor, scale: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    limit = 7 * count + 2047
    whole = torch.minimum(torch.maximum((weight.float() / scale).round(), -limit), limit)
    upper = (whole / count).round().clamp(-7, 7)
    lower = (whole - upper * count).clamp(-2048, 2047).int() + 2048
    by_part = (lower & 255).unflatten(1, (2, 4, -1))
    low = sum(by_part[:, :, k] << 8 * k for k in range(4))
    assert isinstance(low, Tensor)
    return _words(upper.int() + 8), torch.cat([_words(lower >> 8), low.flatten(1)], dim=1)


def _words(nibbles: Tensor) -> Tensor:
    """(r, d) int32 in 0..15 -> (r, d / 8) int32."""
    parts = nibbles.unflatten(1, (8, -1))
    words = parts[:, 0].clone()
    for k in range(1, 8):
        words |= parts[:, k] << 4 * k
    return words


def _nibbles(words: Tensor) -> Tensor:
    return torch.cat([words >> 4 * k & 15 for k in range(8)], dim=1)


def _bytes(words: Tensor) -> Tensor:
    return torch.cat([words >> 8 * k & 255 for k in range(4)], dim=1)


def input_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., d) -> whole numbers in -127..127 (..., d) and their unit (..., 1), fp32: x is about the product."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (x * (127 / largest)).round(), largest / 127


@dataclass(frozen=True)
class SecondStage:
    """The sharper test of a cascade: a neuron passes where its pre-activation by the upper plane exceeds its threshold.

    The test is in whole numbers, of the plane and of the rounded input: their sums are exact in fp32 up to widths of
    18,000, so that every backend decides alike whatever the order of its sums. bias, stage2_threshold: (n,) fp32.
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
    bias = torch.zeros(len(weight), device=weight.device) if bias is None else bias.detach().float()
    return SecondStage(BitPlanes.of(weight, scale, steps), bias, stage2_threshold.to(weight.device))
