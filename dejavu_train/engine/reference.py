"""A decoding step's operations over lists in plain torch, with the signatures of the kernels. They may ask the host."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights, Rows
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite, add_ahead_reference
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.stages.attend import AttentionScratch, flash_decode_reference
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.stages.mlp_batch import (
    BatchActivations,
    down_batch_reference,
    up_batch_reference,
)

R = TypeVar("R")


def of_numbers(operation: Callable[..., R]) -> Callable[..., R]:
    """The operation, which then takes 4-bit rows too: as numbers in fp32, those of heads (h, d, head_dim) turned.

    It also takes a kernel's keyword `pdl`, which means nothing to plain torch.
    """

    def numbers(given: Any) -> Any:
        if isinstance(given, Linear):
            return Linear(numbers(given.weight), given.bias)
        if isinstance(given, MlpWeights):
            gate = None if given.gate is None else numbers(given.gate)
            return replace(given, up=numbers(given.up), down=numbers(given.down), gate=gate)
        if not isinstance(given, Int4Rows):
            return given
        whole = given.dense()
        return Rows(whole.transpose(0, 1).flatten(1) if whole.dim() == 3 else whole)

    @functools.wraps(operation)
    def call(*given: Any, pdl: bool = False, **options: Any) -> R:
        return operation(*map(numbers, given), **options)

    return call


def layer_norm(x: Tensor, ln: LayerNormWeights, out: Tensor) -> None:
    """See `dejavu_train.kernels.stages.norm.layer_norm`."""
    out.copy_(layer_norm_reference(x, ln, out.dtype))


def pack(rows: Selection, out: PackedSelection) -> None:
    """See `dejavu_train.kernels.mlp.pack.pack`."""
    ids = rows.indices()
    out.ids[: len(ids)] = ids.int()
    out.count.fill_(len(ids))


def attend_pack(
    step: HeadStep,
    out: Tensor,
    scratch: AttentionScratch,
    neurons: tuple[Selection, PackedSelection],
    mean: Tensor | None = None,
) -> None:
    """See `dejavu_train.kernels.lookahead.attend_pack.attend_pack`."""
    flash_decode_reference(step, out, mean=mean)
    pack(*neurons)


def listed_mlp(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    residual: Tensor,
    rows: PackedSelection,
    out: Tensor,
    partials: Tensor | None = None,
    early: str | None = None,
) -> None:
    """See `kernels.stages.mlp.mlp`."""
    ids = rows.ids[: int(rows.count)].long()
    n = x if ln is None else layer_norm_reference(x, ln, weights.up.weight.parts()[0].dtype)

    def taken(linear: Linear) -> Linear:
        return Linear.of(linear.weight.parts()[0][ids], linear.bias[ids])

    gate = None if weights.gate is None else taken(weights.gate)
    h = hidden_reference(n.float(), replace(weights, up=taken(weights.up), gate=gate))
    out.copy_(h @ weights.down.weight.parts()[0][ids].float() + weights.down.bias.float() + residual)


def mlp_ahead(
    x: Tensor,
    ln: LayerNormWeights,
    weights: MlpWeights,
    rows: PackedSelection,
    out: Tensor,
    ahead: LateSite,
    partials: Tensor | None = None,
    early: str | None = None,
) -> None:
    """See `dejavu_train.kernels.lookahead.mlp_ahead.mlp_ahead`."""
    listed_mlp(x, ln, weights, x, rows, out)
    add_ahead_reference(x, out, ahead)


def up_batch(x: Tensor, weights: MlpWeights, selection: Selection, out: BatchActivations) -> None:
    """See `dejavu_train.kernels.stages.mlp_batch.up_batch`."""
    unit = kept_unit(weights, out.values.dtype)
    h = (up_batch_reference(x, weights, selection.to_mask(len(x))) * unit).to(out.values.dtype)
    ids = selection.indices()
    out.ids[: len(ids)] = ids.int()
    out.values[: len(ids), : len(x)] = h[:, ids].T
    out.count.fill_(len(ids))


def down_batch(rows: BatchActivations, weights: MlpWeights, residual: Tensor, out: Tensor) -> None:
    """See `dejavu_train.kernels.stages.mlp_batch.down_batch`."""
    h = rows.to_dense(len(out)) / kept_unit(weights, rows.values.dtype)
    out.copy_(down_batch_reference(h, weights, residual))


def hidden_row(x: Tensor, ln: LayerNormWeights, weights: MlpWeights, out: Tensor, pdl: bool = False) -> None:
    """See `dejavu_train.kernels.stages.hidden.hidden_row`. Rows of fp32 hold squares as they are."""
    up = weights.up.weight
    dtype = torch.float32 if up.format is Format.INT4 else up.numbers.dtype
    h = hidden_reference(layer_norm_reference(x, ln, dtype).float(), weights)
    out.copy_(h * kept_unit(weights, out.dtype))


def hidden_tokens(
    x: Tensor,
    weights: MlpWeights,
    listed: tuple[PackedSelection, Tensor] | None = None,
    pdl: bool = False,
) -> Tensor:
    """See `dejavu_train.kernels.stages.hidden.hidden_tokens`. The bits alone say what is selected."""
    h = hidden_reference(x.float(), weights) * kept_unit(weights, torch.float16)
    if listed is not None:
        h = h.masked_fill((listed[1] >> torch.arange(len(x), device=x.device)[:, None]) & 1 == 0, 0.0)
    return h


def hidden_products(x: Tensor, ln: LayerNormWeights, weights: MlpWeights, pdl: bool = False) -> Tensor:
    """See `dejavu_train.kernels.dense.dense_batch.hidden_products`."""
    up = weights.up.weight
    dtype = torch.float32 if up.format is Format.INT4 else up.numbers.dtype
    h = hidden_reference(layer_norm_reference(x, ln, dtype).float(), weights) * kept_unit(weights, dtype)
    return h.to(dtype)


def dense_add(
    y: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    transposed: bool = False,
    unit: float = 1.0,
) -> None:
    """See `dejavu_train.kernels.dense.dense_batch.dense_add`."""
    (numbers,) = weight.parts()
    product = y.to(numbers.dtype) @ numbers if transposed else F.linear(y.to(numbers.dtype), numbers)
    out.copy_(product.float() / unit + bias.float() + residual)
