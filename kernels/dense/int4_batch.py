"""Up to eight tokens times 4-bit rows, which are read once and as codes.

    y[b, i] = act(sum_j code[i, j] scale[i, j // group] x[b, j] + bias[i])            `int4_linear`, weight (n, d)

x (B, .) fp16. Products are exact, sums in fp32. Programs walk over the rows, sixteen at a time, with all tokens in
their registers (`stages.int4_tokens`), where one token takes the place of two. Neurons that are selected have
`stages.hidden`, rows by head `attention.out_projection`. fc2, whose rows are neurons, has a kernel of its own
(`int4_fc2`). More tokens than eight are worth writing the matrix out once (`int4_numbers`).
"""

from typing import TypeGuard

import torch
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_of
from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_int4, check_tensor
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import LinearSink


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
    n = weight.words.shape[:-1].numel()
    check_int4("weight", weight, (*weight.shape[:-1], x.shape[1]), x)
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    y = torch.empty(len(x), n, dtype=torch.float16, device=x.device)
    launch_tokens(x, weight, LinearSink(y, bias, activation=activation_of(activation)), pdl)
    return y
