"""The output projection over the selected heads with 4-bit weights.

    y[i] = residual[i] + bias[i] + sum_h scale[h, i] sum_j code[h, i, j] mixed[h head_dim + j],   h selected

The weight lies head by head, Int4Rows of shape (h, d, head_dim) with one scale a head and output, so that a skipped
head skips codes and scales alike, and a head's outputs are one range of memory. fp16 weights (`out_projection`) keep
rows of all heads. mixed (1, h * head_dim) fp16, as attention rounds it: every program reads it whole, and in fp32 that
took twice the loads. Products are exact, sums in fp32.
A program owns TILES times 8 outputs. its warps take heads in turn, SPAN at a time, two beside each other as a unit of
`int4_mma`: its rows 0 to 7 are 8 outputs of one head, rows 8 to 15 the same outputs of another one, and the heads'
inputs lie in two columns. Tiles of 8 outputs let all multiprocessors have as many at widths such as 9216.
The first span is read before the wait: selection, bias and residual are older than the launch before, see
`out_projection`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    check_device,
    check_dtype,
    check_head_dim,
    check_int4,
    check_shape,
    require,
)
from dejavu_train.kernels.common.int4_mma import column_sums, from_lane, int4_mma, unit_vector
from dejavu_train.kernels.common.int4_numbers import written_out_by_output
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import ask, even_room, lane_queue, take
from dejavu_train.kernels.common.launch import n_sms, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add
from dejavu_train.kernels.dense.int4_batch import int4_by_head
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.select import selected_heads

ROWS = tl.constexpr(8)


@dataclass(frozen=True)
class HeadRowSettings(Settings, stage="project_int4"):
    """warps: of a program. span: heads of a warp that are on their way, 2, 4 or 8. tiles: of 8 outputs of a program.

    registers: of a thread, at most: programs that are not resident at once wait for a second round.
    """

    warps: int
    span: int
    tiles: int = 2
    registers: int = 128


def by_head(weight: Tensor, n_heads: int) -> Tensor:
    """weight (d, h * head_dim) -> (h, d, head_dim), contiguous: what is quantised and packed row by row."""
    return weight.view(len(weight), n_heads, -1).transpose(0, 1).contiguous()


def project_head_rows_reference(
    mixed: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Plain torch. mixed is zero in heads that are not selected. fp64 where mixed is."""
    wide = torch.float64 if mixed.dtype == torch.float64 else torch.float32
    n_heads, _, head_dim = weight.shape
    x = mixed.half().to(wide).view(-1, n_heads, head_dim)
    out.copy_(torch.einsum("bhj,hij->bi", x, weight.dense(wide)) + bias.to(wide) + residual)


