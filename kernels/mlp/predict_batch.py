"""A predictor's first product for several rows: out[b, r] = act(scale[r] sum_j w[r, j] x[b, j]).

A few hundred rows are too few programs for a GPU, so several share the columns of a row. A second kernel adds their
partial sums in a fixed order. x (B, d), w (rank, d), sums in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    INTERPRET,
    QUANTIZED_TYPES,
    check_input,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.launch import dot_type, padded_batch, programmatic, wait_for_predecessor


@triton.jit(do_not_specialize=["batch", "n_rows"])
def _predict_down_batch_kernel(
    x_ptr,
    w_ptr,
    partials_ptr,
    batch,
    n_rows,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial products of ROWS rows over STEPS x BLOCK columns."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BATCH)
    k = split * STEPS * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n_rows)[:, None]
    there = (b < batch)[None, :]
    wait_for_predecessor(PDL)
    at = w_ptr + rows.to(tl.int64)[:, None] * D + k[None, :]
    x_at = x_ptr + b[None, :] * D + k[:, None]
    acc = tl.zeros((ROWS, BATCH), tl.float32)
    for step in tl.range(0, STEPS * BLOCK, BLOCK, num_stages=STAGES):
        if D % (STEPS * BLOCK) == 0:
            w = tl.load(at + step, mask=inside, other=0.0)
            x = tl.load(x_at + step, mask=there, other=0.0)
        else:
            w = tl.load(at + step, mask=inside & (k + step < D)[None, :], other=0.0)
            x = tl.load(x_at + step, mask=there & (k + step < D)[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
    place = split * batch * n_rows + b[None, :] * n_rows + rows[:, None]
    tl.store(partials_ptr + place, acc, mask=inside & there)


@triton.jit(do_not_specialize=["size", "n_rows"])
def _add_splits_kernel(
    partials_ptr,
    scale_ptr,
    out_ptr,
    size,
    n_rows,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    y = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        y += tl.load(partials_ptr + s * size + i, mask=i < size, other=0.0)
    if scale_ptr is not None:
        y = y * tl.load(scale_ptr + i % n_rows, mask=i < size, other=0.0)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
    tl.store(out_ptr + i, y, mask=i < size)


def predict_down_batch(
    x: Tensor, weight: Tensor, out: Tensor, scale: Tensor | None = None, relu: bool = False, pdl: bool = False
) -> None:
    """out (B, rank) fp32: x (B, d) in fp32 or 16 bits, weight (rank, d) likewise, or int8/fp8 with scale (rank,) fp32.

    Products are of x's dtype. Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    rank = weight.shape[0]
    check_tensor("weight", weight, (rank, d), FLOAT_TYPES + QUANTIZED_TYPES, x)
    check_tensor("out", out, (batch, rank), (torch.float32,), x)
    require(weight.dtype not in QUANTIZED_TYPES or scale is not None, f"a weight of {weight.dtype} needs a scale a row")
    block = 64 if INTERPRET or x.element_size() > 2 else 128
    blocks = -(-d // block)
    steps = -(-blocks // min(8, blocks))
    splits = -(-blocks // steps)
    partials = torch.empty(splits, batch, rank, dtype=torch.float32, device=x.device)
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_down_batch_kernel[(-(-rank // 16), splits)](
        x, weight, partials, batch, rank, D=d, BATCH=padded_batch(batch), ROWS=16, BLOCK=block, STEPS=steps,
        STAGES=4, DOT=dot_type(x.dtype), PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip
    _add_splits_kernel[(-(-batch * rank // 256),)](
        partials, scale, out, batch * rank, rank, SPLITS=splits, BLOCK=256, RELU=relu, PDL=has_pdl, num_warps=4,
        launch_pdl=use_pdl,
    )  # fmt: skip
