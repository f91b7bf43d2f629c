# mypy: disable-error-code="assignment"
"""Look-ahead without stages of its own: an MLP predictor of `attn_in` rides with two of the attention's kernels.

Stage 1 (`site_predict`), one grid: programs < h decide a head each and keep attn_in; the others give A_ROWS of
    hidden[r] = act(down[r] . n),   n = LayerNorm(x)
Stage 3 (`attend_select`), one grid: programs < ceil(ffn / block) own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold;   the others are the attention's, as in `flash_decode`
Attention waits on latency and leaves the memory idle; independent work in its grid costs no launch edge and no event.
(In the grid of q/k/v, which is bound by memory, it only slowed the fatter kernel down: benchmarks/NOTES.md.)
One batch row. Formulas, shapes and layouts as in `head_select`, `select` and `flash_decode`; down (rank, d),
up (ffn, rank), hidden (rank) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, use_pdl
from kernels.dense_gemv import normalised_vector, row_pieces
from kernels.flash_decode import BLOCK, AttentionScratch, attend, attention_launch, flash_decode_reference
from kernels.head_select import head_select_reference
from kernels.launch import column_block
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import PredictorWeights, Selection, predict_select_reference, rank_chunk, select_block

POSITIONS = 2 * BLOCK  # of an attention program here: as many threads as a block of the predictor wants
WARPS = 4


def site_predict_reference(
    x, ln, predictor, bias, threshold, position, row_state, attn_in, selection, mlp, hidden, pdl=False
) -> None:
    """Plain torch, in place."""
    head_select_reference(x, ln, predictor, bias, threshold, position, row_state, attn_in, selection)
    z = layer_norm_reference(x, ln, attn_in.dtype).float() @ mlp.down.float().T
    hidden.copy_(z.relu() if mlp.relu else z)


def attend_select_reference(
    q, k_cache, v_cache, selection, position, watermark, valid, out, scratch, mlp, hidden, mlp_threshold, row_state,
    mlp_selection, pdl=False, mean=None,
) -> None:  # fmt: skip
    """Plain torch, in place."""
    flash_decode_reference(q, k_cache, v_cache, selection, position, watermark, valid, out, mean=mean)
    second = PredictorWeights(
        torch.eye(hidden.shape[1], device=hidden.device), mlp.up, mlp.bias, up_scale=mlp.up_scale
    )  # fmt: skip
    mlp_selection.set_mask(predict_select_reference(hidden, second, mlp_threshold, None, row_state))


@triton.jit
def _site_kernel(
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
    down,
    hidden,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    RELU: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    # All rows of a program are static, so they are on their way before the wait: one head's, or A_ROWS of `down`.
    is_head = pid < H
    matrix = predictor
    first = pid
    stop = pid + 1
    if not is_head:
        matrix = down
        first = (pid - H) * A_ROWS
        stop = RANK
    rows = row_pieces(matrix, first, stop, c, D, BLOCK, A_ROWS)
    start_dependents(PDL)
    n = normalised_vector(x, norm_weight, norm_bias, c, D, BLOCK, EPS, attn_in.dtype.element_ty)
    if is_head:
        kept_row = attn_in + tl.load(position).to(tl.int64) * D
        for j in tl.static_range(STEPS):
            column = j * BLOCK + c
            own = (column >= pid * SLICE) & (column < tl.minimum(pid * SLICE + SLICE, D))
            tl.store(kept_row + column, n[j].to(attn_in.dtype.element_ty), mask=own)
    for i in tl.static_range(A_ROWS):
        products = rows[i * STEPS].to(tl.float32) * n[0]
        for j in tl.static_range(1, STEPS):
            products += rows[i * STEPS + j].to(tl.float32) * n[j]
        value = tl.sum(products, 0)
        if is_head:
            if i == 0:
                state = tl.load(row_state)
                chosen = (((value + tl.load(bias + pid)) > tl.load(threshold)) & (state > 0)) | (state == 2)
                tl.store(row_bits + pid, chosen.to(tl.int32))
                tl.store(counts + pid, chosen.to(tl.int32))
        elif first + i < RANK:
            if RELU:
                value = tl.maximum(value, 0.0)
            tl.store(hidden + first + i, value)


def site_predict(
    x: Tensor,
    ln: LayerNormWeights,
    predictor: Tensor,
    bias: Tensor,
    threshold: Tensor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    selection: Selection,
    mlp: PredictorWeights,
    hidden: Tensor,
    pdl: bool = False,
) -> None:
    """Stage 1: `head_select` and the first half of the MLP's predictor. x (1, d) fp32, hidden (1, rank) fp32."""
    check_device("x", x)
    d, rank, n_heads = x.shape[1], mlp.down.shape[0], selection.n
    check_shape("x", x, 1, d)
    check_shape("attn_in", attn_in, 1, attn_in.shape[1], d)
    check_shape("predictor", predictor, n_heads, d)
    check_shape("down", mlp.down, rank, d)
    check_shape("hidden", hidden, 1, rank)
    if mlp.down.dtype != predictor.dtype:
        raise ValueError(f"both predictors need one dtype, got {predictor.dtype} and {mlp.down.dtype}")
    a_rows = 2 if d <= 4096 else 4
    pdl = use_pdl(pdl, x.device)
    _site_kernel[(n_heads + triton.cdiv(rank, a_rows),)](
        x,
        ln.weight,
        ln.bias,
        predictor,
        bias,
        threshold,
        position,
        row_state,
        attn_in,
        selection.row_bits,
        selection.counts,
        mlp.down,
        hidden,
        H=n_heads,
        D=d,
        BLOCK=column_block(d, 8),
        SLICE=triton.cdiv(d, n_heads),
        RANK=rank,
        A_ROWS=a_rows,
        RELU=mlp.relu,
        EPS=ln.eps,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["n"])
