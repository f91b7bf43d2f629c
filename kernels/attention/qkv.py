"""Query, key and value rows of the selected heads, with exact back-fill of the K/V that were skipped earlier.

    q[b, i]           = W_q[i] n(b, t) + b_q[i]                        t = position[b], for heads i that row b selects
    k_cache[b, i, p]  = W_k[i] n(b, p) + b_k[i]   (v likewise)         p = watermark[b, i] .. t
    n(b, p)           = attn_in[b, p], the kept LayerNorm outputs

weight (h, 3, head_dim, d) head-major: one head's rows are one contiguous range. bias (h, 3, head_dim). q (B, h,
head_dim) fp32. k_cache, v_cache (B, h, T, head_dim). watermark (B, h) int32 is only read here: the attention kernel,
the next stage, advances it, because other programs of the same head may still be reading it.
A program multiplies a tile of a head's rows with up to `pairs` inputs at once on the tensor cores: the (batch row,
position) pairs that the head lacks, the present one among them. A pair that does not exist is not read, so back-fill
and batches cost no second pass over the weights, and a tile has no reduction between threads. A head that was idle for
long lacks more: its pairs are shared out to several programs, which read the same weights at about the same time.
4-bit rows have tiles of their own, see `qkv_int4`. attn_in is then fp16.
Policies: "backfill" as above. "always" writes K/V of every head at t and reads all their weights. "stale" writes
K/V at t only and marks it in `valid` (B, h, T) uint8: what was skipped stays missing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.attention.qkv_int4 import own_tile
from dejavu_train.kernels.attention.qkv_pairs import places, store_rows
from dejavu_train.kernels.common.checks import INTERPRET, check_dtype, check_projection, check_shape, require
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.launch import row_or, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear

POLICIES = {"backfill": 0, "always": 1, "stale": 2}


@dataclass(frozen=True)
class TileSettings:
    """rows: of a tile. pairs: inputs of one product. block: columns a step, stages: of the pipeline over them.

    wide: inputs of one product for a head that lacks more than `pairs`. Above `pairs` in steps of half the columns. Of
    4-bit rows and one batch row: for what a head lacks beyond the first `pairs`.
    4-bit rows: 16 rows, 2 pairs, wide 4 or 8. block: a tile's threads. stages: units of columns of a warp on their way.
    registers: of a thread, at most, where that is less than the compiler would take. room: bytes of shared memory that
    the queue of 4-bit rows takes at least, so that no more programs fit on a multiprocessor than are meant to.
    """

    rows: int
    pairs: int
    block: int
    stages: int
    warps: int
    wide: int
    registers: int | None = None
    room: int = 0


def qkv_settings(batch: int, head_dim: int, d: int, element_size: int) -> TileSettings:
    """Launch settings, from whole steps under the carveout of `launch.share_carveout`: a chain of this stage alone
    misleads, because its programs then start beside those of the same kernel. A tile is of one of a head's q, k, v."""
    if batch == 1:
        rows, stages = (32, 4) if 7168 <= d < 8192 else (16, 6)
        pairs, block, warps, wide = 8, 128, 1, 8
    elif batch <= MOST_TOKENS:
        rows, pairs, block, stages, warps, wide = 16, 16, 128, 6, 1, 32
    else:
        rows, pairs, block, stages, warps, wide = 32, 32, 128, 4, 4, 32
    rows = min(rows, head_dim & -head_dim)
    block = min(block * 2 // max(2, element_size), max(32, triton.next_power_of_2(d)))
    return TileSettings(rows, pairs, block, stages, warps, wide)


def int4_qkv_settings(d: int, policy: str) -> TileSettings:
    """Launch settings of 4-bit rows by width, from whole steps with 100, 85 and 50 % of the heads
    (`benchmarks/results/int4_settings.csv`): eight units of a tile on their way, by two warps. With 168 registers
    six programs fit on a multiprocessor (Triton 3.9 spills some 60 bytes for it outside the loops, 3.6 none).
    "always" takes 112 to 128: up to 5120 columns room is what keeps more of these out. Around 7168 all programs of
    "always" are resident at once with one warp each, which selected heads do not gain by (30B with half of them:
    2.70 ms, by two warps 2.50)."""
    warps, stages = (1 if INTERPRET or (policy == "always" and 5120 < d <= 8192) else 2), 4
    registers = 128 if policy == "always" and warps == 2 else 168
    return TileSettings(16, 2, 32 * warps, stages, warps, wide=4, registers=registers, room=20480 if d <= 5120 else 0)


def qkv_reference(
    weights: Linear,
    cache: KvCache,
    selection: Selection,
    position: Tensor,
    q: Tensor,
    policy: str = "backfill",
    pdl: bool = False,
) -> None:
    """Plain torch, one (row, head) at a time."""
    batch, n_heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weight, bias = weights.weight.dense(wide), weights.bias
    mask = selection.to_mask(batch)
    for b in range(batch):
        t = int(position[b])
        for head in range(n_heads):
            chosen = bool(mask[b, head])
            if not chosen and policy != "always":
                continue
            first = t
            if policy == "backfill":
                assert cache.watermark is not None
                first = int(cache.watermark[b, head])
            n = cache.attn_in[b, first : t + 1].to(wide)
            rows = n @ weight[head].transpose(1, 2) + bias[head].to(wide)[:, None]
            cache.k[b, head, first : t + 1] = rows[1].to(cache.k.dtype)
            cache.v[b, head, first : t + 1] = rows[2].to(cache.v.dtype)
            if chosen:
                q[b, head] = rows[0, -1]
            if policy == "stale":
                assert cache.valid is not None
                cache.valid[b, head, t] = 1


@triton.jit
def _fill(
    head,
    row,
    start,
    n_pairs,
    first,
    ends,
    attn_in,
    weight,
    bias,
    valid,
    q,
    k_cache,
    v_cache,
    capacity,
    B: tl.constexpr,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Values of ROWS rows of a head for the pairs start .. start + PAIRS - 1 of n_pairs, see `qkv_pairs`."""
    c = tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, PAIRS)
    exists = start + i < n_pairs
    of_row, p = places(i, start, first, ends, B)
    line = head * (3 * HEAD_DIM) + row
    offset = tl.load(bias + line + r)  # used after the product: nothing waits for it before
    rows = row + r
    # Scalar bases and constant offsets: little is left to compute before the first load.
    if B == 1:
        present = tl.sum(first) + start
        x_ptrs = attn_in + present.to(tl.int64) * D + (i * D)[None, :] + c[:, None]
    else:
        x_ptrs = attn_in + (of_row * capacity + p).to(tl.int64)[None, :] * D + c[:, None]
    w_ptrs = weight + line.to(tl.int64) * D + (r * D)[:, None] + c[None, :]
    values = tl.zeros((ROWS, PAIRS), tl.float32)
    for column in tl.range(0, D, BLOCK, num_stages=STAGES):
        if D % BLOCK == 0:
            w = tl.load(w_ptrs + column, eviction_policy="evict_first")
            x = tl.load(x_ptrs + column, mask=exists[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + column, mask=(column + c < D)[None, :], other=0.0)
            x = tl.load(x_ptrs + column, mask=exists[None, :] & (column + c < D)[:, None], other=0.0)
        values = tl.dot(w, x, values, input_precision="ieee")
    values += offset.to(tl.float32)[:, None]
    store_rows(values, head, row, rows, of_row, p, exists, valid, q, k_cache, v_cache, capacity, H, HEAD_DIM, POLICY)


@triton.jit
def _listed_tiles(
    tile,
    n_tiles,
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
    capacity,
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
):
    """A program's whole work, its wait included: items tile, tile + n_tiles, ...

    An item is ROWS rows of a head and up to WIDE of the pairs that it lacks: first the rows of q, which need the
    present position only, then those of k and v for each group of pairs. All take about as long, so that none is late.
    """
    TILES: tl.constexpr = HEAD_DIM // ROWS  # of each of q, k, v
    b = tl.arange(0, B_TILE)
    heads = tl.arange(0, H_TILE)
    inside = (b < B)[:, None] & (heads < H)[None, :]
    # Positions and watermarks are those that the step before left.
    last = tl.load(position + b, mask=b < B, other=0)
    lacking = tl.where(inside, 1, 0)  # pairs by (row, head)
    if POLICY == 0:
        marks = tl.load(watermark + b[:, None] * H + heads[None, :], mask=inside, other=0)
        lacking = tl.where(inside, last[:, None] + 1 - tl.minimum(marks, last[:, None]), 0)
    groups = (tl.sum(lacking, 0) + WIDE - 1) // WIDE
    wait_for_predecessor(PDL)
    head_bits = tl.load(row_bits + heads, mask=heads < H, other=0)
    chosen = head_bits != 0
    if POLICY == 1:
        items = tl.where(chosen, TILES, 0) + 2 * TILES * groups
    else:
        if B > 1:
            lacking = tl.where(((head_bits[None, :] >> b[:, None]) & 1) != 0, lacking, 0)
            groups = (tl.sum(lacking, 0) + WIDE - 1) // WIDE
        items = tl.where(chosen, TILES + 2 * TILES * groups, 0)
    ends = tl.cumsum(items, 0)
    begins = ends - items
    if POLICY == 1:
        begins -= tl.where(chosen, 0, TILES)  # no rows of q
    for item in range(tile, tl.sum(items), n_tiles):
        own = (ends > item) & (ends - items <= item)
        head = tl.sum(tl.where(own, heads, 0))
        place = item - tl.sum(tl.where(own, begins, 0))
        group = tl.maximum(place - TILES, 0) // (2 * TILES)
        row = (place - group * (2 * TILES)) * ROWS
        start = group * WIDE
        # The pairs (row b, position first[b] .. last[b]) that the head lacks, counted on through the rows.
        n = tl.sum(tl.where(own[None, :], lacking, 0), 1)
        if POLICY == 1:
            selected = (tl.sum(tl.where(own, head_bits, 0)) >> b) & 1
            n = tl.where(place < TILES, selected, n)
        else:
            n = tl.where(place < TILES, tl.minimum(n, 1), n)
        n_pairs = tl.sum(n)
        if WIDE > PAIRS and n_pairs > PAIRS:  # the same shared memory: in steps of half the columns
            _fill(
                head, row, start, n_pairs, last + 1 - n, tl.cumsum(n, 0), attn_in, weight, bias, valid, q, k_cache,
                v_cache, capacity, B, H, HEAD_DIM, D, ROWS, WIDE, BLOCK // 2, STAGES, POLICY,
            )  # fmt: skip
        else:
            _fill(
                head, row, start, n_pairs, last + 1 - n, tl.cumsum(n, 0), attn_in, weight, bias, valid, q, k_cache,
                v_cache, capacity, B, H, HEAD_DIM, D, ROWS, PAIRS, BLOCK, STAGES, POLICY,
            )  # fmt: skip


@triton.jit
def qkv_tile(
    tile,
    n_tiles,
    attn_in,
    weight,
    scales,
    bias,
    row_bits,
    position,
    watermark,
    valid,
    q,
    k_cache,
    v_cache,
    capacity,
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
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    POLICY: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's whole work, its wait included, program `tile` of n_tiles. Other kernels' grids may carry it too."""
    if GROUP > 0:
        own_tile(
            tile, n_tiles, attn_in, weight, scales, bias, row_bits, position, watermark, valid, q, k_cache, v_cache,
            capacity, B, B_TILE, H, H_TILE, HEAD_DIM, D, PAIRS, WIDE, BLOCK, STAGES, GROUP, ROOM, POLICY, PDL,
        )  # fmt: skip
    else:
        _listed_tiles(
            tile, n_tiles, attn_in, weight, bias, row_bits, position, watermark, valid, q, k_cache, v_cache, capacity,
            B, B_TILE, H, H_TILE, HEAD_DIM, D, ROWS, PAIRS, WIDE, BLOCK, STAGES, POLICY, PDL,
        )  # fmt: skip


@triton.jit
def _qkv_kernel(
    attn_in, weight, scales, bias, row_bits, position, watermark, valid, q, k_cache, v_cache, capacity,
    B: tl.constexpr, B_TILE: tl.constexpr, H: tl.constexpr, H_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, POLICY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    qkv_tile(
        tl.program_id(0), tl.num_programs(0), attn_in, weight, scales, bias, row_bits, position, watermark, valid, q,
        k_cache, v_cache, capacity, B, B_TILE, H, H_TILE, HEAD_DIM, D, ROWS, PAIRS, WIDE, BLOCK, STAGES, GROUP,
        ROOM, POLICY, PDL,
    )  # fmt: skip


def qkv(
    weights: Linear,
    cache: KvCache,
    selection: Selection,
    position: Tensor,
    q: Tensor,
    policy: str = "backfill",
    pdl: bool = False,
    settings: TileSettings | None = None,
) -> None:
    """See the module's formula. fp32 sums, one writer an element: deterministic. Errors: shapes, dims, policy."""
    pdl = use_pdl(pdl, q.device)
    n_tiles, arguments, constants, warps = qkv_launch(weights, cache, selection, position, q, policy, pdl, settings)
    _qkv_kernel[(n_tiles,)](*arguments, **constants, num_warps=warps, launch_pdl=pdl)


def qkv_launch(
    weights: Linear,
    cache: KvCache,
    selection: Selection,
    position: Tensor,
    q: Tensor,
    policy: str,
    pdl: bool,
    settings: TileSettings | None = None,
) -> tuple[int, tuple[Any, ...], dict[str, Any], int]:
    """(tiles, arguments, constants, warps) of `qkv_tile`, the same in every grid that carries it, checked.

    As many tiles as all heads have: the hardware hands them out, and those that no selected head needs leave.
    """
    weight, attn_in, d = weights.weight, cache.attn_in, weights.weight.shape[-1]
    batch, n_heads, head_dim = check_projection(attn_in, weights, q, cache, position)
    check_shape("attn_in", attn_in, batch, cache.capacity, d)
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}, expected one of {', '.join(POLICIES)}")
    if policy == "stale" and cache.valid is None:
        raise ValueError('the policy "stale" needs the tensor of valid positions')
    if policy == "backfill" and cache.watermark is None:
        raise ValueError('the policy "backfill" needs the tensor of watermarks')
    rows: tuple[Tensor, Tensor, Tensor | None]
    if weight.format is Format.INT4:
        check_dtype("attn_in", attn_in, (torch.float16,))
        settings = settings or int4_qkv_settings(d, policy)
        require(batch <= MOST_TOKENS, f"4-bit rows of selected heads take up to {MOST_TOKENS} batch rows, not {batch}")
        require(
            (settings.rows, settings.pairs) == (16, 2) and settings.wide in (4, 8),
            "4-bit rows need rows 16, pairs 2 and wide 4 or 8",
        )
        rows, group = (attn_in.view(torch.int32), weight.words, weight.scales), weight.group
    else:
        settings = settings or qkv_settings(batch, head_dim, d, weight.numbers.element_size())
        rows, group = (attn_in, weight.numbers, None), 0
    watermark = row_or(cache.watermark, position)
    arguments = (
        *rows,
        weights.bias,
        selection.row_bits,
        position,
        watermark,
        row_or(cache.valid, watermark),
        q,
        cache.k,
        cache.v,
        cache.capacity,
    )
    constants = {
        "B": batch,
        "B_TILE": triton.next_power_of_2(batch),
        "H": n_heads,
        "H_TILE": triton.next_power_of_2(n_heads),
        "HEAD_DIM": head_dim,
        "D": d,
        "ROWS": settings.rows,
        "PAIRS": settings.pairs,
        "WIDE": max(settings.wide, settings.pairs, triton.next_power_of_2(batch)),
        "BLOCK": settings.block,
        "STAGES": settings.stages,
        "GROUP": group,
        "ROOM": settings.room,
        "POLICY": POLICIES[policy],
        "PDL": pdl,
    }
    if settings.registers:
        constants["maxnreg"] = settings.registers
    return 3 * head_dim * n_heads // settings.rows, arguments, constants, settings.warps
