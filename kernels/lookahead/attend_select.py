"""Look-ahead, stage 3: attention, and the second half of an MLP predictor with its packed list, in one grid.

Attention as in `flash_decode`, and after its programs those that own `block` neurons each, select those with
    up[i] . hidden + bias[i] > threshold
and write them to the packed list. Independent work in a grid costs no launch edge and no event. hidden comes from
stage 1, `site_predict`, which is older than stage 2, `qkv`: so these programs read it, and multiply, while tiles of
q/k/v still run, and only their list waits for these. Attention reads little and is made of waiting; what is left of the
selection then is done beside it.
A program finds its place in the list once it knows how many neurons all programs before it have selected: each
announces its number in memory, and looks until all earlier ones are there. They have begun before it, since the
hardware begins programs in their order, and wait for no later one (the look-back of Merrill and Garland's "Single-pass
Parallel Prefix Scan with Decoupled Look-back", 2016, without its second level: all numbers are read at once).
One batch row. Shapes as in `flash_decode` and `select`; up (ffn, rank) as `select` takes it, hidden (1, rank) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.flash_decode import (
    WARPS,
    AttentionScratch,
    attend,
    attention_launch,
    block_positions,
    flash_decode_reference,
)
from kernels.common.checks import check_shape, require
from kernels.common.launch import dot_type, start_dependents, use_pdl, wait_for_predecessor
from kernels.lookahead.select_nibbles import nibble_logits, takes
from kernels.lookahead.select_tile import TERMS, tile_logits
from kernels.mlp.codes import stored_width
from kernels.mlp.select import PredictorWeights, Selection, predict_select_reference
from kernels.mlp.select_batch import store_chosen
from kernels.mlp.sparse_fc2 import PackedSelection


def attend_select_reference(
    q, k_cache, v_cache, selection, position, watermark, valid, out, scratch, mlp, hidden, mlp_threshold, row_state,
    mlp_selection, packed, pdl=False, mean=None,
) -> None:  # fmt: skip
    """Plain torch, in place."""
    flash_decode_reference(q, k_cache, v_cache, selection, position, watermark, valid, out, mean=mean)
    second = PredictorWeights(
        torch.eye(hidden.shape[1], device=hidden.device), mlp.up, mlp.bias, up_scale=mlp.up_scale
    )  # fmt: skip
    mlp_selection.set_mask(predict_select_reference(hidden, second, mlp_threshold, None, row_state))
    ids = mlp_selection.indices()
    packed.ids[: len(ids)] = ids.int()
    packed.count.fill_(len(ids))


@triton.jit
def _store_in_order(bits, rows, block_number, n_blocks, announced, ids, count, ALL: tl.constexpr):
    """The neurons `rows` (BLOCK,) whose bit is set, behind those of all earlier blocks; the last block stores how many.

    ALL: a power of two, n_blocks at least.
    """
    own = tl.sum(bits, 0)
    tl.atomic_xchg(announced + block_number, own + 1, sem="relaxed")  # the number is all that others read
    every = tl.arange(0, ALL)
    numbers = tl.load(announced + every, mask=every < block_number, other=1, volatile=True)
    while tl.min(numbers, 0) == 0:
        numbers = tl.load(announced + every, mask=every < block_number, other=1, volatile=True)
    start = tl.sum(numbers - 1, 0)
    tl.store(ids + start + tl.cumsum(bits, 0) - 1, rows, mask=bits != 0)
    if block_number == n_blocks - 1:
        tl.store(count, start + own)


@triton.jit
def _select_block(
    block_number,
    n_blocks,
    hidden,
    up,
    up_scale,
    bias,
    threshold,
    row_state,
    ids,
    counts,
    row_bits,
    packed_ids,
    packed_count,
    announced,
    n,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    TERMS: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's whole work, its wait included: list and bits of neurons block_number * BLOCK .. + BLOCK - 1."""
    start_dependents(PDL)
    rows = block_number * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(threshold)
    state = tl.load(row_state, cache_modifier=".cg")
    if WORDS:
        logits = nibble_logits(block_number, hidden, up, up_scale, bias, n, RANK, BLOCK, LANES)
    else:
        logits = tile_logits(block_number, hidden, up, up_scale, bias, n, RANK, BLOCK, CHUNK, STAGES, TYPE, TERMS)
    wait_for_predecessor(PDL)
    bits = store_chosen(logits, limit, state, rows, rows < n, block_number, ids, counts, row_bits, BLOCK)
    _store_in_order(bits, rows, block_number, n_blocks, announced, packed_ids, packed_count, ALL_BLOCKS)


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
    packed_ids,
    packed_count,
    announced,
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
    MLP_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    TERMS: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid >= H * SPLITS:
        _select_block(
            pid - H * SPLITS, tl.num_programs(0) - H * SPLITS, hidden, up, up_scale, mlp_bias, mlp_threshold, row_state,
            ids, counts, mlp_bits, packed_ids, packed_count, announced, n, RANK, MLP_BLOCK, CHUNK, STAGES, TYPE, TERMS,
            WORDS, LANES, ALL_BLOCKS, PDL,
        )  # fmt: skip
    else:
        attend(
            pid // SPLITS, pid % SPLITS, q, k_cache, v_cache, row_bits, position, watermark, valid, mean, out, partial,
            largest, total, tickets, capacity, scale, H, HEAD_DIM, HEAD_TILE, SPLITS, SPLIT_TILE, PARTS, POSITIONS,
            ALL, HAS_WATERMARK, STALE, HAS_MEAN, PDL,
        )  # fmt: skip


