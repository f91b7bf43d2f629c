# mypy: disable-error-code="assignment"
"""Look-ahead without stages of its own: an MLP predictor of `attn_in` rides with three of the attention's kernels.

Stage 1 (`site_predict`), one grid: the rows of both predictors, heads first, times n = LayerNorm(x), as in `norm_gemv`:
    head i is selected where <head_rows[i], n> + bias[i] > threshold;   hidden[r] = act(down[r] . n)
Stage 2 (`qkv_select`), one grid: the tiles of q/k/v, and programs that own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold
Stage 3 (`attend_pack`), one grid: attention as in `flash_decode`, and programs that close the gaps of that list.
Independent work in a grid costs no launch edge and no event, and it fills the last wave of the tiles. So that no
program needs more registers than a tile of q/k/v does, the second product runs on the tensor cores as well: a tile of
`up` times hidden, whose 16-bit parts (high, low) are columns of one product, which loses nothing to their rounding.
One batch row. Formulas, shapes and layouts as in `head_select`, `qkv`, `select`, `flash_decode` and `packed_rows`;
down (rank, d), up (ffn, rank), hidden (rank) fp32, finite in up's dtype.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, use_pdl
from kernels.batch_kernels import store_selection
from kernels.flash_decode import WARPS, AttentionScratch, attend, attention_launch, block_positions
from kernels.head_select import head_select_reference
from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.norm_gemv import norm_launch, norm_sums, normalised_rows
from kernels.packed_rows import PackedRows, pack_launch, pack_ranges
from kernels.qkv import qkv_launch, qkv_reference, qkv_tile
from kernels.select import PredictorWeights, Selection, predict_select_reference

PACKED_ENTRIES = 512  # of the list, for a program that packs: attention's programs have few warps
PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # of a hidden value, as columns of a product


@dataclass(frozen=True)
class SiteRows:
    """The rows that read one site: of the heads' predictor (h, d) and of the MLP's `down` (rank, d), one after another.

    sums: of all rows with the LayerNorm in front of them, see `norm_sums`.
    """

    rows: Tensor
    sums: tuple[Tensor, Tensor]
    n_heads: int
    relu: bool

    @classmethod
    def stack(cls, heads: Tensor, mlp: PredictorWeights, ln: LayerNormWeights) -> "SiteRows":
        """In the dtype of the heads' predictor; scales of `down` are multiplied in."""
        down = mlp.down.float() if mlp.down_scale is None else mlp.down.float() * mlp.down_scale[:, None]
        rows = torch.cat([heads, down.to(heads.dtype)])
        return cls(rows, norm_sums(rows, ln), len(heads), mlp.relu)


def site_predict_reference(
    x, ln, site, bias, threshold, position, row_state, attn_in, selection, hidden, pdl=False
) -> None:
    """Plain torch, in place."""
    head_select_reference(
        x, ln, site.rows[: site.n_heads], bias, threshold, position, row_state, attn_in, selection
    )  # fmt: skip
    z = layer_norm_reference(x, ln, torch.float32) @ site.rows[site.n_heads :].float().T
    hidden.copy_(z.relu() if site.relu else z)


def qkv_select_reference(
    attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, mlp, hidden,
    mlp_threshold, row_state, mlp_selection, policy="backfill", pdl=False,
) -> None:  # fmt: skip
    """Plain torch, in place."""
    qkv_reference(
        attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, policy=policy
    )
    second = PredictorWeights(
        torch.eye(hidden.shape[1], device=hidden.device), mlp.up, mlp.bias, up_scale=mlp.up_scale
    )  # fmt: skip
    mlp_selection.set_mask(predict_select_reference(hidden, second, mlp_threshold, None, row_state))


@triton.jit(do_not_specialize=["n_rows"])
def _site_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    gains,
    shifts,
    bias,
    threshold,
    position,
    row_state,
    attn_in,
    row_bits,
    counts,
    hidden,
    n_rows,
    eps,
    H: tl.constexpr,
    RELU: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    limit = tl.load(threshold)
    # Position and state are those that the step before left: older than the launch before this one.
    state = tl.load(row_state)
    kept = attn_in + tl.load(position).to(tl.int64) * D
    y = normalised_rows(
        pid, x, norm_weight, norm_bias, weight, gains, shifts, kept, n_rows, eps, D, BLOCK, ROWS, SLICE, PDL
    )
    for r in tl.static_range(ROWS):
        row = pid * ROWS + r
        offset = tl.load(bias + row, mask=row < H, other=0.0)
        chosen = ((((y[r] + offset) > limit) & (state > 0)) | (state == 2)).to(tl.int32)
        tl.store(row_bits + row, chosen, mask=row < H)
        tl.store(counts + row, chosen, mask=row < H)
        value = y[r]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(hidden + row - H, value, mask=(row >= H) & (row < n_rows))


