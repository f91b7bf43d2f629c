"""Query, key and value rows of all heads at the present position, with the LayerNorm in the prologue.

    q[b, i]           = W_q[i] n(b) + b_q[i]        n(b) = LayerNorm(x[b])
    k_cache[b, i, t]  = W_k[i] n(b) + b_k[i]        (v likewise), t = position[b]

x (B, d) fp32. weight, bias, q and the caches as in `qkv`. Dense layers need neither kept inputs nor a list of heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_projection
from dejavu_train.kernels.common.int4_norm import normalised_units, unit_norms
from dejavu_train.kernels.common.int4_row_step import first_rows, int4_rows_step
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.dense.dense_batch import qkv_batch
from dejavu_train.kernels.dense.dense_gemv import (
    Int4RowSettings,
    RowSettings,
    normalised_vector,
    operands_reference,
    row_launch,
    row_pieces,
    row_product,
)
from dejavu_train.kernels.formats.matrix import Linear


def qkv_dense_reference(
    x: Tensor, ln: LayerNormWeights, weights: Linear, position: Tensor, q: Tensor, cache: KvCache, pdl: bool = False
) -> None:
    """Plain torch. Also several rows on the GPU, where cuBLAS does the matrix product. No host synchronisation."""
    batch, n_heads, head_dim = q.shape
    weight, n = operands_reference(x, ln, weights.weight)
    rows = torch.nn.functional.linear(n, weight.view(-1, weight.shape[-1])).float() + weights.bias.float().flatten()
    rows = rows.view(batch, n_heads, 3, head_dim)
    q.copy_(rows[:, :, 0])
    each = torch.arange(batch, device=x.device)
    cache.k[each, :, position.long()] = rows[:, :, 1].to(cache.k.dtype)
    cache.v[each, :, position.long()] = rows[:, :, 2].to(cache.v.dtype)


@triton.jit
def _qkv_dense_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    scales,
    bias,
    position,
    q,
    k_cache,
    v_cache,
    capacity,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    FETCHED: tl.constexpr,
    ROOM: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # As `dense_gemv`, but a row's result goes to q, or to the caches at the position.
    N_ROWS: tl.constexpr = 3 * HEAD_DIM * H
    c = tl.arange(0, BLOCK)
    last = tl.load(position)
    if GROUP > 0:
        w, s = first_rows(weight, scales, (tl.program_id(0) * 16, N_ROWS), c, D // 8, GROUP, ROWS, WHOLE, FETCHED, ROOM)
        norms = unit_norms(norm_weight, norm_bias, c, D // 8, GROUP)
        wait_for_predecessor(PDL)
        n, _, _ = normalised_units(x, norms, c, D // 8, GROUP, EPS)
        step = tl.num_programs(0) * 16
        first_slot = 0
        for begin in range(tl.program_id(0) * 16, N_ROWS, step):
            values, w, first_slot, s = int4_rows_step(
                w,
                first_slot,
                s,
                n,
                weight,
                scales,
                (begin, N_ROWS),
                (begin + step, N_ROWS),
                c,
                D // 8,
                GROUP,
                ROWS,
                WHOLE,
            )
            line = begin + tl.arange(0, 16)
            inside = line < N_ROWS
            values += tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)
            head = line // (3 * HEAD_DIM)
            row = line % (3 * HEAD_DIM)
            slot = (head * capacity + last).to(tl.int64) * HEAD_DIM + row % HEAD_DIM
            key = inside & (row >= HEAD_DIM) & (row < 2 * HEAD_DIM)
            tl.store(q + head * HEAD_DIM + row, values, mask=inside & (row < HEAD_DIM))
            tl.store(k_cache + slot, values.to(k_cache.dtype.element_ty), mask=key)
            tl.store(v_cache + slot, values.to(v_cache.dtype.element_ty), mask=inside & (row >= 2 * HEAD_DIM))
    else:
        first = tl.program_id(0) * ROWS
        step = tl.num_programs(0) * ROWS
        w = row_pieces(weight, first, N_ROWS, c, D, BLOCK, ROWS)
        wait_for_predecessor(PDL)
        n = normalised_vector(x, norm_weight, norm_bias, c, D, BLOCK, EPS, weight.dtype.element_ty)
        for begin in range(first, N_ROWS, step):
            coming = row_pieces(weight, begin + step, N_ROWS, c, D, BLOCK, ROWS)
            offsets = ()
            for r in tl.static_range(ROWS):
                offsets = offsets + (tl.load(bias + begin + r, mask=begin + r < N_ROWS, other=0.0),)
            for r in tl.static_range(ROWS):
                acc = row_product(w, n, r, D, BLOCK)
                line = begin + r
                if line < N_ROWS:
                    value = tl.sum(acc, 0) + offsets[r].to(tl.float32)
                    head = line // (3 * HEAD_DIM)
                    row = line % (3 * HEAD_DIM)
                    slot = (head * capacity + last).to(tl.int64) * HEAD_DIM + row % HEAD_DIM
                    if row < HEAD_DIM:
                        tl.store(q + head * HEAD_DIM + row, value)
                    elif row < 2 * HEAD_DIM:
                        tl.store(k_cache + slot, value.to(k_cache.dtype.element_ty))
                    else:
                        tl.store(v_cache + slot, value.to(v_cache.dtype.element_ty))
            w = coming


def qkv_dense(
    x: Tensor,
    ln: LayerNormWeights,
    weights: Linear,
    position: Tensor,
    q: Tensor,
    cache: KvCache,
    pdl: bool = False,
    settings: RowSettings | Int4RowSettings | None = None,
) -> None:
    """All heads at `position` from x (B, d) fp32. One row runs in one kernel, several as a matrix product."""
    batch, n_heads, head_dim = check_projection(x, weights, q, cache, position)
    if batch > 1:
        qkv_batch(x, ln, weights, position, q, cache, pdl)
        return
    pdl = use_pdl(pdl, q.device)
    grid, words, scales, constants, warps = row_launch(weights.weight, 3 * n_heads * head_dim, settings, q.device)
    _qkv_dense_kernel[(grid,)](
        x,
        ln.weight,
        ln.bias,
        words,
        scales,
        weights.bias,
        position,
        q,
        cache.k,
        cache.v,
        cache.capacity,
        H=n_heads,
        HEAD_DIM=head_dim,
        D=x.shape[1],
        **constants,
        EPS=ln.eps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
