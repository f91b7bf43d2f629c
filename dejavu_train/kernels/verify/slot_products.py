"""The matrix products of verification: eight slots, each a function of its own input alone.

    out[i] = residual[i] + bias + W x[i]                                                        `slot_linear`
    q, k, v at position[i] <- W x[i] + bias, head-major rows, as in `qkv`                       `slot_qkv`
    y[i]   = hidden values of `stages.hidden`, of all neurons                                   `slot_hidden`

x (8, d) in the weights' dtype, of 4-bit rows fp16. Rows of numbers have `slot_walk`. Rows of 4 bits are multiplied by
`stages.rows`, with eight tokens always: a token has its own columns of the tensor cores there as well. Where rows of 4
bits are neurons, none is left out. Which neurons are zero for other slots would change the order of a slot's sums.
Rows of numbers that are neurons have `mlp.live_down`, whose order is that of the neurons.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.kernels.common.checks import check_device, check_projection, check_rows, check_shape, check_tensor
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.limits import takes_down
from dejavu_train.kernels.dense.unpack import numbers_of
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights, Rows
from dejavu_train.kernels.mlp.int4_fc2 import int4_fc2
from dejavu_train.kernels.stages.hidden import hidden_passes, kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import LinearSink, QkvSink, Sink, qkv_sink_reference
from dejavu_train.kernels.verify.slot_walk import SLOTS, ProductScratch, launch_slots


def _check(x: Tensor, weight: Matrix, shape: tuple[int, ...]) -> None:
    check_device("x", x)
    dtype = torch.float16 if weight.format is Format.INT4 else weight.numbers.dtype
    check_tensor("x", x, (SLOTS.value, x.shape[-1]), (dtype,), x)
    check_rows("weight", weight, shape, x)


def _launch(x: Tensor, weight: Matrix, sink: Sink, scratch: ProductScratch, pdl: bool) -> None:
    if weight.format is Format.INT4:
        launch_tokens(x, weight, sink, pdl)
    else:
        launch_slots(x, weight, sink, scratch, False, 1.0, pdl)


def slot_linear_reference(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    scratch: ProductScratch | None,
    turned: bool = False,
    unit: float = 1.0,
) -> None:
    """Plain torch, of numbers."""
    (numbers,) = weight.parts()
    product = F.linear(x.to(numbers.dtype) / unit, numbers.T if turned else numbers).to(out.dtype)
    product = product if bias is None else product + bias.to(out.dtype)
    out.copy_(product if residual is None else product + residual)


def slot_linear(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    scratch: ProductScratch,
    turned: bool = False,
    unit: float = 1.0,
    pdl: bool = False,
) -> None:
    """out, residual (8, n) fp32. weight (n, d), or turned (d, n), rows of 4 bits also (h, n, head_dim), a scale a row.

    x is kept times unit. Errors: shapes, dtypes, groups, a CPU tensor.
    """
    n = out.shape[1]
    check_tensor("out", out, (SLOTS.value, n), (torch.float32,), x)
    if residual is not None:
        check_tensor("residual", residual, (SLOTS.value, n), (torch.float32,), x)
    by_head = weight.format is Format.INT4 and len(weight.shape) == 3
    d = x.shape[1]
    _check(x, weight, (weight.shape[0], n, weight.shape[2]) if by_head else (d, n) if turned else (n, d))
    sink = LinearSink(out, bias, residual)
    if weight.format is not Format.INT4:
        launch_slots(x, weight, sink, scratch, turned, unit, pdl)
    elif not turned:
        launch_tokens(x, weight, sink, pdl, segments=weight.shape[0] if by_head else 1)
    elif takes_down(weight.group, n, SLOTS.value) and residual is not None and bias is not None:
        int4_fc2(x, weight, bias, residual, out, scratch.sums, pdl, unit, every=True)
    else:
        launch_slots(x, Rows(numbers_of(weight, pdl)), sink, scratch, turned, unit, pdl)


def slot_qkv_reference(x: Tensor, weights: Linear, step: HeadStep, scratch: ProductScratch | None) -> None:
    """Plain torch, of numbers."""
    (numbers,) = weights.weight.parts()
    products = F.linear(x.to(numbers.dtype), numbers.flatten(0, -2))
    qkv_sink_reference(products, weights.bias, step)


def slot_qkv(x: Tensor, weights: Linear, step: HeadStep, scratch: ProductScratch, pdl: bool = False) -> None:
    """q (8, h * share, head_dim), and the cache at position (8) int32, weight head-major as in `qkv`.

    step.cache: of one sequence, or of eight. Slots at one position of one sequence must have one input.

    Errors: shapes, dtypes, head dims, groups, a CPU tensor.
    """
    check_projection(x, weights, step, slots=True)
    check_shape("q", step.q, SLOTS.value, *step.q.shape[1:])
    _check(x, weights.weight, weights.weight.shape)
    _launch(x, weights.weight, QkvSink.of(step, weights.bias), scratch, pdl)


def slot_hidden_reference(x: Tensor, weights: MlpWeights, y: Tensor, scratch: ProductScratch | None) -> None:
    """Plain torch, of numbers."""
    y.copy_(hidden_reference(x.float(), weights) * kept_unit(weights, y.dtype))


def slot_hidden(x: Tensor, weights: MlpWeights, y: Tensor, scratch: ProductScratch, pdl: bool = False) -> None:
    """y (8, n) in x's dtype, up and gate (n, d). Errors: shapes, dtypes, groups, a CPU tensor."""
    n, d = weights.up.weight.shape
    check_tensor("y", y, (SLOTS.value, n), (x.dtype,), x)
    for weight, sink in hidden_passes(weights, y):
        _check(x, weight, (n, d))
        _launch(x, weight, sink, scratch, pdl)