def attention_settings(capacity: int, n_heads: int) -> tuple[int, int]:
    """(positions, warps) of a program of attention; those that select have as many warps."""
    positions = block_positions(capacity, n_heads)
    return positions, WARPS[positions]


def attend_select(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selection: Selection | None,
    position: Tensor,
    watermark: Tensor | None,
    valid: Tensor | None,
    out: Tensor,
    scratch: AttentionScratch,
    mlp: PredictorWeights,
    hidden: Tensor,
    mlp_threshold: Tensor,
    row_state: Tensor,
    mlp_selection: Selection,
    packed: PackedSelection,
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Stage 3: `flash_decode`, and the second half of the MLP's predictor, which fills mlp_selection and packed.

    packed.announced: zero, as `site_predict` leaves it. hidden and row_state are older than the launch before this one.
    mlp.up (ffn, rank) in fp32, fp16, bf16, in int8 or fp8 with row scales, or as nibbles with such scales. One batch
    row. Errors: shapes, head dims, a CPU tensor.
    """
    pdl = use_pdl(pdl, q.device)
    check_shape("q", q, 1, *q.shape[1:])
    positions, warps = attention_settings(k_cache.shape[2], q.shape[1])
    arguments, constants = attention_launch(
        q, k_cache, v_cache, selection, position, watermark, valid, out, scratch, mean, positions, pdl
    )
    rank, n, n_blocks = hidden.shape[1], mlp_selection.n, mlp_selection.counts.numel()
    width = stored_width(mlp.up, rank)
    check_shape("up", mlp.up, n, width)
    check_shape("packed.ids", packed.ids, n)
    require(n_blocks <= packed.announced.numel(), f"blocks of {mlp_selection.block} neurons are too small to be packed")
    chunk = min(64, max(16, triton.next_power_of_2(width)))
    multiplied = dot_type(mlp.up.dtype)
    _attend_select_kernel[(q.shape[1] * constants["SPLITS"] + n_blocks,)](
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
        packed.ids,
        packed.count,
        packed.announced,
        n,
        **constants,
        RANK=rank,
        MLP_BLOCK=mlp_selection.block,
        CHUNK=chunk,
        STAGES=min(4, triton.cdiv(width, chunk)),
        TYPE=multiplied,
        TERMS=TERMS[multiplied],
        WORDS=mlp.up.dtype == torch.uint8 and mlp.up_scale is not None and takes(rank, mlp_selection.block, 32 * warps),
        LANES=32 * warps,
        ALL_BLOCKS=triton.next_power_of_2(n_blocks),
        num_warps=warps,
        launch_pdl=pdl,
    )
