"""Up to eight tokens times 4-bit rows, which are read once and as codes.

    y[b, i]   = act(sum_j code[i, j] scale[i, j // group] x[b, j] + bias[i])            `int4_linear`, weight (n, d)
    q, k_cache, v_cache at position[b] <- the first, without act, weight head-major              `int4_qkv`

x (B, .) fp16. Products are exact, sums in fp32. Programs walk over the rows, sixteen at a time, with all tokens in
their registers (`stages.int4_tokens`), where one token takes the place of two. Neurons that are selected have
`stages.hidden`, rows by head `attention.out_projection`. fc2, whose rows are neurons, has a kernel of its own
(`int4_fc2`). More tokens than eight are worth writing the matrix out once (`int4_numbers`).
"""

from typing import TypeGuard

import torch
from torch import Tensor

from dejavu_train.kernels.common.activation import ACTIVATIONS
from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    check_device,
    check_dtype,
    check_int4,
    check_projection,
    check_shape,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import LinearSink, QkvSink


def int4_linear_reference(x: Tensor, weight: Matrix, bias: Tensor | None, activation: str) -> Tensor:
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.dense(wide).flatten(0, -2).T
    if bias is not None:
        y = y + bias
    return y.relu() if activation == "relu" else y


def takes(weight: Matrix, batch: int) -> TypeGuard[Int4Rows]:
    """Whether these kernels multiply so many tokens with this matrix."""
    return weight.format is Format.INT4 and batch <= MOST_TOKENS


def int4_linear(
    x: Tensor, weight: Int4Rows, bias: Tensor | None = None, activation: str = "none", pdl: bool = False
) -> Tensor:
    """x (B, d) fp16, weight (..., d) -> (B, n) fp16. Errors: shapes, dtypes, a CPU tensor."""
    check_device("x", x)
    batch, d = x.shape
    n = weight.words.shape[:-1].numel()
    check_int4("weight", weight, (*weight.shape[:-1], d), x)
    _check_tokens(x, batch, d)
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation}")
    y = torch.empty(batch, n, dtype=torch.float16, device=x.device)
    launch_tokens(x, weight, LinearSink(y, bias, activation=ACTIVATIONS[activation]), pdl)
    return y


def int4_qkv(x: Tensor, weights: Linear, position: Tensor, q: Tensor, cache: KvCache, pdl: bool = False) -> None:
    """x (B, d) fp16, position (B) int32 -> q (B, h, head_dim) fp32, and the cache at the rows' positions.

    The weight has 4 bits. It and the bias are head-major, as `qkv` has them.

    Errors: shapes, dtypes, head dims, a CPU tensor.
    """
    batch, d = x.shape
    check_projection(x, weights, q, cache, position)
    weight = check_int4("weight", weights.weight, weights.weight.shape, x)
    _check_tokens(x, batch, d)
    check_tensor("q", q, q.shape, (torch.float32,), x)
    launch_tokens(x, weight, QkvSink.of(q, cache, weights.bias, position), pdl)


def _check_tokens(x: Tensor, batch: int, n: int) -> None:
    check_dtype("x", x, (torch.float16,))
    check_shape("x", x, batch, n)
    require(1 <= batch <= MOST_TOKENS, f"{batch} tokens, expected 1 to {MOST_TOKENS}")
