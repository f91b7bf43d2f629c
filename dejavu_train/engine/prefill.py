"""The dense prompt phase: many tokens at once in plain torch, K/V written into the engine's static caches.

Matrices of 4 bits are written out in the model's dtype one after another. Each is gone before the next one.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families.block import forward_block
from dejavu_train.families.opt import POSITIONS_OFFSET
from dejavu_train.kernels.common.layer_norm import layer_norm_reference

TOKENS_AT_ONCE = 8192  # bounds the memory of a batch of long prompts


@torch.no_grad()
def prefill(
    weights: DecodeWeights, tokens: Tensor, counts: Sequence[int], k_cache: list[Tensor], v_cache: list[Tensor]
) -> Tensor:
    """Run the first counts[b] tokens of each row densely.

    Args:
        tokens: (B, T) integers. counts: B numbers of tokens, 0 = nothing to do for this row.
        k_cache, v_cache: per layer (>= B, h, T, head_dim). rows below B are written up to counts[b].
    Returns:
        (B, d) fp32, the residual stream of each row's last token after the last layer (zeros where counts[b] is 0).
    """
    last = torch.zeros(len(counts), weights.shape.d_model, device=tokens.device, dtype=torch.float32)
    rows = [b for b, count in enumerate(counts) if count > 0]
    size = max(1, TOKENS_AT_ONCE // max(counts))
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        last[part] = _run(weights, tokens, part, [counts[b] for b in part], k_cache, v_cache)
    return last


def _run(
    weights: DecodeWeights,
    tokens: Tensor,
    rows: list[int],
    counts: list[int],
    k_cache: list[Tensor],
    v_cache: list[Tensor],
) -> Tensor:
    longest = max(counts)
    ids = tokens[rows, :longest].long()
    x = weights.embedding[ids].float() + weights.positions[POSITIONS_OFFSET : POSITIONS_OFFSET + longest].float()

    def attend(keys: Tensor, values: Tensor, _attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for j, (b, count) in enumerate(zip(rows, counts, strict=True)):
            keys[b, :, :count], values[b, :, :count] = k[j, :, :count], v[j, :, :count]
        # Rows are padded at their ends, where causal attention from real tokens never looks.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for layer, keys, values in zip(weights.layers, k_cache, v_cache, strict=True):
        x = forward_block(dense_block(weights, layer), x, partial(attend, keys, values))[0]
    return x[torch.arange(len(rows), device=x.device), torch.tensor(counts, device=x.device) - 1]


def dense_block(weights: DecodeWeights, layer: LayerWeights) -> Any:
    """A layer as `forward_block` reads it. Residual sums are fp32, products in the weights' dtype."""
    h, hd, dtype = weights.shape.n_heads, weights.shape.head_dim, weights.embedding.dtype

    def project(n: Tensor, _positions: Tensor | None) -> tuple[Tensor, ...]:
        qkv = layer.qkv.weight.dense(dtype).view(3 * h * hd, -1)
        heads = F.linear(n, qkv, layer.qkv.bias.flatten()).unflatten(-1, (h, 3, hd))
        return tuple(heads[..., part, :].transpose(-2, -3) for part in range(3))

    def down(neurons: Tensor) -> Tensor:
        down = layer.down.weight.dense(dtype)
        product = neurons @ down if layer.down_transposed else F.linear(neurons, down)
        return product.float() + layer.down.bias.float()

    return SimpleNamespace(
        norm_attn=lambda x: layer_norm_reference(x, layer.norm1, dtype),
        project=project,
        scaling=1.0,  # by `scaled_dot_product_attention`
        out=lambda mixed: F.linear(mixed, layer.whole_out(dtype)).float() + layer.out.bias.float(),
        norm_mlp=lambda x: layer_norm_reference(x, layer.norm2, dtype),
        neurons=lambda n: F.linear(n, layer.up.weight.dense(dtype), layer.up.bias).relu_(),
        down=down,
    )
