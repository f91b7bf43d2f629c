"""Dense layers of one row or several, of any format: rows times a normalised input, and q/k/v of all heads.

    y[b, i] = act(sum_j w[i, j] n[b, j] + bias[i])                                              `dense_rows`
    q, k and v at the present position <- W n(b) + bias, head-major rows, as in `qkv`           `qkv_dense`
    out[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] y[b, j]                                `dense_wide`

x (B, d) fp32, n = norm(x), w (n, d) row-major. Sums in fp32. 4-bit rows meet n in fp16. One row runs in one kernel
(`stages.rows`), bitwise deterministic. Several are a matrix product (`dense_batch`). `dense_wide` is for rows w (d, n)
of numbers longer than registers hold (fc2 as stored, n = ffn), see `stages.columns`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_of, activation_reference
from dejavu_train.kernels.common.checks import check_device, check_numbers, check_projection, check_rows, check_shape
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add, dense_hidden, qkv_batch
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear, Matrix
from dejavu_train.kernels.stages.columns import VECTOR, ColumnWalk
from dejavu_train.kernels.stages.rows import launch_row, launch_walk
from dejavu_train.kernels.stages.sink import LinearSink, QkvSink, qkv_sink_reference


@dataclass(frozen=True)
class WideSettings(Settings, stage="wide"):
    """rows: of a program. chunk: columns of a step, at most. vector: see `ColumnWalk`."""

    rows: int
    chunk: int
    warps: int
    vector: int = VECTOR


def operands_reference(x: Tensor, ln: LayerNormWeights, weight: Matrix) -> tuple[Tensor, Tensor]:
    """(numbers, LayerNorm(x)) whose product is meant: 4-bit rows meet n in fp16, in fp64 where x is."""
    if weight.format is Format.INT4:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return weight.dense(wide), layer_norm_reference(x, ln, torch.float16).to(wide)
    return weight.numbers, layer_norm_reference(x, ln, weight.numbers.dtype)


def dense_rows_reference(
    x: Tensor, ln: LayerNormWeights, weight: Matrix, bias: Tensor | None, activation: str, out: Tensor
) -> None:
    """Plain torch, any batch."""
    numbers, n = operands_reference(x, ln, weight)
    y = torch.nn.functional.linear(n, numbers)
    if bias is not None:
        y = y + bias
    out.copy_(activation_reference(y, activation))


def qkv_dense_reference(x: Tensor, ln: LayerNormWeights, weights: Linear, step: HeadStep) -> None:
    """Plain torch. No host synchronisation."""
    weight, n = operands_reference(x, ln, weights.weight)
    products = torch.nn.functional.linear(n, weight.view(-1, weight.shape[-1]))
    qkv_sink_reference(products, weights.bias, step)


def dense_rows(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Matrix,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """x (B, d) fp32, weight (n, d), bias (n) or None, activation of `ACTIVATIONS` -> out (B, n) fp32.

    Several rows are a matrix product, of more than eight with 4-bit rows after these were written out in fp16. Errors:
    shapes, a CPU tensor, an unknown activation. Of 4-bit rows dtypes and groups.
    """
    check_device("x", x)
    batch, d = x.shape
    n = weight.shape[0]
    check_rows("weight", weight, (n, d), x)
    check_shape("out", out, batch, n)
    function = activation_of(activation)
    if batch > 1:
        out.copy_(dense_hidden(x, ln, weight, bias, activation, pdl))
        return
    launch_row(x, ln, weight, LinearSink(out, bias, activation=function), n, pdl)


def qkv_dense(x: Tensor, ln: LayerNormWeights, weights: Linear, step: HeadStep, pdl: bool = False) -> None:
    """x (B, d) fp32 -> q (B, h, head_dim) fp32, and the cache at the rows' positions.

    The weight and the bias are head-major, as `qkv` has them. Errors as of `dense_rows`.
    """
    check_projection(x, weights, step)
    if len(x) > 1:
        qkv_batch(x, ln, weights, step, pdl)
        return
    sink = QkvSink.of(step, weights.bias)
    launch_row(x, ln, weights.weight, sink, sink.n_rows, pdl)


def dense_wide_reference(y: Tensor, weight: Matrix, bias: Tensor, residual: Tensor, out: Tensor) -> None:
    """Plain torch, any batch."""
    out.copy_(torch.nn.functional.linear(y.float(), weight.dense()) + bias.float() + residual)


def dense_wide(y: Tensor, weight: Matrix, bias: Tensor, residual: Tensor, out: Tensor, pdl: bool = False) -> None:
    """y (B, n), weight (d, n), bias (d), residual and out (B, d) fp32. Several rows as a matrix product.

    Errors: shapes, a CPU tensor.
    """
    check_device("y", y)
    batch, n = y.shape
    d = weight.shape[0]
    check_numbers("weight", weight, d, n)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    if batch > 1:
        dense_add(y, weight, bias, residual, out, pdl=pdl)
        return
    settings = WideSettings.find(weight.format, y.device, d=d)
    walk = ColumnWalk(n, n, 1, settings.rows, min(settings.chunk, triton.next_power_of_2(n)), settings.vector)
    launch_walk(
        triton.cdiv(d, settings.rows), y, None, weight.parts(), LinearSink(out, bias, residual), None, d, walk, pdl,
        num_warps=settings.warps,
    )  # fmt: skip
