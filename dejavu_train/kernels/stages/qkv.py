"""Query, key and value rows of the selected heads, with exact back-fill of the K/V that were skipped earlier.

    q[b, i, j]        = turn(W_q[i, j] n(b, t) + b_q[i, j], t)     t = position[b], for heads i that row b selects
    k_cache[b, i, p]  = turn(W_k[i] n(b, p) + b_k[i], p)           p = watermark[b, i] .. t
    v_cache[b, i, p]  = W_v[i] n(b, p) + b_v[i]
    n(b, p)           = attn_in[b, p], the kept outputs of the norm

A head i of K and V is selected with the r heads of q that share it, j. turn: by the cache's table of a rotation, if it
has one. weight (h, r + 2, head_dim, d) head-major. q (B, h * r, head_dim) fp32. k_cache, v_cache (B, h, T, head_dim).
watermark (B, h) int32 is only read here. The attention kernel advances it.

A program multiplies a tile of a head's rows with up to `pairs` inputs at once on the tensor cores. They are the (batch
row, position) pairs that the head lacks, the present one among them. So back-fill and batches cost no second pass over
the weights. Pairs of a head that was idle for long are shared out to several programs. A format's programs are handed
in (`PROGRAMS`). With 4-bit rows attn_in is fp16.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_dtype, check_projection, check_shape, require
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.launch import as_dependent, constant_fields, row_or
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.common.positions import turned_reference
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.stages.qkv_listed import listed_tiles
from dejavu_train.kernels.stages.qkv_owned import own_tile
from dejavu_train.kernels.stages.qkv_pairs import HeadNeeds, QkvOutputs, QkvRows, QkvSizes


@dataclass(frozen=True)
class QkvSettings(Settings, stage="qkv"):
    """rows: of a tile. pairs: inputs of one product. block: columns a step, stages: of the pipeline over them.

    wide: inputs of one product for a head that lacks more than `pairs`. Above `pairs` in steps of half the columns. Of
    4-bit rows and one batch row: for what a head lacks beyond the first `pairs`.
    4-bit rows have tiles of 16 rows and 2 pairs. wide is then 4 or 8, block a tile's threads, and stages are units of
    columns of a warp on their way.
    registers: of a thread, at most, where that is less than the compiler would take, or 0. room: bytes of shared memory
    that the queue of 4-bit rows takes at least. So no more programs fit on a multiprocessor than are meant to.

    Chosen in whole steps under the carveout of `launch.share_carveout`. A chain of this stage alone misleads: its
    programs then start beside those of the same kernel. Rows of every head at once fill all
    multiprocessors in some widths.
    """

    rows: int
    pairs: int
    block: int
    stages: int
    warps: int
    wide: int
    registers: int = 0
    room: int = 0

    def fitted(self, head_dim: int, d: int, element_size: int) -> "QkvSettings":
        """For numbers: tiles within one of a head's q, k or v, and steps no wider than a row."""
        block = min(self.block * 2 // max(2, element_size), max(32, triton.next_power_of_2(d)))
        return replace(self, rows=min(self.rows, head_dim & -head_dim), block=block)


def new_positions(step: HeadStep) -> Iterator[tuple[int, int, Tensor]]:
    """(batch row, head, its new positions (n,)) of every selected head."""
    cache, selection, position = step.cache, step.selection, step.position
    batch, n_heads = cache.k.shape[:2]
    mask = torch.ones(batch, n_heads, dtype=torch.bool) if selection is None else selection.to_mask(batch)
    for b, head in itertools.product(range(batch), range(n_heads)):
        if mask[b, head]:
            end = int(position[b]) + 1
            first = end - 1 if cache.watermark is None else int(cache.watermark[b, head])
            yield b, head, torch.arange(first, end, device=cache.k.device)


def qkv_reference(weights: Linear, step: HeadStep) -> None:
    """Plain torch, one (row, head) at a time."""
    q, cache = step.q, step.cache
    batch, n_heads = cache.k.shape[:2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weight, bias = weights.weight.dense(wide), weights.bias.to(wide)
    for b, head, p in new_positions(step):
        rows = cache.attn_in[b, p].to(wide) @ weight[head].transpose(1, 2) + bias[head][:, None]
        if cache.turning is not None:
            rows = torch.cat([turned_reference(rows[:-1], cache.turning, p), rows[-1:]])
        cache.k[b, head, p] = rows[-2].to(cache.k.dtype)
        cache.v[b, head, p] = rows[-1].to(cache.v.dtype)
        q.view(batch, n_heads, -1, q.shape[-1])[b, head] = rows[:-2, -1]


@triton.jit
def qkv_tile(
    tile, n_tiles, attn_in, rows, wanted, stored, late, down, S: tl.constexpr, A: tl.constexpr, PDL: tl.constexpr
):
    """A program's whole work, its wait included, program `tile` of n_tiles. Other kernels' grids may carry it too."""
    if S.GROUP > 0:
        own_tile(tile, n_tiles, attn_in, rows, wanted, stored, late, down, S, A, PDL)
    else:
        listed_tiles(tile, n_tiles, attn_in, rows, wanted, stored, late, down, S, A, PDL)


@triton.jit
def _qkv_kernel(attn_in, rows, wanted, stored, S: tl.constexpr, PDL: tl.constexpr):
    qkv_tile(tl.program_id(0), tl.num_programs(0), attn_in, rows, wanted, stored, None, None, S, None, PDL)


def qkv(weights: Linear, step: HeadStep, pdl: bool = False) -> None:
    """See the module's formula. fp32 sums, one writer an element: deterministic. Errors: shapes, dims."""
    n_tiles, arguments, sizes, options = qkv_launch(weights, step)
    _qkv_kernel[(n_tiles,)](*arguments, S=constant_fields(sizes), **as_dependent(pdl, step.q.device), **options)


def qkv_launch(
    weights: Linear, step: HeadStep, gains: Tensor | None = None
) -> tuple[int, tuple[Any, ...], QkvSizes, dict[str, int]]:
    """(tiles, arguments, constants, options) of `qkv_tile`, the same in every grid that carries it, checked.

    As many tiles as all heads have: the hardware hands them out, and those that no selected head needs leave.
    gains: of a norm that comes late, see `qkv_owned`.
    """
    q, cache, position, selection = step.q, step.cache, step.position, step.selection
    weight, attn_in, d, batch = weights.weight, cache.attn_in, weights.weight.shape[-1], len(q)
    n_heads, share, head_dim = check_projection(attn_in, weights, step)
    assert selection is not None
    check_shape("attn_in", attn_in, batch, cache.capacity, d)
    fills = cache.watermark is not None
    table = None if cache.turning is None else cache.turning.fitting(cache.k)
    found = QkvSettings.find(weight.format, q.device, tokens=batch, d=d, policy="backfill" if fills else "always")
    if weight.format is Format.INT4:
        check_dtype("attn_in", attn_in, (torch.float16,))
        require(batch <= MOST_TOKENS, f"4-bit rows of selected heads take up to {MOST_TOKENS} batch rows, not {batch}")
        require(
            (found.rows, found.pairs) == (16, 2) and found.wide in (4, 8),
            "4-bit rows need rows 16, pairs 2 and wide 4 or 8",
        )
        rows, group = QkvRows(weight.words, weight.scales, weights.bias, gains), weight.group
        attn_in = attn_in.view(torch.int32)
    else:
        found = found.fitted(head_dim, d, weight.numbers.element_size())
        rows, group = QkvRows(weight.numbers, None, weights.bias, None), 0
    wanted = HeadNeeds(selection.row_bits, position, row_or(cache.watermark, position))
    arguments = (attn_in, rows, wanted, QkvOutputs(q, cache.k, cache.v, cache.capacity, table))
    sizes = QkvSizes(
        B=batch,
        H=n_heads,
        SHARE=share,
        HEAD_DIM=head_dim,
        D=d,
        ROWS=found.rows,
        PAIRS=found.pairs,
        WIDE=max(found.wide, found.pairs, triton.next_power_of_2(batch)),
        BLOCK=found.block,
        STAGES=found.stages,
        GROUP=group,
        ROOM=found.room,
        FILLS=fills,
    )
    options = {"num_warps": found.warps} | ({"maxnreg": found.registers} if found.registers else {})
    return (share + 2) * head_dim * n_heads // found.rows, arguments, sizes, options
