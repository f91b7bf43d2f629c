"""Look-ahead without stages of its own: an MLP predictor of `attn_in` rides with the attention's first two kernels.

Stage 1 (`site_predict`), one grid: programs < h decide a head each and keep attn_in; the others give A_ROWS of
    hidden[r] = act(down[r] . n),   n = LayerNorm(x)
Stage 2 (`qkv_select`), one grid: programs < ceil(ffn / block) own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold;   the others are the q/k/v rows of the selected heads
Independent work in one grid costs no launch edge and no event, and keeps the memory busy where a stage alone ramps up.
One batch row. Formulas, shapes and layouts as in `head_select`, `select` and `qkv`; down (rank, d), up (ffn, rank),
hidden (rank) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, n_sms, start_dependents, two_tiles, use_pdl
from kernels.batch_kernels import store_selection
from kernels.dense_gemv import RowSettings
from kernels.head_select import head_select_reference
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.qkv import POLICIES, _qkv_rows, qkv_reference, qkv_settings, row_or, write_order
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
    D0: tl.constexpr,
    D1: tl.constexpr,
    SLICE: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    RELU: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    c0 = tl.arange(0, D0)
    g0 = tl.load(norm_weight + c0).to(tl.float32)
    a0 = tl.load(norm_bias + c0).to(tl.float32)
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        m1 = c1 < D
        g1 = tl.load(norm_weight + c1, mask=m1, other=0.0).to(tl.float32)
        a1 = tl.load(norm_bias + c1, mask=m1, other=0.0).to(tl.float32)
    # All rows of a program are static, so they are on their way before the wait: one head's, or A_ROWS of `down`.
    is_head = pid < H
    matrix = predictor
    first = pid
    if not is_head:
        matrix = down
        first = (pid - H) * A_ROWS
    rows = ()
    tails = ()
    for i in tl.static_range(A_ROWS):
        # A head's program asks for its own row again: no second code path, and the L1 has it.
        line = tl.where(is_head, first, tl.minimum(first + i, RANK - 1))
        rows = rows + (tl.load(matrix + line * D + c0),)
        if D1 > 0:
            tails = tails + (tl.load(matrix + line * D + c1, mask=m1, other=0.0),)
    start_dependents(PDL)
    x0 = tl.load(x + c0)
    total = tl.sum(x0)
    if D1 > 0:
        x1 = tl.load(x + c1, mask=m1, other=0.0)
        total += tl.sum(x1)
    mean = total / D
    square = tl.sum((x0 - mean) * (x0 - mean))
    if D1 > 0:
        square += tl.sum(tl.where(m1, (x1 - mean) * (x1 - mean), 0.0))
    scale = 1.0 / tl.sqrt(square / D + EPS)
    n0 = ((x0 - mean) * scale * g0 + a0).to(attn_in.dtype.element_ty)
    if D1 > 0:
        n1 = ((x1 - mean) * scale * g1 + a1).to(attn_in.dtype.element_ty)
    if is_head:
        kept_row = attn_in + tl.load(position).to(tl.int64) * D
        tl.store(kept_row + c0, n0, mask=(c0 >= pid * SLICE) & (c0 < pid * SLICE + SLICE))
        if D1 > 0:
            tl.store(kept_row + c1, n1, mask=m1 & (c1 >= pid * SLICE) & (c1 < pid * SLICE + SLICE))
        logit = tl.sum(rows[0].to(tl.float32) * n0.to(tl.float32))
        if D1 > 0:
            logit += tl.sum(tails[0].to(tl.float32) * n1.to(tl.float32))
        state = tl.load(row_state)
        chosen = (((logit + tl.load(bias + pid)) > tl.load(threshold)) & (state > 0)) | (state == 2)
        tl.store(row_bits + pid, chosen.to(tl.int32))
        tl.store(counts + pid, chosen.to(tl.int32))
    else:
        for i in tl.static_range(A_ROWS):
            value = tl.sum(rows[i].to(tl.float32) * n0.to(tl.float32))
            if D1 > 0:
                value += tl.sum(tails[i].to(tl.float32) * n1.to(tl.float32))
            if RELU:
                value = tl.maximum(value, 0.0)
            # The last program may hold fewer rows: it repeats the last one, with the same value.
            tl.store(hidden + tl.minimum(first + i, RANK - 1), value)


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
    d0, d1 = two_tiles(d)
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
        D0=d0,
        D1=d1,
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
    D0: tl.constexpr,
    D1: tl.constexpr,
    ROWS: tl.constexpr,
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
        start_dependents(PDL)
        if pid == N_BLOCKS:
            write_order(row_bits, order, H, H_TILE)
        _qkv_rows(
            pid - N_BLOCKS, tl.num_programs(0) - N_BLOCKS, attn_in, weight, bias, row_bits, position, watermark,
            valid, q, k_cache, v_cache, capacity, 1, H, H_TILE, HEAD_DIM, D, D0, D1, ROWS, POLICY,
        )  # fmt: skip


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
    settings: RowSettings | None = None,
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
    d0, d1 = two_tiles(d)
    chunk = rank & -rank
    chunk = min(chunk, 256) if chunk >= 64 else min(triton.next_power_of_2(rank), 128)
    n_blocks = mlp_selection.counts.numel()
    pdl = use_pdl(pdl, q.device)
    settings = settings or qkv_settings(d)
    _qkv_select_kernel[(n_blocks + n_sms(q.device) * settings.programs,)](
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
        D0=d0,
        D1=d1,
        ROWS=settings.rows,
        POLICY=POLICIES[policy],
        RANK=rank,
        CHUNK=chunk,
        BLOCK=mlp_selection.block,
        N_BLOCKS=n_blocks,
        PDL=pdl,
        num_warps=settings.warps if d >= 2048 else 4,
        launch_pdl=pdl,
    )
