# mypy: disable-error-code="assignment"
"""Look-ahead without stages of its own: an MLP predictor of `attn_in` rides with the attention's first two kernels.

Stage 1 (`site_predict`), one grid: programs < h decide a head each and keep attn_in; the others give A_ROWS of
    hidden[r] = act(down[r] . n),   n = LayerNorm(x)
Stage 2 (`qkv_select`), one grid: programs < ceil(ffn / block) own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold;   the others are the q/k/v rows of the selected heads
Independent work in one grid costs no launch edge and no event, and keeps the memory busy where a stage alone ramps up.
One batch row. Formulas, shapes and layouts as in `head_select`, `select` and `qkv`; down (rank, d), up (ffn, rank),
hidden (rank) fp32.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, use_pdl
from kernels.batch_kernels import store_selection
from kernels.dense_gemv import normalised_vector, row_pieces
from kernels.head_select import head_select_reference
from kernels.launch import column_block
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.qkv import (
    POLICIES,
    TileSettings,
    place_and_state,
    qkv_reference,
    qkv_settings,
    qkv_tile,
    row_or,
    write_order,
)
from kernels.select import PredictorWeights, Selection, predict_select_reference


def site_predict_reference(
    x, ln, predictor, bias, threshold, position, row_state, attn_in, selection, mlp, hidden, pdl=False
) -> None:
    """Plain torch, in place."""
    head_select_reference(x, ln, predictor, bias, threshold, position, row_state, attn_in, selection)
    z = layer_norm_reference(x, ln, attn_in.dtype).float() @ mlp.down.float().T
    hidden.copy_(z.relu() if mlp.relu else z)


def qkv_select_reference(
    attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, mlp, hidden,
    mlp_threshold, row_state, mlp_selection, policy="backfill", pdl=False,
) -> None:  # fmt: skip
    """Plain torch, in place."""
    qkv_reference(attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, policy)
    second = PredictorWeights(torch.eye(hidden.shape[1], device=hidden.device), mlp.up, mlp.bias)
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


@triton.jit
def _qkv_select_kernel(
    attn_in,
    weight,
    bias,
    row_bits,
    position,
    watermark,
    valid,
    q,
    k_cache,
    v_cache,
    order,
    capacity,
    up,
    hidden,
    mlp_bias,
    mlp_threshold,
    row_state,
    ids,
    counts,
    mlp_bits,
    n,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    N_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < N_BLOCKS:
        rows = pid * BLOCK + tl.arange(0, BLOCK)
        inside = rows < n
        r = tl.arange(0, CHUNK)
        STEPS: tl.constexpr = (RANK + CHUNK - 1) // CHUNK
        tiles = ()
        for j in tl.static_range(STEPS):
            tile_ptrs = up + rows.to(tl.int64)[:, None] * RANK + (j * CHUNK + r)[None, :]
            mask = inside[:, None] & (j * CHUNK + r < RANK)[None, :]
            tiles = tiles + (tl.load(tile_ptrs, mask=mask, other=0.0),)
        offset = tl.load(mlp_bias + rows, mask=inside, other=0.0).to(tl.float32)
        start_dependents(PDL)
        acc = tl.zeros((BLOCK, CHUNK), tl.float32)
        for j in tl.static_range(STEPS):
            z = tl.load(hidden + j * CHUNK + r, mask=j * CHUNK + r < RANK, other=0.0)
            acc += tiles[j].to(tl.float32) * z[None, :]
        logits = tl.sum(acc, 1) + offset
        state = tl.load(row_state)
        chosen = (((logits > tl.load(mlp_threshold)) & (state > 0)) | (state == 2)) & inside
        bits = chosen.to(tl.int32)
        tl.store(mlp_bits + rows, bits, mask=inside)
        store_selection(bits, rows, pid, ids, counts, BLOCK)
    else:
        place, row, last, marks = place_and_state(
            pid - N_BLOCKS, position, watermark, 1, 1, H, H_TILE, HEAD_DIM, ROWS, POLICY
        )
        start_dependents(PDL)
        if pid == tl.num_programs(0) - 1:
            write_order(row_bits, order, H, H_TILE)
        qkv_tile(
            place, row, last, marks, attn_in, weight, bias, row_bits, watermark, valid, q, k_cache, v_cache, capacity,
            1, 1, H, H_TILE, HEAD_DIM, D, ROWS, PAIRS, COLUMNS, STAGES, POLICY,
        )  # fmt: skip


def fused_settings(head_dim: int, d: int, element_size: int) -> TileSettings:
    """As `qkv_settings`, but with the threads that a block of the predictor wants; not swept."""
    alone = qkv_settings(1, head_dim, d, element_size)
    return replace(alone, rows=min(32, head_dim & -head_dim), stages=4, warps=4)


def qkv_select(
    attn_in: Tensor,
    weight: Tensor,
    bias: Tensor,
    selection: Selection,
    position: Tensor,
    watermark: Tensor,
    valid: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    order: Tensor,
    mlp: PredictorWeights,
    hidden: Tensor,
    mlp_threshold: Tensor,
    row_state: Tensor,
    mlp_selection: Selection,
    policy: str = "backfill",
    pdl: bool = False,
    settings: TileSettings | None = None,
) -> None:
    """Stage 2: `qkv` and the second half of the MLP's predictor, which fills `mlp_selection`. One batch row."""
    check_device("q", q)
    _, n_heads, head_dim = q.shape
    check_shape("q", q, 1, n_heads, head_dim)
    d, rank, n = weight.shape[-1], hidden.shape[1], mlp_selection.n
    check_shape("up", mlp.up, n, rank)
    if mlp.bias is None:
        raise ValueError("the predictor needs a bias here (zeros will do)")
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}, expected one of {', '.join(POLICIES)}")
    chunk = rank & -rank
    chunk = min(chunk, 256) if chunk >= 64 else min(triton.next_power_of_2(rank), 128)
    n_blocks = mlp_selection.counts.numel()
    pdl = use_pdl(pdl, q.device)
    settings = settings or fused_settings(head_dim, d, weight.element_size())
    _qkv_select_kernel[(n_blocks + 3 * head_dim * n_heads // settings.rows,)](
        attn_in,
        weight,
        bias,
        selection.row_bits,
        position,
        watermark,
        row_or(valid, watermark),
        q,
        k_cache,
        v_cache,
        order,
        k_cache.shape[2],
        mlp.up,
        hidden,
        mlp.bias,
        mlp_threshold,
        row_state,
        mlp_selection.ids,
        mlp_selection.counts,
        mlp_selection.row_bits,
        n,
        H=n_heads,
        H_TILE=triton.next_power_of_2(n_heads),
        HEAD_DIM=head_dim,
        D=d,
        ROWS=settings.rows,
        PAIRS=settings.pairs,
        COLUMNS=settings.block,
        STAGES=settings.stages,
        POLICY=POLICIES[policy],
        RANK=rank,
        CHUNK=chunk,
        BLOCK=mlp_selection.block,
        N_BLOCKS=n_blocks,
        PDL=pdl,
        num_warps=settings.warps,
        launch_pdl=pdl,
    )
