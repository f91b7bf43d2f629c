"""A dense matrix of long rows times one vector: out[i] = residual[i] + bias[i] + sum_j w[i, j] y[j].

w (d, n) row-major with n beyond what registers hold (fc2 as stored, n = ffn), y (1, n) fp32: see `stages.columns`.
Bitwise deterministic.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_numbers, check_shape
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add
from dejavu_train.kernels.formats.matrix import Matrix
from dejavu_train.kernels.stages.columns import VECTOR, ColumnWalk
from dejavu_train.kernels.stages.rows import launch_walk
from dejavu_train.kernels.stages.sink import LinearSink


@dataclass(frozen=True)
class WideSettings(Settings, stage="wide"):
    """rows: of a program. chunk: columns of a step, at most. vector: see `ColumnWalk`."""

    rows: int
    chunk: int
    warps: int
    vector: int = VECTOR


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
