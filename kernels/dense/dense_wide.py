"""A dense matrix of long rows times one vector: out[i] = residual[i] + bias[i] + sum_j w[i, j] y[j].

w (d, n) row-major with n beyond what registers hold (fc2 as stored, n = ffn), y (1, n) fp32. A program owns ROWS
outputs and walks over the columns, the next CHUNK of them on its way before the present one is used. The first one is
asked for before the wait for the stage before. One owner an output: no partial sums, bitwise deterministic.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_numbers, check_shape
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add
from dejavu_train.kernels.formats.matrix import Matrix


@dataclass(frozen=True)
class WideSettings(Settings, stage="wide"):
    """rows: of a program. chunk: columns of a step, at most."""

    rows: int
    chunk: int
    warps: int


def dense_wide_reference(
    y: Tensor, weight: Matrix, bias: Tensor, residual: Tensor, out: Tensor, pdl: bool = False, settings: object = None
) -> None:
    """Plain torch, any batch."""
    out.copy_(torch.nn.functional.linear(y.float(), weight.dense()) + bias.float() + residual)


@triton.jit
def _dense_wide_kernel(
    y,
    weight,
    bias,
    residual,
    out,
    n_rows,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    c = tl.arange(0, CHUNK)
    at = weight + rows.to(tl.int64)[:, None] * N + c[None, :]
    limit = tl.where(inside, N, 0)[:, None]
    w = tl.load(at, mask=c[None, :] < limit, other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(PDL)
    acc = tl.zeros((ROWS, CHUNK), tl.float32)
    for column in range(0, N, CHUNK):
        ahead = tl.load(
            at + column + CHUNK, mask=c[None, :] < limit - column - CHUNK, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(y + column + c, mask=c < N - column, other=0.0)
        acc += w.to(tl.float32) * x[None, :]
        w = ahead
    value = tl.sum(acc, 1)
    value += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + rows, mask=inside, other=0.0)
    tl.store(out + rows, value, mask=inside)


def dense_wide(
    y: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    pdl: bool = False,
    settings: WideSettings | None = None,
) -> None:
    """y (B, n), weight (d, n), bias (d), residual and out (B, d) fp32. Several rows as a matrix product.

    Errors: shapes, a CPU tensor.
    """
    check_device("y", y)
    batch, n = y.shape
    d = weight.shape[0]
    numbers = check_numbers("weight", weight, d, n)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    if batch > 1:
        dense_add(y, weight, bias, residual, out, pdl=pdl)
        return
    settings = settings or WideSettings.find(weight.format, y.device, d=d)
    pdl = use_pdl(pdl, y.device)
    _dense_wide_kernel[(triton.cdiv(d, settings.rows),)](
        y,
        numbers,
        bias,
        residual,
        out,
        d,
        N=n,
        ROWS=settings.rows,
        CHUNK=min(settings.chunk, triton.next_power_of_2(n)),
        PDL=pdl,
        num_warps=settings.warps,
        launch_pdl=pdl,
    )