def site_predict(
    x: Tensor,
    ln: LayerNormWeights,
    site: SiteRows,
    bias: Tensor,
    threshold: Tensor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    selection: Selection,
    hidden: Tensor,
    pdl: bool = False,
) -> None:
    """Stage 1: `head_select` and the first half of the MLP's predictor. x (1, d) fp32, hidden (1, rank) fp32."""
    check_device("x", x)
    d, n_rows, n_heads = x.shape[1], len(site.rows), selection.n
    check_shape("x", x, 1, d)
    check_shape("attn_in", attn_in, 1, attn_in.shape[1], d)
    check_shape("site.rows", site.rows, n_heads + hidden.shape[1], d)
    check_shape("bias", bias, n_heads)
    pdl = use_pdl(pdl, x.device)
    programs, constants, warps = norm_launch(d, n_rows)
    _site_kernel[(programs,)](
        x,
        ln.weight,
        ln.bias,
        site.rows,
        *site.sums,
        bias,
        threshold,
        position,
        row_state,
        attn_in,
        selection.row_bits,
        selection.counts,
        hidden,
        n_rows,
        ln.eps,
        H=n_heads,
        RELU=site.relu,
        **constants,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


@triton.jit
def _select_tile(
    block_number,
    hidden,
    up,
    up_scale,
    bias,
    threshold,
    row_state,
    ids,
    counts,
    row_bits,
    n,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits and list of the neurons block_number * BLOCK .. + BLOCK - 1."""
    rows = block_number * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    k = tl.arange(0, CHUNK)
    part = tl.arange(0, 8)
    scale = 1.0
    if up_scale is not None:
        scale = tl.load(up_scale + rows, mask=inside, other=0.0)
    offset = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    limit = tl.load(threshold)
    state = tl.load(row_state)
    w_ptrs = up + rows.to(tl.int64)[:, None] * RANK + k[None, :]
    start_dependents(PDL)
    sums = tl.zeros((BLOCK, 8), tl.float32)
    for column in tl.range(0, RANK, CHUNK, num_stages=STAGES):
        if RANK % CHUNK == 0:
            w = tl.load(w_ptrs + column, mask=inside[:, None], other=0.0)
            z = tl.load(hidden + column + k)
        else:
            w = tl.load(w_ptrs + column, mask=inside[:, None] & (column + k < RANK)[None, :], other=0.0)
            z = tl.load(hidden + column + k, mask=column + k < RANK, other=0.0)
        high = z.to(TYPE)
        columns = tl.where((part == 0)[None, :], high.to(tl.float32)[:, None], 0.0)
        if PARTS > 1:
            rest = z - high.to(tl.float32)
            middle = rest.to(TYPE)
            columns = tl.where((part == 1)[None, :], middle.to(tl.float32)[:, None], columns)
        if PARTS > 2:
            columns = tl.where((part == 2)[None, :], (rest - middle.to(tl.float32))[:, None], columns)
        sums = tl.dot(w.to(TYPE), columns.to(TYPE), sums, input_precision="ieee")
    logits = tl.sum(sums, 1) * scale + offset
    chosen = (logits > limit) & inside  # False for NaN
    chosen = (chosen & (state > 0)) | (inside & (state == 2))
    bits = chosen.to(tl.int32)
    tl.store(row_bits + rows, bits, mask=inside)
    store_selection(bits, rows, block_number, ids, counts, BLOCK)


@triton.jit(do_not_specialize=["n"])
def _qkv_select_kernel(
    attn_in,
    weight,
    qkv_bias,
    head_bits,
    position,
    watermark,
    valid,
    q,
    k_cache,
    v_cache,
    order,
    capacity,
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
    n_tiles,
    B: tl.constexpr,
    B_TILE: tl.constexpr,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
    PDL: tl.constexpr,
    RANK: tl.constexpr,
    MLP_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    MLP_STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid >= n_tiles:
        _select_tile(
            pid - n_tiles, hidden, up, up_scale, mlp_bias, mlp_threshold, row_state, ids, counts, mlp_bits, n, RANK,
            MLP_BLOCK, CHUNK, MLP_STAGES, TYPE, PARTS, PDL,
        )  # fmt: skip
    else:
        qkv_tile(
            pid, n_tiles, attn_in, weight, qkv_bias, head_bits, position, watermark, valid, q, k_cache, v_cache, order,
            capacity, B, B_TILE, H, H_TILE, HEAD_DIM, D, ROWS, PAIRS, WIDE, BLOCK, STAGES, POLICY, PDL,
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
) -> None:
    """Stage 2: `qkv`, and the second half of the MLP's predictor, which fills `mlp_selection`. One batch row.

    hidden (1, rank) fp32 from `site_predict`; mlp.up (ffn, rank) in fp32, fp16, bf16, or in int8 or fp8 with row
    scales. Errors: shapes, policy, a CPU tensor.
    """
    pdl = use_pdl(pdl, q.device)
    n_tiles, arguments, constants, warps = qkv_launch(
        attn_in, weight, bias, selection, position, watermark, valid, q, k_cache, v_cache, order, policy, pdl
    )
    rank, n, n_blocks = hidden.shape[1], mlp_selection.n, mlp_selection.counts.numel()
    check_shape("q", q, 1, *q.shape[1:])
    check_shape("up", mlp.up, n, rank)
    chunk = min(64, max(16, triton.next_power_of_2(rank)))
    narrow = mlp.up.dtype if mlp.up.dtype in PARTS else torch.float16
    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    _qkv_select_kernel[(n_tiles + n_blocks,)](
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
        n_tiles,
        **constants,
        RANK=rank,
        MLP_BLOCK=mlp_selection.block,
        CHUNK=chunk,
        MLP_STAGES=min(4, triton.cdiv(rank, chunk)),
        TYPE=types[narrow],
        PARTS=PARTS[narrow],
        num_warps=warps,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["n_ranges"])
def _attend_pack_kernel(
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
    ids,
    values,
    counts,
    packed_ids,
    packed_values,
    packed_count,
    n_ranges,
    n_packs,
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
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ALL_RANGES: tl.constexpr,
    RANGES: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < n_packs:
        pack_ranges(
            pid, ids, values, counts, packed_ids, packed_values, packed_count, n_ranges, SLOTS, SLOTS_PAD, ALL_RANGES,
            RANGES, PDL,
        )  # fmt: skip
    else:
        attend(
            (pid - n_packs) // SPLITS, (pid - n_packs) % SPLITS, q, k_cache, v_cache, row_bits, position, watermark,
            valid, mean, out, partial, largest, total, tickets, capacity, scale, H, HEAD_DIM, HEAD_TILE, SPLITS,
            SPLIT_TILE, PARTS, POSITIONS, ALL, HAS_WATERMARK, STALE, HAS_MEAN, PDL,
        )  # fmt: skip


def attend_pack(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selection: Selection,
    position: Tensor,
    watermark: Tensor,
    valid: Tensor | None,
    out: Tensor,
    scratch: AttentionScratch,
    mlp_selection: Selection,
    packed: PackedRows,
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Stage 3: `flash_decode`, and `pack` of the MLP's selection. One batch row. Errors: shapes, head dims."""
    pdl = use_pdl(pdl, q.device)
    check_shape("q", q, 1, *q.shape[1:])
    positions = block_positions(k_cache.shape[2], q.shape[1])
    arguments, constants = attention_launch(
        q, k_cache, v_cache, selection, position, watermark, valid, out, scratch, mean, positions, pdl
    )
    n_packs, pack_arguments, pack_constants = pack_launch(mlp_selection, packed, PACKED_ENTRIES)
    pack_constants["ALL_RANGES"] = pack_constants.pop("ALL")  # `attend` has an ALL too
    _attend_pack_kernel[(n_packs + q.shape[1] * constants["SPLITS"],)](
        *arguments,
        *pack_arguments,
        n_packs,
        **constants,
        **pack_constants,
        num_warps=WARPS[positions],
        launch_pdl=pdl,
    )
