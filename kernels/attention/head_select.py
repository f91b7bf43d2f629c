"""Head selection and the attention's input of one decoding step.

    n[b] = LayerNorm(x[b])                                  rounded to the cache's dtype
    attn_in[b, position[b]] = n[b]                          kept, so that skipped K/V can be computed later
    head i of row b is selected where <predictor[i], n[b]> + bias[i] > threshold; a tie or a NaN is not

The selection is a `Selection` of which the kernels write row_bits alone: bit b of row_bits[i], row b selects head i.
B rows, d model dimension, h heads, T positions of the cache. x (B, d) fp32. predictor (h, d). bias (h), threshold (1)
fp32. position (B) int32. row_state (B) int32: 0 selects nothing, 1 by the logits, 2 everything. attn_in (B, T, d).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape
from dejavu_train.kernels.common.launch import column_block, load_vector, row_or, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import (
    LayerNormWeights,
    layer_norm_reference,
    norm_vectors,
    normalised_pieces,
)
from dejavu_train.kernels.common.row_state import by_state, mask_by_state
from dejavu_train.kernels.common.selection import Selection

WARPS = 8


@dataclass(frozen=True)
class HeadPredictor:
    """A predictor of heads in one matrix, and what it fills.

    rows: (h, d). bias: (h,), threshold: (1,), both fp32. All three are None where the layer selects nothing itself.
    """

    rows: Tensor | None
    bias: Tensor | None
    threshold: Tensor | None
    selection: Selection


def head_select_reference(
    x: Tensor,
    ln: LayerNormWeights,
    heads: HeadPredictor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    pdl: bool = False,
) -> None:
    """Plain torch, in place: writes `attn_in` at `position`, and where there are rows the selection."""
    n = layer_norm_reference(x, ln, attn_in.dtype)
    attn_in[torch.arange(len(x), device=x.device), position.long()] = n
    if heads.rows is None:
        return
    assert heads.bias is not None and heads.threshold is not None
    logits = n.float() @ heads.rows.float().T + heads.bias
    heads.selection.set_mask(mask_by_state(logits > heads.threshold, row_state))


@triton.jit
def selected_heads(row_bits, H: tl.constexpr, H_TILE: tl.constexpr):
    """(the selected heads in ascending order (H_TILE,), H beyond them, their number)."""
    heads = tl.arange(0, H_TILE)
    chosen = (tl.load(row_bits + heads, mask=heads < H, other=0, cache_modifier=".cg") != 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0)
    before = (rank[:, None] <= heads[None, :]) & (heads < H)[:, None]
    return tl.sum(before.to(tl.int32), 0), tl.sum(chosen)


@triton.jit
def _head_select_kernel(
    x,
    norm,
    predictor,
    bias,
    threshold,
    position,
    row_state,
    attn_in,
    row_bits,
    capacity,
    B: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_PREDICTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    # Program i normalises every row, keeps its slice of columns and decides head i for all rows. Everything but x is
    # read before the wait: parameters are static, positions and states are those that the step before left.
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    head = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    if HAS_PREDICTOR:
        w = load_vector(predictor + head * D, c, D, BLOCK)
        offset = tl.load(bias + head)
        limit = tl.load(threshold)
    gains, shifts = norm_vectors(norm, c, D, BLOCK)
    places = ()
    states = ()
    for b in tl.static_range(B):
        places = places + (tl.load(position + b),)
        states = states + (tl.load(row_state + b),)
    wait_for_predecessor(PDL)
    bits = 0
    for b in tl.static_range(B):
        xs = load_vector(x + b * D, c, D, BLOCK)
        n = normalised_pieces(xs, gains, shifts, norm, c, D, BLOCK, attn_in.dtype.element_ty)
        kept_row = attn_in + (b * capacity + places[b]).to(tl.int64) * D
        for j in tl.static_range(STEPS):
            column = j * BLOCK + c
            own = (column >= head * SLICE) & (column < tl.minimum(head * SLICE + SLICE, D))
            tl.store(kept_row + column, n[j].to(attn_in.dtype.element_ty), mask=own)
        if HAS_PREDICTOR:
            products = w[0].to(tl.float32) * n[0]
            for j in tl.static_range(1, STEPS):
                products += w[j].to(tl.float32) * n[j]
            logit = tl.sum(products, 0)
            bits |= by_state((logit + offset) > limit, states[b]).to(tl.int32) << b
    if HAS_PREDICTOR:
        tl.store(row_bits + head, bits)


def head_select(
    x: Tensor,
    ln: LayerNormWeights,
    heads: HeadPredictor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    pdl: bool = False,
) -> None:
    """See the module's formula. Without rows only `attn_in` is written. position and row_state are older
    than the launch before this one. Errors: shapes, a CPU tensor."""
    check_device("x", x)
    batch, d = x.shape
    n_heads, rows = heads.selection.n, heads.rows
    check_shape("x", x, batch, d)
    check_shape("attn_in", attn_in, batch, attn_in.shape[1], d)
    check_shape("position", position, batch)
    if rows is not None:
        check_shape("heads.rows", rows, n_heads, d)
    block = column_block(d, WARPS)
    pdl = use_pdl(pdl, x.device)
    _head_select_kernel[(n_heads,)](
        x,
        ln.args(),
        row_or(rows, x),
        row_or(heads.bias, x),
        row_or(heads.threshold, x),
        position,
        row_state,
        attn_in,
        heads.selection.row_bits,
        attn_in.shape[1],
        B=batch,
        D=d,
        BLOCK=block,
        SLICE=triton.cdiv(d, n_heads),
        HAS_PREDICTOR=rows is not None,
        PDL=pdl,
        num_warps=min(WARPS, max(1, block // 32)),
        launch_pdl=pdl,
    )


def head_selection(n_heads: int, device: torch.device | str) -> Selection:
    """An empty selection of heads, one id a block. Kernels write its row_bits alone."""
    selection = Selection.empty(n_heads, device, block=1)
    selection.ids.copy_(torch.arange(n_heads, dtype=torch.int32))
    return selection
