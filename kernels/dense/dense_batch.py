"""Dense layers of several batch rows: cuBLAS does the products, two small kernels what lies between them.

    q, k_cache, v_cache <- n W^T + b                      n = LayerNorm(x), head-major rows (`qkv_batch`)
    out = residual + bias + y W^T  or  y W                (`dense_add`)
    hidden = act(n W^T + b)                               (`dense_hidden`)

B > 1 rows x (B, d) fp32. Weights fp16, bf16 or fp32. Products accumulate in fp32 and are rounded to the weights' dtype.
Up to eight rows multiply with 4-bit rows as they are (`int4_batch`). For more these are written out in fp16 first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.int4_numbers import numbers_of
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm
from dejavu_train.kernels.dense.int4_batch import int4_linear, int4_qkv, takes
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights
from dejavu_train.kernels.stages.hidden import hidden_tokens, kept_unit
from dejavu_train.kernels.stages.sink import QkvSink

BLOCK = 1024


@triton.jit
def _split_kernel(rows, sink, n_rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    lines = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lines < n_rows
    values = tl.load(rows + b * n_rows + lines, mask=inside, other=0.0).to(tl.float32)
    sink.put(sink, values, sink.ahead(sink, lines, b, inside, inside, n_rows), lines, b, inside, n_rows)


@triton.jit
def _add_kernel(y, bias, residual, out, UNIT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    value = tl.load(y + b * D + i, mask=inside, other=0.0).to(tl.float32) * (1 / UNIT)
    value += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + b * D + i, mask=inside, other=0.0)
    tl.store(out + b * D + i, value, mask=inside)


def _normalised(x: Tensor, ln: LayerNormWeights, dtype: torch.dtype, pdl: bool) -> Tensor:
    n = torch.empty(x.shape, dtype=dtype, device=x.device)
    layer_norm(x, ln, n, pdl)
    return n


def qkv_batch(
    x: Tensor, ln: LayerNormWeights, weights: Linear, position: Tensor, q: Tensor, cache: KvCache, pdl: bool = False
) -> None:
    """Writes q (B, h, head_dim) fp32 and the caches at position. weight and bias head-major, as in `qkv`."""
    if takes(weights.weight, len(x)):
        int4_qkv(_normalised(x, ln, torch.float16, pdl), weights, position, q, cache, pdl)
        return
    rows = dense_hidden(x, ln, weights.weight, None, "none", pdl)
    pdl, sink = use_pdl(pdl, x.device), QkvSink.of(q, cache, weights.bias, position)
    _split_kernel[(len(x), triton.cdiv(sink.n_rows, BLOCK))](
        rows, sink, sink.n_rows, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def dense_hidden(
    x: Tensor, ln: LayerNormWeights, weight: Matrix, bias: Tensor | None, activation: str, pdl: bool = False
) -> Tensor:
    """(B, n) in the weight's dtype, of 4-bit rows fp16: act(LayerNorm(x) W^T + b), weight (..., d) of n rows."""
    if takes(weight, len(x)):
        return int4_linear(_normalised(x, ln, torch.float16, pdl), weight, bias, activation, pdl)
    numbers = numbers_of(weight, pdl)
    y = F.linear(_normalised(x, ln, numbers.dtype, pdl), numbers.view(-1, numbers.shape[-1]), bias)
    return y.relu_() if activation == "relu" else y


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
    Codes are written out as numbers: for fc2 of few rows see `int4_fc2`, for heads `int4_by_head`.
    """
    numbers = numbers_of(weight, pdl)
    y = y.to(numbers.dtype)
    product = y @ numbers if transposed else F.linear(y, numbers)
    batch, d = out.shape
    pdl = use_pdl(pdl, out.device)
    _add_kernel[(batch, triton.cdiv(d, BLOCK))](
        product, bias, residual, out, UNIT=unit, D=d, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
