"""The dense prompt phase on a CPU: many tokens at once in plain torch, over views of the engine's own weights."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.engine.cpu.arrays import LEVELS, MLP_DOWN, MLP_UP, QKV, Selectors, State
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.errors import UserError
from dejavu_train.families.block import forward_block
from dejavu_train.families.opt import POSITIONS_OFFSET
from dejavu_train.models.finite import name_half, not_finite


def fault(site: int, row: int, position: int) -> UserError:
    """What to raise where the input of LayerNorm ``site``, in order of use, is not finite. -1 = of the LM head."""
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
        (d,) fp32, the residual stream of the last of these tokens after the last layer.
    Raises:
        UserError: numbers that are not finite, by layer and position.
    """
    shape, model = weights.shape, weights.model

    def norm(number: int, x: Tensor) -> Tensor:
        if watched and not (finite := x.square().sum(dim=1).isfinite()).all():
            raise fault(number, row, int(finite.int().argmin()))
        weight, bias = torch.from_numpy(model.norms[number])
        return F.layer_norm(x, weight.shape, weight, bias, model.eps)

    def attend(layer: int, attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if selectors.kept[layer] >= 0:
            kept = selectors.kept[layer], row, slice(count)
            if state.attn_in.dtype == np.float32:
                state.attn_in[(*kept, slice(shape.d_model))] = attn_in.numpy()
            else:
                state.attn_in[(*kept, slice(shape.d_model))], state.attn_unit[kept] = whole_levels(attn_in)
        state.keys[layer, row, :, :, :count] = k.transpose(1, 2).numpy()
        state.values[layer, row, :, :count] = v.numpy()
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return mixed - torch.from_numpy(selectors.means[layer])[:, None]

    tokens = torch.from_numpy(state.tokens[row, :count]).long()
    used, place = tokens.unique(return_inverse=True)
    embedded = torch.stack([weights.rows(model.embedding + token, 1)[0] for token in used.tolist()])
    x = embedded[place] + torch.from_numpy(model.positions[POSITIONS_OFFSET : POSITIONS_OFFSET + count])
    for layer in range(shape.n_layers):
        x = forward_block(_block(weights, selectors, layer, norm), x, partial(attend, layer))[0]
    if not bool(x.isfinite().all()):  # what is not finite stays so, layer by layer: the sum holds it
        if not watched:
            return prefill(weights, selectors, state, row, count, watched=True)
        norm(2 * shape.n_layers, x)
    return x[-1]


def _block(weights: CpuWeights, selectors: Selectors, layer: int, norm: Callable[[int, Tensor], Tensor]) -> Any:
    """A layer as `forward_block` reads it."""
    shape, model = weights.shape, weights.model
    first = [int(number) for number in model.first[layer]]

    def project(n: Tensor, _positions: Tensor | None) -> tuple[Tensor, ...]:
        heads = F.linear(n, weights.rows(first[QKV], 3 * shape.d_model), torch.from_numpy(model.qkv_bias[layer]))
        return tuple(heads.view(len(n), shape.n_heads, 3, shape.head_dim).permute(2, 1, 0, 3))

    return SimpleNamespace(
        norm_attn=partial(norm, 2 * layer),
        project=project,
        scaling=1.0,  # by `scaled_dot_product_attention`
        out=lambda mixed: mixed @ weights.out_projection(layer) + torch.from_numpy(selectors.out_bias[layer]),
        norm_mlp=partial(norm, 2 * layer + 1),
        neurons=lambda n: F.linear(
            n, _up_weight(weights, selectors, layer), torch.from_numpy(model.up_bias[layer])
        ).relu_(),
        down=lambda y: y @ weights.rows(first[MLP_DOWN], shape.d_ffn) + torch.from_numpy(model.down_bias[layer]),
    )


def _up_weight(weights: CpuWeights, selectors: Selectors, layer: int) -> Tensor:
    f, fine = weights.shape.d_ffn, int(selectors.fine[layer])
    if fine < 0:
        return weights.rows(int(weights.model.first[layer, MLP_UP]), f)
    rows = slice(fine * f, (fine + 1) * f)
    whole = torch.from_numpy(selectors.whole[rows, : weights.shape.d_model])
    return whole.float().mul_(torch.from_numpy(selectors.whole_scale[rows]))


def whole_levels(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """x (n, d) fp32 as whole numbers (n, d) int16 with a unit (n) each, as `vector_ops.round_to_levels` makes them."""
    unit = x.abs().amax(dim=1, keepdim=True) / LEVELS
    unit[unit == 0] = 1
    return (x / unit).round_().to(torch.int16).numpy(), unit[:, 0].numpy()
