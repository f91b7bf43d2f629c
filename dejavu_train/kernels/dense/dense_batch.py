"""Dense layers of several batch rows: cuBLAS does the products, a small kernel what lies between them.

    q, k_cache, v_cache <- n W^T + b                      n = LayerNorm(x), head-major rows (`qkv_batch`)
    out = residual + bias + y W^T  or  y W                (`dense_add`)
    hidden = act(n W^T + b)                               (`dense_hidden`)

    y[b, i] = act(sum_j code[i, j] scale[i, j // group] x[b, j] + bias[i])            `int4_linear`, weight (n, d)

B > 1 rows x (B, d) fp32. Weights fp16, bf16 or fp32. Products accumulate in fp32 and are rounded to the weights' dtype.

Up to eight tokens x (B, .) fp16 multiply with 4-bit rows, which are read once and as codes. Products are exact, sums in
fp32. Programs walk over the rows, sixteen at a time, with all tokens in their registers (`stages.int4_tokens`), where
one token takes the place of two. Neurons that are selected have `stages.hidden`, rows by head
`attention.out_projection`. fc2, whose rows are neurons, has a kernel of its own (`int4_fc2`). More tokens than eight
are worth writing the matrix out once in fp16 (`unpack`).
"""

from typing import Any, NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.kernels.common.activation import activation_of, activation_reference
from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_int4, check_tensor
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.dense.unpack import numbers_of
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights
from dejavu_train.kernels.stages.hidden import hidden_tokens, kept_unit
from dejavu_train.kernels.stages.listed import keyed
from dejavu_train.kernels.stages.norm import layer_norm
from dejavu_train.kernels.stages.rows import launch_tokens, launch_walk
from dejavu_train.kernels.stages.sink import LinearSink, QkvSink, Sink


@triton.jit
def _walk_products(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    lines = tl.program_id(1) * how.block + tl.arange(0, how.block)
    inside = lines < n_rows
    values = tl.load(x + b * n_rows + lines, mask=inside, other=0.0).to(tl.float32) * (1 / how.unit)
    ahead = sink.ahead(sink, lines, b, inside, inside, n_rows)
    sink.put(sink, values, ahead, lines, b, inside, n_rows)


@keyed
class ProductWalk(NamedTuple):
    """Over products (B, n) that are there. unit: what they are kept times. block: of a program."""

    unit: float = 1.0
    block: int = 1024
    walk: Any = _walk_products


def sink_products(products: Tensor, sink: Sink, pdl: bool, unit: float = 1.0) -> None:
    """Products (B, n) that are there go where the sink says."""
    batch, n = products.shape
    how = ProductWalk(unit)
    launch_walk((batch, triton.cdiv(n, how.block)), products, None, (), sink, None, n, how, pdl, num_warps=4)


def _normalised(x: Tensor, ln: LayerNormWeights, dtype: torch.dtype, pdl: bool) -> Tensor:
    n = torch.empty(x.shape, dtype=dtype, device=x.device)
    layer_norm(x, ln, n, pdl)
    return n


def takes(weight: Matrix, batch: int) -> TypeGuard[Int4Rows]:
    """Whether these kernels multiply so many tokens with this matrix."""
    return weight.format is Format.INT4 and batch <= MOST_TOKENS


def int4_linear(
    x: Tensor, weight: Int4Rows, bias: Tensor | None = None, activation: str = "none", pdl: bool = False
) -> Tensor:
    """x (B, d) fp16, weight (..., d) -> (B, n) fp16. Errors: shapes, dtypes, a CPU tensor."""
    n = weight.words.shape[:-1].numel()
    check_int4("weight", weight, (*weight.shape[:-1], x.shape[1]), x)
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    y = torch.empty(len(x), n, dtype=torch.float16, device=x.device)
    launch_tokens(x, weight, LinearSink(y, bias, activation=activation_of(activation)), pdl)
    return y


def qkv_batch(x: Tensor, ln: LayerNormWeights, weights: Linear, step: HeadStep, pdl: bool = False) -> None:
    """Writes q (B, h, head_dim) fp32 and the caches at position. weight and bias head-major, as in `qkv`."""
    sink = QkvSink.of(step, weights.bias)
    if takes(weights.weight, len(x)):
        launch_tokens(_normalised(x, ln, torch.float16, pdl), weights.weight, sink, pdl)
        return
    rows = dense_hidden(x, ln, weights.weight, None, "none", pdl)
    sink_products(rows, sink, pdl)


def dense_hidden(
    x: Tensor, ln: LayerNormWeights, weight: Matrix, bias: Tensor | None, activation: str, pdl: bool = False
) -> Tensor:
    """(B, n) in the weight's dtype, of 4-bit rows fp16: act(LayerNorm(x) W^T + b), weight (..., d) of n rows."""
    if takes(weight, len(x)):
        return int4_linear(_normalised(x, ln, torch.float16, pdl), weight, bias, activation, pdl)
    numbers = numbers_of(weight, pdl)
    y = F.linear(_normalised(x, ln, numbers.dtype, pdl), numbers.view(-1, numbers.shape[-1]), bias)
    return y.relu_() if activation == "relu" else activation_reference(y, activation)


def hidden_products(x: Tensor, ln: LayerNormWeights, weights: MlpWeights, pdl: bool = False) -> Tensor:
    """(B, n) in the weights' dtype, of 4-bit rows fp16: the hidden values of `stages.hidden`, x (B, d) fp32."""
    if takes(weights.up.weight, len(x)):
        return hidden_tokens(_normalised(x, ln, torch.float16, pdl), weights, pdl=pdl)
    form, up = weights.hidden, weights.up.weight
    dtype = torch.float16 if up.format is Format.INT4 else up.numbers.dtype
    n: Tensor | None = None
    values: list[Tensor] = []
    for linear in (weights.up,) if weights.gate is None else (weights.gate, weights.up):
        numbers = numbers_of(linear.weight, pdl)
        n = _normalised(x, ln, dtype, pdl) if n is None else n
        y = F.linear(n, numbers, linear.bias)
        second = bool(values)
        if form.activation == "relu" and not form.threshold and not second:
            y.relu_()
        elif not second or form.both:
            unit = 1.0 if second else kept_unit(weights, dtype)
            y = (activation_reference(y.float(), form.activation, form.threshold) * unit).to(dtype)
        values.append(y)
    return values[0] if len(values) == 1 else torch.where(values[0] == 0, 0.0, values[0] * values[1]).to(dtype)


def dense_add(
    y: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    transposed: bool = False,
    pdl: bool = False,
    unit: float = 1.0,
) -> None:
    """out (B, d) fp32 = residual + bias + y W^T, weight (d, n), or y W with a transposed weight (n, d).

    y is stored times unit.
    Codes are written out as numbers: for fc2 of few rows see `int4_fc2`, for heads `project_heads`.
    """
    numbers = numbers_of(weight, pdl)
    y = y.to(numbers.dtype)
    product = y @ numbers if transposed else F.linear(y, numbers)
    sink_products(product, LinearSink(out, bias, residual), pdl, unit)