def _attend_select_kernel(
    q,
    k_cache,
    v_cache,
    row_bits,
    position,
    watermark,
    valid,
    mean,
    out,
    partial,
    largest,
    total,
    tickets,
    capacity,
    scale,
    hidden,
    up,
    up_scale,
    mlp_bias,
    mlp_threshold,
    row_state,
    ids,
    counts,
    mlp_bits,
    n,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ALL: tl.constexpr,
    HAS_WATERMARK: tl.constexpr,
    STALE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    PDL: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    N_BLOCKS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < N_BLOCKS:
        select_block(
            pid, hidden, up, up_scale, mlp_bias, mlp_threshold, 0.0, row_state, ids, counts, mlp_bits, None, n, RANK,
            CHUNK, BLOCK, PDL,
        )  # fmt: skip
    else:
        attend(
            (pid - N_BLOCKS) // SPLITS, (pid - N_BLOCKS) % SPLITS, q, k_cache, v_cache, row_bits, position, watermark,
            valid, mean, out, partial, largest, total, tickets, capacity, scale, H, HEAD_DIM, HEAD_TILE, SPLITS,
            SPLIT_TILE, PARTS, POSITIONS, ALL, HAS_WATERMARK, STALE, HAS_MEAN, PDL,
        )  # fmt: skip


def attend_select(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selection: Selection,
    position: Tensor,
    watermark: Tensor,
    valid: Tensor | None,
    out: Tensor,
    scratch: AttentionScratch,
    mlp: PredictorWeights,
    hidden: Tensor,
    mlp_threshold: Tensor,
    row_state: Tensor,
    mlp_selection: Selection,
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Stage 3: `flash_decode` and the second half of the MLP's predictor, which fills `mlp_selection`. One batch row.

    hidden (1, rank) fp32 from `site_predict`; mlp.up (ffn, rank), in int8 with row scales too. Errors: shapes, head
    dims, a CPU tensor.
    """
    pdl = use_pdl(pdl, q.device)
    arguments, constants = attention_launch(
        q, k_cache, v_cache, selection, position, watermark, valid, out, scratch, mean, POSITIONS, pdl
    )
    rank, n, n_blocks = hidden.shape[1], mlp_selection.n, mlp_selection.counts.numel()
    check_shape("q", q, 1, *q.shape[1:])
    check_shape("up", mlp.up, n, rank)
    _attend_select_kernel[(n_blocks + q.shape[1] * constants["SPLITS"],)](
        *arguments,
        hidden,
        mlp.up,
        mlp.up_scale,
        mlp.bias,
        mlp_threshold,
        row_state,
        mlp_selection.ids,
        mlp_selection.counts,
        mlp_selection.row_bits,
        n,
        **constants,
        RANK=rank,
        CHUNK=rank_chunk(rank),
        BLOCK=mlp_selection.block,
        N_BLOCKS=n_blocks,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
