"""The decode step's operations from select, gather and scatter in plain torch, with the signatures of the kernels."""

from typing import Any

import torch
from torch import Tensor

from kernels.cascade import CascadeWeights, cascade_reference
from kernels.gather_gemv import gather_gemv_reference
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.scatter_gemv import scatter_gemv_reference
from kernels.select import PredictorWeights, Selection, predict_select_reference


def predict_select(
    x: Tensor,
    predictor: PredictorWeights,
    threshold: Tensor,
    out: Selection,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    top_k: int | None = None,
    hidden: Tensor | None = None,
    normalised_out: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """See `kernels.select.predict_select`."""
    if ln is not None:
        x = layer_norm_reference(x, ln, torch.float32 if normalised_out is None else normalised_out.dtype)
    if normalised_out is not None:
        normalised_out.copy_(x)
    out.set_mask(predict_select_reference(x, predictor, threshold, None, row_state, top_k))


def gather_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection: Selection | None,
    activation: str,
    out: Tensor,
    ln: LayerNormWeights | None = None,
    pdl: bool = False,
) -> None:
    """See `kernels.gather_gemv.gather_gemv`; `out` is dense, zero where a neuron is not selected."""
    if ln is not None:
        x = layer_norm_reference(x, ln, weight.dtype)
    mask = None if selection is None else selection.to_mask(len(x))
    out.copy_(gather_gemv_reference(x, weight, bias, mask, activation))


def layer_norm(x: Tensor, ln: LayerNormWeights, out: Tensor, pdl: bool = False) -> None:
    """See `kernels.layer_norm.layer_norm`."""
    out.copy_(layer_norm_reference(x, ln, out.dtype))


def cascade(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    out: Tensor,
    row_state: Tensor | None = None,
    pdl: bool = False,
    scratch: Any = None,
) -> None:
    """See `kernels.cascade.cascade`; the list becomes that of what passed."""
    y, passed = cascade_reference(x, weights, selection.to_mask(len(x)), row_state)
    out.copy_(y)
    selection.set_mask(passed)


def scatter_gemv(
    h: Tensor,
    weight_t: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    selection: Selection | None,
    out: Tensor,
    rows_per_id: int = 1,
    scratch: Any = None,
    pdl: bool = False,
) -> None:
    """See `kernels.scatter_gemv.scatter_gemv`."""
    mask = None if selection is None else selection.to_mask(len(h)).repeat_interleave(rows_per_id, dim=1)
    out.copy_(scatter_gemv_reference(h, weight_t, bias, residual, mask))
