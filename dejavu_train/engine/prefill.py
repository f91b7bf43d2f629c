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

from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families.block import alibi, forward_block, repeat_groups
from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.positions import Alibi, Rotary, turned_reference
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.hidden import kept_unit

HEAD_ROWS = 4096  # of the LM head at once
TOKENS_AT_ONCE = 8192  # bounds the memory of a batch of long prompts
ONE_GPU = Join()


@torch.no_grad()
def prefill(
    weights: DecodeWeights,
    tokens: Tensor,
    counts: Sequence[int],
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    join: Join = ONE_GPU,
) -> Tensor:
    """Run the first counts[b] tokens of each row densely.

    Args:
        tokens: (B, T) integers. counts: B numbers of tokens, 0 = nothing to do for this row.
        k_cache, v_cache: per layer (>= B, g, T, head_dim). rows below B are written, see `run_prompts`.
        join: of the outputs of the halves of layers.
    Returns:
        (B, d) fp32, the residual stream of each row's last token after the last layer (zeros where counts[b] is 0).
    """
    last = torch.zeros(len(counts), weights.shape.d_model, device=tokens.device, dtype=torch.float32)
    rows = [b for b, count in enumerate(counts) if count > 0]
    size = max(1, TOKENS_AT_ONCE // max(counts))
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        longest = max(counts[b] for b in part)
        numbers, ends = torch.tensor([part, [counts[b] - 1 for b in part]], device=tokens.device)
        last[numbers] = run_prompts(weights, tokens[numbers, :longest], numbers, ends, k_cache, v_cache, join)
    return last


def run_prompts(
    weights: DecodeWeights,
    ids: Tensor,
    rows: Tensor,
    ends: Tensor,
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    join: Join = ONE_GPU,
) -> Tensor:
    """Run prompts that are filled up to one length. Whatever stands behind a prompt changes nothing of it.

    Args:
        ids: (n, T) integers. rows, ends: (n,) int64, of the caches, and positions of last tokens.
        k_cache, v_cache: per layer (B, g, >= T, head_dim). T positions are written. What lies behind a row's last token
            is written again by the steps, before anything reads it.
    Returns:
        (n, d) fp32, the residual stream of each last token after the last layer.
    """
    x = run_tokens(weights, ids, rows, k_cache, v_cache, join)
    return x[torch.arange(len(x), device=x.device), ends]


def run_tokens(
    weights: DecodeWeights,
    ids: Tensor,
    rows: Tensor,
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    join: Join = ONE_GPU,
) -> Tensor:
    """The same, (n, T, d) fp32 of all tokens."""
    ids = ids.long()
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device).expand_as(ids)

    bias = None
    if isinstance(weights.placed, Alibi):
        ahead = positions[0] > positions[0][:, None]
        bias = alibi(weights.placed.slopes, positions, positions).masked_fill(ahead, -torch.inf)

    def attend(keys: Tensor, values: Tensor, _attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[rows, :, :length], values[rows, :, :length] = k, v
        # Rows are padded at their ends, where causal attention from real tokens never looks.
        k, v = repeat_groups(q, k, v)
        if bias is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))

    x = embedded(weights, ids, positions)
    for layer, keys, values in zip(weights.layers, k_cache, v_cache, strict=True):
        x = forward_block(dense_block(weights, layer, join), x, partial(attend, keys, values), positions)[0]
    return x


def logits_of(weights: DecodeWeights, x: Tensor) -> Tensor:
    """The logits (n, V) fp32 of the residual stream x (n, d) behind the last layer. Products are fp32 as in kernels."""
    dtype, head = weights.embedding.dtype, weights.lm_head
    n = (x if weights.final_norm is None else layer_norm_reference(x, weights.final_norm, dtype)).to(dtype).float()
    logits = torch.empty(len(x), weights.shape.vocab_size, dtype=torch.float32, device=x.device)
    for first in range(0, logits.shape[1], HEAD_ROWS):
        part = slice(first, first + HEAD_ROWS)
        logits[:, part] = F.linear(n, type(head)(*(each[part] for each in head.parts())).dense())
    if cap := weights.shape.logit_cap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits


def embedded(weights: DecodeWeights, ids: Tensor, positions: Tensor) -> Tensor:
    """(..., d) fp32, what the first layer reads, of tokens ids (...) at positions (...)."""
    x = weights.embedding[ids].float()
    if weights.positions is not None:
        x = x + weights.positions[positions].float()
    return x if weights.embedding_norm is None else layer_norm_reference(x, weights.embedding_norm)


def dense_block(weights: DecodeWeights, layer: LayerWeights, join: Join = ONE_GPU) -> Any:
    """A layer as `forward_block` reads it. Residual sums are fp32, products in the weights' dtype.

    Squares of 256 and more are no fp16 numbers: hidden values are stored times `kept_unit`.
    """
    dims, dtype = weights.shape, weights.embedding.dtype
    share, unit = dims.kv_group, kept_unit(layer.mlp, dtype)
    turns = weights.placed if isinstance(weights.placed, Rotary) else None
    normed = torch.float32 if dims.post_norm else dtype  # the residual stream itself, or what products read

    def compared(x: Tensor, norm: LayerNormWeights | None, positions: Tensor) -> Tensor:
        """Queries or keys (B, h, T, e), in fp32 where they are turned, as the kernels turn them."""
        if norm is not None:
            x = layer_norm_reference(x, norm, torch.float32)
        if turns is not None:
            x = turned_reference(x.float(), turns, positions[:, None].expand(x.shape[:-1]))
        return x.to(dtype)

    def project(n: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        n, qkv = n.to(dtype), layer.qkv.weight.dense(dtype).flatten(0, 2)
        # (B, g, r + 2, T, e)
        rows = F.linear(n, qkv, layer.qkv.bias.flatten()).unflatten(-1, layer.qkv.bias.shape).movedim(-4, -2)
        q, k, v = rows[:, :, :share].flatten(1, 2), rows[:, :, share], rows[:, :, share + 1]
        norms = (None, None) if layer.head_norms is None else (layer.head_norms.q, layer.head_norms.k)
        return compared(q, norms[0], positions), compared(k, norms[1], positions), v

    def values(linear: Linear, n: Tensor, activation: str, scale: float = 1.0) -> Tensor:
        x = F.linear(n.to(dtype), linear.weight.dense(dtype), linear.bias)
        if activation == "relu" and not layer.hidden.threshold:
            return x.relu_()
        return (activation_reference(x.float(), activation, layer.hidden.threshold) * scale).to(dtype)

    def neurons(n: Tensor) -> Tensor:
        form = layer.hidden
        if layer.gate is None:
            return values(layer.up, n, form.activation, unit)
        gate, up = (
            values(layer.gate, n, form.activation, unit),
            values(layer.up, n, form.activation if form.both else "none"),
        )
        return gate.mul_(up)

    def down(neurons: Tensor) -> Tensor:
        down = layer.down.weight.dense(dtype)
        product = neurons @ down if layer.down_transposed else F.linear(neurons, down)
        return join.total(product.float() / unit + layer.down.bias.float())

    return SimpleNamespace(
        post_norm=dims.post_norm,
        norm_attn=lambda x: layer_norm_reference(x, layer.behind[0] or layer.norm1, normed),
        project=project,
        scaling=1.0,  # by `scaled_dot_product_attention`
        out=lambda mixed: join.total(F.linear(mixed, layer.whole_out(dtype)).float() + layer.out.bias.float()),
        norm_mlp=lambda x: layer_norm_reference(x, layer.behind[1] or layer.norm2, normed),
        neurons=neurons,
        down=down,
    )
