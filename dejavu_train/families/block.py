"""One decoder layer spelled out: what every dense pass in torch runs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.families.base import BlockParts
from dejavu_train.families.dims import CARRIED, SILENT, SMOOTH, Activation

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``attend(attn_in, q, k, v)``: (B, T, d), (B, h, T, e) and twice (B, g, T, e) -> (B, h, T, e), the heads' outputs.
Groups of h / g heads share K and V."""


def forward_block(
    block: BlockParts, hidden: Tensor, attend: Attend, positions: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The residual stream behind a layer, and what its neurons gave: None where there are none.

    Args:
        block: whose maps are called. A layer without a target is called as a whole.
        hidden: (B, T, d). attend: gives the heads' outputs, and keeps K and V where somebody needs them.
        positions: (B, T) int64, of layers that turn queries and keys by them.
    Returns: (B, T, d), (B, T, n).
    """
    if block.out is not None:
        mixed = block.out(mix_heads(block, before_half(block, block.norm_attn, hidden), attend, positions))
        hidden = behind_half(block, block.norm_attn, hidden + mixed)
    if block.down is None:
        return hidden if block.out is not None else block.whole(hidden), None
    mlp_in = before_half(block, block.norm_mlp, hidden)
    neurons = block.neurons(mlp_in)
    added = block.with_beside(mlp_in, out_of_neurons(block.down, neurons))
    return behind_half(block, block.norm_mlp, hidden + added), neurons


def before_half(block: Any, norm: Any, hidden: Tensor) -> Tensor:
    """(..., d), what a half of a layer reads of the residual stream."""
    return hidden if getattr(block, "post_norm", False) else norm(hidden)


def behind_half(block: Any, norm: Any, hidden: Tensor) -> Tensor:
    """(..., d), the residual stream behind a half of a layer, for the sum of it and what the half adds."""
    return norm(hidden) if getattr(block, "post_norm", False) else hidden


def mix_heads(block: Any, attn_in: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
    """Input of the output projection, (B, T, h * e), for attn_in (B, T, d)."""
    q, k, v = block.project(attn_in, positions)
    return join_heads(attend(attn_in, q * block.scaling, k, v))


def activate_(kind: Activation, x: Tensor, threshold: float = 0.0) -> Tensor:
    """The activation ``kind`` of x, whose memory may be written over."""
    if kind == Activation.FATRELU:
        return torch.threshold_(x, threshold, 0.0)
    if kind in SMOOTH:
        return F.gelu(x, approximate="tanh" if kind == Activation.GELU_TANH else "none")
    return x.relu_().square_() if kind == Activation.RELU2 else x.relu_()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x (B, h, T, e), whose first r dimensions are turned by cos and sin (B, T, r)."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def out_of_neurons(down: Any, neurons: Tensor) -> Tensor:
    """``down`` of neurons (..., n). Neurons in fp32 are multiplied in fp32: a square may be more than fp16 holds.

    Args:
        down: a linear map, or a function, which takes neurons of any dtype.
    """
    weight = getattr(down, "weight", None)
    if weight is None or neurons.dtype == weight.dtype:
        made: Tensor = down(neurons)
        return made
    bias = None if down.bias is None else down.bias.to(neurons.dtype)
    return F.linear(neurons, weight.to(neurons.dtype), bias).to(weight.dtype)


def causal(block: Any) -> Attend:
    """Attention of a layer over rows without padding, or with padding at their ends."""

    def attend(_attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_groups(q, k, v)
        if block.slopes is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        at = torch.arange(q.shape[2], device=q.device)[None]
        bias = alibi(block.slopes, at, at).masked_fill(at[0] > at[0][:, None], -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=1.0)

    return attend


def alibi_slopes(n_heads: int) -> Tensor:
    """(h,) fp32: a geometric series down to 2^-8, where h is no power of two with every second of the next finer one.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    whole = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return torch.tensor(
        slopes + [2 ** (-4 * i / whole) for i in range(1, 2 * (n_heads - whole), 2)], dtype=torch.float32
    )


def alibi(slopes: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Bias of ALiBi for scores, (B, h, T, S) fp32, of queries at positions (B, T) and keys at positions (B, S)."""
    distance = seen[:, None, None] - at[:, None, :, None]
    return slopes.to(distance.device)[:, None, None] * distance


def active_neurons(kind: Activation, neurons: Tensor, norms: Tensor) -> Tensor:
    """(..., n) bool, which neurons of a token are active.

    Args:
        neurons: (..., n), what they give. norms: (n,), of the columns of the map out of them.
    """
    if kind in SILENT:
        return neurons != 0
    contribution, order = (neurons.float().abs() * norms).sort(dim=-1, descending=True)
    before = contribution.cumsum(-1) - contribution
    needed = before < CARRIED * contribution.sum(-1, keepdim=True)
    return torch.empty_like(needed).scatter_(-1, order, needed)


def repeat_groups(q: Tensor, *kv: Tensor) -> list[Tensor]:
    """K and V (B, g, S, e), each head as often as heads of q (B, h, T, e) share it: (B, h, S, e)."""
    group = q.shape[1] // kv[0].shape[1]
    return list(kv) if group == 1 else [each.repeat_interleave(group, dim=1) for each in kv]


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, h * e) -> (B, h, T, e)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(-2, -3)


def join_heads(x: Tensor) -> Tensor:
    """(B, h, T, e) -> (B, T, h * e)."""
    return x.transpose(-2, -3).flatten(-2)


def positions_like(ids: Tensor) -> Tensor:
    """(B, T) int64, of rows without padding: the columns."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
