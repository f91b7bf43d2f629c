# mypy: disable-error-code="assignment"
"""Query, key and value rows of all heads at the present position, with the LayerNorm in the prologue.

    q[b, i]           = W_q[i] n(b) + b_q[i]        n(b) = LayerNorm(x[b])
    k_cache[b, i, t]  = W_k[i] n(b) + b_k[i]        (v likewise), t = position[b]

x (B, d) fp32; weight, bias, q and the caches as in `qkv`. Dense layers need neither kept inputs nor a list of heads.
"""

import torch
import triton
import triton.language as tl

from kernels.common.checks import check_projection
from kernels.common.launch import n_sms, use_pdl, wait_for_predecessor
from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.dense.dense_batch import qkv_batch
from kernels.dense.dense_gemv import RowSettings, normalised_vector, row_pieces, row_settings


def qkv_dense_reference(x, ln, weight, bias, position, q, k_cache, v_cache, pdl=False) -> None:
    """Plain torch; also several rows on the GPU, where cuBLAS does the matrix product. No host synchronisation."""
    batch, n_heads, head_dim = q.shape
    n = layer_norm_reference(x, ln, weight.dtype)
    rows = torch.nn.functional.linear(n, weight.view(-1, weight.shape[-1])).float() + bias.float().flatten()
    rows = rows.view(batch, n_heads, 3, head_dim)
    q.copy_(rows[:, :, 0])
    each = torch.arange(batch, device=x.device)
    k_cache[each, :, position.long()] = rows[:, :, 1].to(k_cache.dtype)
    v_cache[each, :, position.long()] = rows[:, :, 2].to(v_cache.dtype)


@triton.jit
def _qkv_dense_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
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
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # As `dense_gemv`, but a row's result goes to q, or to the caches at the position.
    N_ROWS: tl.constexpr = 3 * HEAD_DIM * H
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    c = tl.arange(0, BLOCK)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    w = row_pieces(weight, first, N_ROWS, c, D, BLOCK, ROWS)
    last = tl.load(position)
    wait_for_predecessor(PDL)
    n = normalised_vector(x, norm_weight, norm_bias, c, D, BLOCK, EPS, weight.dtype.element_ty)
    for begin in range(first, N_ROWS, step):
        coming = row_pieces(weight, begin + step, N_ROWS, c, D, BLOCK, ROWS)
        offsets = ()
        for r in tl.static_range(ROWS):
            offsets = offsets + (tl.load(bias + begin + r, mask=begin + r < N_ROWS, other=0.0),)
        for r in tl.static_range(ROWS):
            acc = w[r * STEPS].to(tl.float32) * n[0]
            for j in tl.static_range(1, STEPS):
                acc += w[r * STEPS + j].to(tl.float32) * n[j]
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
    x: torch.Tensor,
    ln: LayerNormWeights,
    weight: torch.Tensor,
    bias: torch.Tensor,
    position: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pdl: bool = False,
    settings: RowSettings | None = None,
) -> None:
    """All heads at `position` from x (B, d) fp32. One row runs in one kernel, several as a matrix product."""
    batch, n_heads, head_dim, d = check_projection(x, weight, bias, q, k_cache, v_cache, position)
    if batch > 1:
        qkv_batch(x, ln, weight, bias, position, q, k_cache, v_cache, pdl)
        return
    pdl = use_pdl(pdl, q.device)
    settings = settings or row_settings(d)
    _qkv_dense_kernel[(min(n_sms(q.device) * settings.programs, 3 * n_heads * head_dim // settings.rows),)](
        x,
        ln.weight,
        ln.bias,
        weight,
        bias,
        position,
        q,
        k_cache,
        v_cache,
        k_cache.shape[2],
        H=n_heads,
        HEAD_DIM=head_dim,
        D=d,
        BLOCK=settings.block(d),
        ROWS=settings.rows,
        EPS=ln.eps,
        PDL=pdl,
        num_warps=settings.warps_for(d),
        launch_pdl=pdl,
    )
