"""Look-ahead, stage 3: attention and the packing of the neurons' list, in one grid.

Attention as in `flash_decode`, and programs that close the gaps of the list as `pack` does. One batch row.
"""

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.attention.flash_decode import (
    WARPS,
    AttentionScratch,
    attend,
    attention_launch,
    block_positions,
)
from dejavu_train.kernels.common.checks import check_shape
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.launch import use_pdl
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.mlp.pack import PackedSelection, pack_launch, pack_ranges

PACKED_ENTRIES = 512  # of the list, for a program that packs: attention's programs have few warps


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
    counts,
    packed_ids,
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
            pid, ids, counts, packed_ids, packed_count, n_ranges, SLOTS, SLOTS_PAD, ALL_RANGES,
            RANGES, True, PDL,
        )  # fmt: skip
    else:
        attend(
            (pid - n_packs) // SPLITS, (pid - n_packs) % SPLITS, q, k_cache, v_cache, row_bits, position, watermark,
            valid, mean, out, partial, largest, total, tickets, capacity, scale, H, HEAD_DIM, HEAD_TILE, SPLITS,
            SPLIT_TILE, PARTS, POSITIONS, ALL, HAS_WATERMARK, STALE, HAS_MEAN, PDL,
        )  # fmt: skip


def attend_pack(
    q: Tensor,
    cache: KvCache,
    selection: Selection | None,
    position: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    mlp_selection: Selection,
    packed: PackedSelection,
    pdl: bool = False,
    mean: Tensor | None = None,
) -> None:
    """Stage 3: `flash_decode`, and `pack` of the MLP's selection. One batch row. Errors: shapes, head dims."""
    pdl = use_pdl(pdl, q.device)
    check_shape("q", q, 1, *q.shape[1:])
    positions = block_positions(cache.capacity, q.shape[1])
    arguments, constants = attention_launch(q, cache, selection, position, out, scratch, mean, positions, pdl)
    n_packs, pack_arguments, pack_constants = pack_launch(mlp_selection, packed, PACKED_ENTRIES)
    _attend_pack_kernel[(n_packs + q.shape[1] * constants["SPLITS"],)](
        *arguments,
        *pack_arguments,
        n_packs,
        **constants,
        **pack_constants,
        num_warps=WARPS[positions],
        launch_pdl=pdl,
    )
