"""Head selection and the attention's input of one decoding step.

    n[b] = LayerNorm(x[b])                                  rounded to the cache's dtype
    attn_in[b, position[b]] = n[b]                          kept, so that skipped K/V can be computed later
    head i of row b is selected where <predictor[i], n[b]> + bias[i] > threshold; a tie or a NaN is not

The selection is a `Selection` with one id a block: counts[i] = any row selects head i, row_bits[i] = which rows do.
B rows, d model dimension, h heads, T positions of the cache. x (B, d) fp32; predictor (h, d); bias (h), threshold (1)
fp32; position (B) int32; row_state (B) int32: 0 selects nothing, 1 by the logits, 2 everything; attn_in (B, T, d).
"""

import torch
import triton
import triton.language as tl

from kernels.attention_common import check_device, check_shape, start_dependents, two_tiles, use_pdl
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import Selection


def head_select_reference(
    x, ln, predictor, bias, threshold, position, row_state, attn_in, selection, pdl=False
) -> None:
    """Plain torch, in place: writes `attn_in` at `position`, and where a predictor is given the selection."""
    n = layer_norm_reference(x, ln, attn_in.dtype)
    attn_in[torch.arange(len(x), device=x.device), position.long()] = n
    if predictor is None:
        return
    logits = n.float() @ predictor.float().T + bias
    state = row_state[:, None]
    selection.set_mask(((logits > threshold) & (state > 0)) | (state == 2))


@triton.jit
def _head_select_kernel(
    x,
    norm_weight,
    norm_bias,
    predictor,
    bias,
    threshold,
    position,
    row_state,
    attn_in,
    row_bits,
    counts,
    capacity,
    B: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_PREDICTOR: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Program i normalises every row, keeps its slice of columns and decides head i for all rows.
    head = tl.program_id(0)
    c0 = tl.arange(0, D0)
    g0 = tl.load(norm_weight + c0).to(tl.float32)
    a0 = tl.load(norm_bias + c0).to(tl.float32)
    if HAS_PREDICTOR:
        w0 = tl.load(predictor + head * D + c0).to(tl.float32)
        offset = tl.load(bias + head)
        limit = tl.load(threshold)
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        m1 = c1 < D
        g1 = tl.load(norm_weight + c1, mask=m1, other=0.0).to(tl.float32)
        a1 = tl.load(norm_bias + c1, mask=m1, other=0.0).to(tl.float32)
        if HAS_PREDICTOR:
            w1 = tl.load(predictor + head * D + c1, mask=m1, other=0.0).to(tl.float32)
    start_dependents(PDL)
    bits = 0
    for b in tl.static_range(B):
        at = tl.load(position + b)
        x0 = tl.load(x + b * D + c0)
        total = tl.sum(x0)
        if D1 > 0:
            x1 = tl.load(x + b * D + c1, mask=m1, other=0.0)
            total += tl.sum(x1)
        mean = total / D
        square = tl.sum((x0 - mean) * (x0 - mean))
        if D1 > 0:
            square += tl.sum(tl.where(m1, (x1 - mean) * (x1 - mean), 0.0))
        scale = 1.0 / tl.sqrt(square / D + EPS)
        n0 = ((x0 - mean) * scale * g0 + a0).to(attn_in.dtype.element_ty)
        kept_row = attn_in + (b * capacity + at).to(tl.int64) * D
        tl.store(kept_row + c0, n0, mask=(c0 >= head * SLICE) & (c0 < head * SLICE + SLICE))
        if D1 > 0:
            n1 = ((x1 - mean) * scale * g1 + a1).to(attn_in.dtype.element_ty)
            tl.store(kept_row + c1, n1, mask=m1 & (c1 >= head * SLICE) & (c1 < head * SLICE + SLICE))
        if HAS_PREDICTOR:
            logit = tl.sum(w0 * n0.to(tl.float32))
            if D1 > 0:
                logit += tl.sum(w1 * n1.to(tl.float32))
            state = tl.load(row_state + b)
            chosen = (((logit + offset) > limit) & (state > 0)) | (state == 2)
            bits |= chosen.to(tl.int32) << b
    if HAS_PREDICTOR:
        tl.store(row_bits + head, bits)
        tl.store(counts + head, (bits != 0).to(tl.int32))


def head_select(
    x: torch.Tensor,
    ln: LayerNormWeights,
    predictor: torch.Tensor | None,
    bias: torch.Tensor | None,
    threshold: torch.Tensor | None,
    position: torch.Tensor,
    row_state: torch.Tensor,
    attn_in: torch.Tensor,
    selection: Selection,
    pdl: bool = False,
) -> None:
    """See the module's formula. Without a predictor only `attn_in` is written. Errors: shapes, a CPU tensor."""
    check_device("x", x)
    batch, d = x.shape
    n_heads = selection.n
    check_shape("x", x, batch, d)
    check_shape("attn_in", attn_in, batch, attn_in.shape[1], d)
    check_shape("position", position, batch)
    if predictor is not None:
        check_shape("counts", selection.counts, n_heads)
        check_shape("predictor", predictor, n_heads, d)
    d0, d1 = two_tiles(d)
    pdl = use_pdl(pdl, x.device)
    _head_select_kernel[(n_heads,)](
        x,
        ln.weight,
        ln.bias,
        x if predictor is None else predictor,
        x if bias is None else bias,
        x if threshold is None else threshold,
        position,
        row_state,
        attn_in,
        selection.row_bits,
        selection.counts,
        attn_in.shape[1],
        B=batch,
        D=d,
        D0=d0,
        D1=d1,
        SLICE=triton.cdiv(d, n_heads),
        HAS_PREDICTOR=predictor is not None,
        EPS=ln.eps,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def head_selection(n_heads: int, device: torch.device | str) -> Selection:
    """An empty selection of heads in the form this kernel writes: one id a block."""
    selection = Selection.empty(n_heads, device, block=1)
    selection.ids.copy_(torch.arange(n_heads, dtype=torch.int32))
    return selection
