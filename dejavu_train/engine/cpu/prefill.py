"""The dense prompt phase on a CPU: many tokens at once in plain torch, over views of the engine's own weights."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.engine.cpu.arrays import (
    BEFORE,
    BEHIND,
    LEVELS,
    MLP_DOWN,
    MLP_IN,
    MLP_UP,
    NEVER,
    QKV,
    Selectors,
    State,
)
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.families.block import activate_, causal, forward_block, turn
from dejavu_train.families.dims import Activation
from dejavu_train.ground.errors import UserError
from dejavu_train.models.finite import name_half, not_finite

HEAD_ROWS = 4096  # of the LM head at once


def fault(site: int, row: int, position: int) -> UserError:
    """What to raise where the input of norm ``site``, in order of use, is not finite. -1 = of the LM head."""
    where = name_half(site - 1) if site > 0 else "the LM head" if site < 0 else "the embedding"
    return not_finite(f"{where} gives numbers that are not finite (row {row}, position {position})")


@torch.no_grad()
def prefill(
    weights: CpuWeights, selectors: Selectors, state: State, row: int, count: int, watched: bool = False
) -> Tensor:
    """Run the first ``count`` tokens of one batch row densely.

    Writes K, V and attn_in of these positions. Layers with a second stage multiply with what their planes hold.

    Args:
        watched: look for numbers that are not finite behind every half, instead of once behind all of them.
    Returns:
        (count, d) fp32, the residual stream of these tokens after the last layer.
    Raises:
        UserError: numbers that are not finite, by layer and position.
    """
    shape, model = weights.shape, weights.model

    def norm(number: int, x: Tensor) -> Tensor:
        if watched and not (finite := x[0].square().sum(dim=1).isfinite()).all():
            raise fault(number, row, int(finite.int().argmin()))
        return _norm(x, model.norms[number], model.eps, model.centred)

    def attend(layer: int, block: Any, attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if selectors.kept[layer] >= 0:
            kept = selectors.kept[layer], row, slice(count)
            if state.attn_in.dtype == np.float32:
                state.attn_in[(*kept, slice(shape.d_model))] = attn_in[0].numpy()
            else:
                state.attn_in[(*kept, slice(shape.d_model))], state.attn_unit[kept] = whole_levels(attn_in[0])
        state.keys[layer, row, :, :, :count] = k[0].transpose(1, 2).numpy()
        state.values[layer, row, :, :count] = v[0].numpy()
        return causal(block)(attn_in, q, k, v) - torch.from_numpy(selectors.means[layer])[:, None]

    tokens = torch.from_numpy(state.tokens[row, :count]).long()
    used, place = tokens.unique(return_inverse=True)
    embedded = torch.stack([weights.rows(model.embedding + token, 1)[0] for token in used.tolist()])
    x = embedded[place][None]
    if len(model.positions):
        x += torch.from_numpy(model.positions[:count])
    if model.embedding_norm:
        x = _norm(x, model.norms[2 * shape.n_layers + 1], model.eps, model.centred)
    for layer in range(shape.n_layers):
        block = _block(weights, selectors, layer, norm)
        x = forward_block(block, x, partial(attend, layer, block))[0]
    if not bool(x.isfinite().all()):  # what is not finite stays so, layer by layer: the sum holds it
        if not watched:
            return prefill(weights, selectors, state, row, count, watched=True)
        norm(2 * shape.n_layers, x)
    return x[0]


def logits_of(weights: CpuWeights, x: Tensor, row: int, first: int) -> Tensor:
    """The logits (n, V) of the residual stream x (n, d) behind the last layer, of a row's positions from ``first`` on.

    Raises:
        UserError: numbers that are not finite.
    """
    shape, model = weights.shape, weights.model
    if not model.post_norm or model.final_norm:
        x = _norm(x, model.norms[2 * shape.n_layers], model.eps, model.centred)
    logits = torch.empty(len(x), shape.vocab_size, dtype=torch.float32)
    for start in range(0, shape.vocab_size, HEAD_ROWS):  # rows of codes are copied as numbers
        n = min(HEAD_ROWS, shape.vocab_size - start)
        logits[:, start : start + n] = F.linear(x, weights.rows(model.lm_head + start, n))
    if model.logit_cap:
        logits.div_(model.logit_cap).tanh_().mul_(model.logit_cap)
    if not bool((finite := logits.isfinite().all(dim=1)).all()):
        raise fault(-1, row, first + int(finite.int().argmin()))
    return logits


def _norm(x: Tensor, values: np.ndarray, eps: float, centred: int) -> Tensor:
    """x (..., n) normed by values (2, n), as `vector_ops.layer_norm` does."""
    weight, bias = torch.from_numpy(values)
    if centred:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps) + bias


def _block(weights: CpuWeights, selectors: Selectors, layer: int, norm: Callable[[int, Tensor], Tensor]) -> Any:
    """A layer as `forward_block` reads it."""
    shape, model = weights.shape, weights.model
    first = [int(number) for number in model.first[layer]]
    g, c, e, f = shape.n_kv_heads, shape.kv_group, shape.head_dim, shape.d_ffn

    def compared(part: int, x: Tensor) -> Tensor:
        values = model.head_norms[layer, part] if model.head_norm != NEVER else None
        if values is not None and model.head_norm == BEFORE:
            x = _norm(x, values, model.head_eps, model.centred)
        if len(model.turns):
            turns = torch.from_numpy(model.turns[: x.shape[2]]).repeat(1, 1, 2)
            x = turn(x, turns[None, :, 0], turns[None, :, 1])
        if values is not None and model.head_norm == BEHIND:
            x = _norm(x, values, model.head_eps, model.centred)
        return x

    def project(n: Tensor, _positions: Tensor | None) -> tuple[Tensor, ...]:
        rows = weights.rows(first[QKV], (c + 2) * e * g)
        heads = F.linear(n, rows, torch.from_numpy(model.qkv_bias[layer])).unflatten(-1, (g, c + 2, e))
        q, k, v = heads[..., :c, :].flatten(2, 3), heads[..., c, :], heads[..., c + 1, :]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return compared(0, q), compared(1, k), v

    def neurons(n: Tensor) -> Tensor:
        entered = F.linear(n, _first_weight(weights, selectors, layer), torch.from_numpy(model.in_bias[layer]))
        made = activate_(shape.activation, entered, shape.threshold)
        if not shape.gated:
            return made
        up = F.linear(n, weights.rows(first[MLP_UP], f), torch.from_numpy(model.up_bias[layer]))
        return made.mul_(up.relu_() if shape.activation is Activation.DRELU else up)

    return SimpleNamespace(
        norm_attn=partial(norm, 2 * layer),
        project=project,
        scaling=model.q_scaling,
        slopes=torch.from_numpy(model.slopes) if model.slopes.any() else None,
        out=lambda mixed: mixed @ weights.out_projection(layer) + torch.from_numpy(selectors.out_bias[layer]),
        norm_mlp=partial(norm, 2 * layer + 1),
        neurons=neurons,
        down=lambda y: y @ weights.rows(first[MLP_DOWN], f) + torch.from_numpy(model.down_bias[layer]),
        post_norm=bool(model.post_norm),
    )


def _first_weight(weights: CpuWeights, selectors: Selectors, layer: int) -> Tensor:
    f, fine = weights.shape.d_ffn, int(selectors.fine[layer])
    if fine < 0:
        return weights.rows(int(weights.model.first[layer, MLP_IN]), f)
    rows = slice(fine * f, (fine + 1) * f)
    whole = torch.from_numpy(selectors.whole[rows, : weights.shape.d_model])
    return whole.float().mul_(torch.from_numpy(selectors.whole_scale[rows]))


def whole_levels(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """x (n, d) fp32 as whole numbers (n, d) int16 with a unit (n) each, as `vector_ops.round_to_levels` makes them."""
    unit = x.abs().amax(dim=1, keepdim=True) / LEVELS
    unit[unit == 0] = 1
    return (x / unit).round_().to(torch.int16).numpy(), unit[:, 0].numpy()