@triton.constexpr_function
def queue_bytes(lanes, span, tiles, head_dim):
    """Shared memory of the words on their way: of two heads of a tile 8 V of each lane."""
    return lanes * (span // 2) * tiles * 8 * unit_vector(head_dim // 8, head_dim)


@triton.constexpr_function
def _tiles_of_heads(entries, warps):
    """Registers of a lane that hold the heads of a warp's entries, 32 each."""
    return -(-entries // (32 * warps))


@triton.jit
def _warps_heads(order, n, lane, UNITS: tl.constexpr, H: tl.constexpr, ALL: tl.constexpr):
    """The heads of a warp's entries, entry k in lane k % 32 of tile k // 32: a gather, once, is four barriers."""
    WARPS: tl.constexpr = lane.shape[0] // 32
    found = ()
    for k in tl.static_range(_tiles_of_heads(H * UNITS, WARPS)):
        number = (32 * k + lane % 32) * WARPS + lane // 32
        entry = tl.minimum(number // UNITS, tl.maximum(n - 1, 0))
        if ALL:
            heads = entry
        else:
            heads = tl.gather(order, entry, 0)
        found = found + (tl.where(n > 0, heads, 0),)
    return found


@triton.jit
def _heads(its, begin, lane, UNITS: tl.constexpr, SPAN: tl.constexpr, H: tl.constexpr):
    """The head of each lane group's entry of the span, (L,): begin + (g % SPAN) warps + warp, g from SPAN on again."""
    WARPS: tl.constexpr = lane.shape[0] // 32
    own = begin // WARPS + lane % 32 // 4 % SPAN  # beyond the last entry any head
    heads = from_lane(its[0], own % 32)
    for k in tl.static_range(1, _tiles_of_heads(H * UNITS, WARPS)):
        heads = tl.where(own // 32 == k, from_lane(its[k], own % 32), heads)
    return heads


@triton.jit
def _head_input(
    mixed, heads, begin, n, lane, W: tl.constexpr, V: tl.constexpr, UNITS: tl.constexpr, SPAN: tl.constexpr
):
    """4 V planes of the input of each lane group's entry, see `_heads`. Zero beyond the last one. mixed: its pairs."""
    number = begin + lane % 32 // 4 % SPAN * (lane.shape[0] // 32) + lane // 32
    planes = ()
    for v in tl.static_range(V):
        word = number % UNITS * (4 * V) + lane % 4 * V + v
        at = (mixed + heads * (4 * W) + 4 * word)[:, None] + tl.arange(0, 4)[None, :]
        there = (number < n * UNITS) & (word < W)
        planes = planes + split_words(tl.load(at, mask=there[:, None], other=0), 4)
    return planes


@triton.jit
def _ask_heads(
    queue, weight, scales, heads, begin, n, rows, n_rows, lane,
    W: tl.constexpr, V: tl.constexpr, UNITS: tl.constexpr, PAIR: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """The queue with a lane's words of two entries on their way, and the scales of its row of them.

    Entries 2 PAIR and 2 PAIR + 1 of the span, whose heads the lane groups of these numbers hold in `heads`. The inputs
    of the two are columns of the lanes t = PAIR, and other lanes' scales zero. rows: a tile's, g of 8.
    """
    found = ()
    at = ()
    there = ()
    for half in tl.static_range(2):
        number = begin + (2 * PAIR + half) * (lane.shape[0] // 32) + lane // 32
        place = number % UNITS * (4 * V) + lane % 4 * V
        line = from_lane(heads, 4 * (2 * PAIR + half)) * n_rows + rows
        inside = (number < n * UNITS) & (rows < n_rows)
        at = at + (weight + line.to(tl.int64) * W + place,)
        there = there + (inside & (place < W),)
        found = found + (tl.load(scales + line, mask=inside & (lane % 4 == PAIR), other=0.0),)
    return ask(queue, lane, at[0], at[1], there[0], there[1], SLOT, V, True), found


@triton.jit
def _project_head_rows_kernel(
    mixed,
    weight,
    scales,
    bias,
    residual,
    row_bits,
    out,
    n_rows,
    H: tl.constexpr,
    H_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    L: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    ALL: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = HEAD_DIM // 8
    V: tl.constexpr = unit_vector(W, HEAD_DIM)
    UNITS: tl.constexpr = (W + 4 * V - 1) // (4 * V)
    WARPS: tl.constexpr = L // 32
    PAIRS: tl.constexpr = SPAN // 2
    lane = tl.arange(0, L)
    line = tl.program_id(0) * (ROWS * TILES)
    rows = line + lane % 32 // 4
    if ALL:
        order = lane
        n = H
    else:
        order, n = selected_heads(row_bits, H, H_TILE)
    its = _warps_heads(order, n, lane, UNITS, H, ALL)
    heads = _heads(its, 0, lane, UNITS, SPAN, H)
    queue = lane_queue(lane, max(ROOM, queue_bytes(L, SPAN, TILES, HEAD_DIM)))
    factors = ()
    for p in tl.static_range(PAIRS):
        for m in tl.static_range(TILES):
            queue, found = _ask_heads(
                queue, weight, scales, heads, 0, n, rows + ROWS * m, n_rows, lane, W, V, UNITS, p, p * TILES + m
            )
            factors = factors + found
    offsets = ()
    for m in tl.static_range(0, TILES, 2):
        own = line + ROWS * m + tl.arange(0, 16)
        inside = own < tl.minimum(n_rows, line + ROWS * TILES)
        offset = tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
        offsets = offsets + (offset + tl.load(residual + own, mask=inside, other=0.0, cache_modifier=".cg"),)
    wait_for_predecessor(PDL)
    acc = ()
    for _ in tl.static_range(TILES):
        acc = acc + (tl.zeros((L,), tl.float32),)
    x = _head_input(mixed, heads, 0, n, lane, W, V, UNITS, SPAN)
    for begin in range(0, n * UNITS, SPAN * WARPS):
        heads = _heads(its, begin + SPAN * WARPS, lane, UNITS, SPAN, H)
        coming = _head_input(mixed, heads, begin + SPAN * WARPS, n, lane, W, V, UNITS, SPAN)
        for p in tl.static_range(PAIRS):
            for m in tl.static_range(TILES):
                w, queue = take(queue, lane, p * TILES + m, V, PAIRS * TILES - 1)
                part = int4_mma(w, x, V)
                # The tiles' sums in turn: the first of the tuple is this tile's.
                more = acc[0] + part[0] * factors[0].to(tl.float32) + part[3] * factors[1].to(tl.float32)
                acc = acc[1:] + (more,)
                queue, found = _ask_heads(
                    queue, weight, scales, heads, begin + SPAN * WARPS, n, rows + ROWS * m, n_rows, lane, W, V, UNITS,
                    p, p * TILES + m,
                )  # fmt: skip
                factors = factors[2:] + found
        x = coming
    acc = acc + (tl.zeros((L,), tl.float32),)  # beside the last of an odd number of tiles
    for m in tl.static_range(0, TILES, 2):
        own = line + ROWS * m + tl.arange(0, 16)
        inside = own < tl.minimum(n_rows, line + ROWS * TILES)
        tl.store(out + own, column_sums(acc[m], acc[m + 1], L) + offsets[m // 2], mask=inside)


def project_head_rows(
    mixed: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
    settings: HeadRowSettings | None = None,
) -> None:
    """mixed (B, h * head_dim) fp16, residual and out (B, d) fp32, weight (h, d, head_dim). selection None = all heads.

    One row runs in one kernel. Several as a product over all heads, up to eight from the codes, more after these were
    written out in fp16. Bitwise deterministic. Selection and residual must be older than the two launches before this.
    Errors: shapes, dtypes, head dims, groups other than a head, a CPU tensor.
    """
    check_device("mixed", mixed)
    batch = len(mixed)
    n_heads, d, head_dim = weight.shape
    check_head_dim(head_dim)
    check_shape("mixed", mixed, batch, n_heads * head_dim)
    check_dtype("mixed", mixed, (torch.float16,))
    check_int4("weight", weight, (n_heads, d, head_dim), mixed)
    require(weight.scales.shape[-1] == 1, f"weight: {weight.scales.shape[-1]} groups a head, expected one")
    check_shape("bias", bias, d)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    require(selection is None or selection.n == n_heads, f"a selection of other heads than the weight's {n_heads}")
    if batch > 1:
        if batch <= MOST_TOKENS:
            int4_by_head(mixed, weight, bias, residual, out, pdl)
        else:
            dense_add(mixed, Rows(written_out_by_output(weight, pdl)), bias, residual, out, pdl=pdl)
        return
    settings = settings or HeadRowSettings.find(weight.format, mixed.device, d=d, all=selection is None)
    require(settings.span in (2, 4, 8), f"a span is of 2, 4 or 8 heads, not {settings.span}")
    pdl = use_pdl(pdl, mixed.device)
    programs = triton.cdiv(d, 8 * settings.tiles)
    needed = queue_bytes(32 * settings.warps, settings.span, settings.tiles, head_dim)
    _project_head_rows_kernel[(programs,)](
        mixed.view(torch.int32),
        weight.words,
        weight.scales,
        bias,
        residual,
        mixed if selection is None else selection.row_bits,
        out,
        d,
        H=n_heads,
        H_TILE=triton.next_power_of_2(n_heads),
        HEAD_DIM=head_dim,
        L=32 * settings.warps,
        SPAN=settings.span,
        TILES=settings.tiles,
        ALL=selection is None,
        ROOM=even_room(triton.cdiv(programs, n_sms(out.device)), d, pdl and selection is None, needed),
        PDL=pdl,
        num_warps=settings.warps,
        maxnreg=settings.registers,
        launch_pdl=pdl,
    )
