"""Helpers of kernels' tests: weights of a norm, poisoned rows, and an MLP in plain torch."""

from dataclasses import replace

import torch

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Rows
from dejavu_train.kernels.stages.mlp import hidden_reference

NAN = float("nan")


def norm(d, device):
    return LayerNormWeights(1 + 0.1 * torch.randn(d, device=device), 0.1 * torch.randn(d, device=device))


def poisoned(weights, unread, names=("up", "down", "gate")):
    """The same with NaN in rows that must not be read."""

    def linear(one, name):
        if one is None or name not in names:
            return one
        bias = one.bias.clone()
        if name != "down":
            bias[unread] = NAN
        if isinstance(one.weight, Rows):
            numbers = one.weight.numbers.clone()
            numbers[unread] = NAN
            return Linear(Rows(numbers), bias)
        scales = one.weight.scales.clone()
        scales[unread] = NAN
        return Linear(replace(one.weight, scales=scales), bias)

    return replace(weights, **{name: linear(getattr(weights, name), name) for name in ("up", "down", "gate")})


def mlp_reference(x, ln, weights, residual, mask, out):
    """Plain torch over a selection, mask (B, n) bool, in fp64 where x is. 4-bit weights meet x in fp16."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    dtype = weights.up.bias.dtype if weights.up.weight.format is Format.INT4 else weights.up.weight.parts()[0].dtype
    n = x.to(dtype) if ln is None else layer_norm_reference(x, ln, dtype)
    h = torch.where(mask, hidden_reference(n.to(wide), weights), 0.0)
    out.copy_(h @ weights.down.weight.dense(wide) + weights.down.bias.to(wide) + residual)
