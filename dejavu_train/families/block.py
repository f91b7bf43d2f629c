"""One decoder layer spelled out: what every dense pass in torch runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``attend(attn_in, q, k, v)``: (B, T, d) and three times (B, h, T, e) -> (B, h, T, e), the heads' outputs."""


def forward_block(block: Any, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """The residual stream behind a layer, and what its neurons gave.

    Args:
        block: ``BlockParts``, or an object with the same names whose maps can be called.
        hidden: (B, T, d); attend: gives the heads' outputs, and keeps K and V where somebody needs them.
    Returns: (B, T, d), (B, T, n).
    """
    hidden = hidden + block.out(mix_heads(block, block.norm_attn(hidden), attend))
    neurons = block.activate(block.up(block.norm_mlp(hidden)))
    return hidden + block.down(neurons), neurons


def mix_heads(block: Any, attn_in: Tensor, attend: Attend) -> Tensor:
    """What the output projection reads, (B, T, h * e), for attn_in (B, T, d)."""
    q, k, v = block.project(attn_in)
    return join_heads(attend(attn_in, q * block.scaling, k, v))


def causal(_attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over rows without padding, or with padding at their ends."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, h * e) -> (B, h, T, e)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(-2, -3)


def join_heads(x: Tensor) -> Tensor:
    """(B, h, T, e) -> (B, T, h * e)."""
    return x.transpose(-2, -3).flatten(-2)


def positions_like(ids: Tensor) -> Tensor:
    """(B, T) int64, of rows without padding: the columns."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
