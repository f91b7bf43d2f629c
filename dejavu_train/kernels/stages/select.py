"""Selection, the second half of a predictor: which neurons each row of the batch needs, as a list on the device.

    row b selects neuron i where  scale[i] sum_r up[i, r] hidden[b, r] + bias[i] > threshold

hidden (B, rank) is what the first half leaves (`predict`). up (n, rank) holds numbers, or codes with a scale a row
(`formats.codes`). A NaN is never selected, a tie neither. The list is made without sorting or a host synchronisation.
Block p owns rows [p * block, (p + 1) * block). It writes its selected ids in ascending order to slots
[p * block, p * block + counts[p]), and its count. `pack` closes the gaps. For B > 1 the list is the union of the
batch's sets. Bit b of row_bits[i] says that row b selected i.

`select_block` is a program's whole work, in a grid of its own or in that of q/k/v (`qkv_select`). How rows of `up` are
read and multiplied is handed in (`up_rows`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_tensor, require
from dejavu_train.kernels.common.launch import (
    constant_fields,
    dot_type,
    programmatic,
    wait_for_count,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.common.limits import ROW_LANES, Products, takes_nibbles, takes_row_words
from dejavu_train.kernels.common.row_state import by_state, mask_by_state
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.codes import stored_width, unscaled
from dejavu_train.kernels.stages import up_rows
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, check_matrix, down_reference
from dejavu_train.kernels.stages.up_rows import BlockSizes, block_rows

PARTS = {tl.float32: 1, tl.float16: 2, tl.bfloat16: 3}  # of 16 bits, whose sum a hidden value is
WARPS = 4


@dataclass(frozen=True)
class SelectSettings(Settings, stage="select"):
    """Settings of programs whose rows lie in registers, by the rows of a block and their bytes."""

    warps: int


class UpRows(NamedTuple):
    """Inputs of a kernel that selects: up (n, width), threshold (1), and scale and bias (n), row_state (B) or None."""

    up: Any
    scale: Any
    bias: Any
    threshold: Any
    row_state: Any


class Lists(NamedTuple):
    """Outputs of it: ids, counts, row_bits as in a `Selection`. The rest may be None: logits (B, n) fp32, and the list
    without gaps, `listed` (n) and its count (1), which must be zero before."""

    ids: Any
    counts: Any
    row_bits: Any
    logits: Any = None
    listed: Any = None
    count: Any = None


def predict_reference(x: Tensor, predictor: PredictorWeights, ln: LayerNormWeights | None = None) -> Tensor:
    """Logits (B, n) in plain torch. fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if ln is not None:
        x = layer_norm_reference(x, ln, wide)
    return logits_reference(down_reference(x.to(wide), predictor), predictor)


def logits_reference(hidden: Tensor, predictor: PredictorWeights) -> Tensor:
    """Logits (B, n) of hidden (B, rank) in plain torch, in its dtype."""
    logits = hidden @ unscaled(predictor.up, predictor.up_scale, hidden.dtype, hidden.shape[1]).T
    return logits if predictor.bias is None else logits + predictor.bias.to(hidden.dtype)


def select_reference(predictor: Predictor, row_state: Tensor | None = None, logits_out: Tensor | None = None) -> None:
    """Plain torch, in place: selection, and the list without gaps where there is one."""
    logits = logits_reference(predictor.hidden, predictor.weights)
    if logits_out is not None:
        logits_out.copy_(logits)
    if predictor.top_k is not None:
        predictor.selection.set_mask(top_k_mask(logits, predictor.top_k, row_state))
    else:
        predictor.selection.set_mask(mask_by_state(logits > predictor.threshold, row_state))
    if predictor.listed is not None:
        ids = predictor.selection.indices()
        predictor.listed[0][: len(ids)] = ids.int()
        predictor.listed[1].fill_(len(ids))


@triton.jit
def selected_heads(row_bits, H: tl.constexpr, H_TILE: tl.constexpr, SHARE: tl.constexpr = 1):
    """(the selected heads in ascending order (H_TILE,), H beyond them, their number). SHARE: heads of a bit."""
    heads = tl.arange(0, H_TILE)
    places = row_bits + heads
    if SHARE > 1:
        places = row_bits + heads // SHARE
    chosen = (tl.load(places, mask=heads < H, other=0, cache_modifier=".cg") != 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0)
    before = (rank[:, None] <= heads[None, :]) & (heads < H)[:, None]
    return tl.sum(before.to(tl.int32), 0), tl.sum(chosen)


@triton.jit
def _store_selected(logits, limit, state, rows, inside, number, lists, n, batch, S: tl.constexpr):
    """Bits and list of the neurons `rows` (block,) by their logits: (block,) of one batch row, else (block, batch)."""
    if S.batch == 1:
        if lists.logits is not None:
            tl.store(lists.logits + rows, logits, mask=inside)
        bits = by_state((logits > limit) & inside, state, inside).to(tl.int32)  # False for NaN
        some = bits
    else:
        b = tl.arange(0, S.batch)
        valid = inside[:, None] & (b < batch)[None, :]
        if lists.logits is not None:
            tl.store(lists.logits + b[None, :].to(tl.int64) * n + rows[:, None], logits, mask=valid)
        chosen = by_state((logits > limit) & valid, state, valid)
        bits = tl.sum(chosen.to(tl.int32) << b[None, :], 1)
        some = (bits != 0).to(tl.int32)
    tl.store(lists.row_bits + rows, bits, mask=inside)
    place = number * S.block + tl.cumsum(some, 0) - 1
    tl.store(lists.ids + place, rows, mask=some != 0)
    tl.store(lists.counts + number, tl.sum(some, 0))
    if lists.listed is not None:
        begin = tl.atomic_add(lists.count, tl.sum(some, 0), sem="relaxed")
        place = begin + tl.cumsum(some, 0) - 1
        # A count that was not zero writes nothing else.
        tl.store(lists.listed + place, rows, mask=(some != 0) & (place < n))


@triton.jit
def begin_block(rows_of, place, batch, READ: tl.constexpr, S: tl.constexpr):
    """Reads of a block before its program waits: its rows of up, scales, biases, the threshold, states of the batch."""
    rows, inside = block_rows(place, S)
    begun = READ(rows_of.up, place, S)
    scale = 1.0
    if rows_of.scale is not None:
        scale = tl.load(rows_of.scale + rows, mask=inside, other=0.0)
    offset = 0.0
    if rows_of.bias is not None:
        offset = tl.load(rows_of.bias + rows, mask=inside, other=0.0).to(tl.float32)
    limit = tl.load(rows_of.threshold)
    state = 1
    if rows_of.row_state is not None:
        if S.batch == 1:
            state = tl.load(rows_of.row_state)
        else:
            b = tl.arange(0, S.batch)
            state = tl.load(rows_of.row_state + b, mask=b < batch, other=0)[None, :]
    return begun, scale, offset, limit, state


@triton.jit
def block_logits(
    block, hidden, rows_of, place, batch, MULTIPLY: tl.constexpr, S: tl.constexpr, MADE_HERE: tl.constexpr
):
    """Logits (block,) of one batch row, else (block, batch), of what `begin_block` read."""
    logits = MULTIPLY(block[0], hidden, rows_of.up, place, batch, S, MADE_HERE)
    if rows_of.scale is not None:
        logits = logits * (block[1] if S.batch == 1 else block[1][:, None])
    if rows_of.bias is not None:
        logits += block[2] if S.batch == 1 else block[2][:, None]
    return logits


@triton.jit
def select_block(
    number, hidden, rows_of, lists, n, batch, READ: tl.constexpr, MULTIPLY: tl.constexpr, S: tl.constexpr,
    PDL: tl.constexpr, arrived=None, COUNT: tl.constexpr = 0,
):  # fmt: skip
    """A program's whole work, its wait included: list and bits of neurons number * block .. + block - 1.

    rows_of: `UpRows`. lists: `Lists`. READ, MULTIPLY: a way of `up_rows`. COUNT: so many programs of this grid make
    hidden, and count themselves in `arrived`. 0: it is there.
    """
    place = (number * S.block, n)
    block = begin_block(rows_of, place, batch, READ, S)
    wait_for_predecessor(PDL)
    if COUNT > 0:
        wait_for_count(arrived, COUNT)
    logits = block_logits(block, hidden, rows_of, place, batch, MULTIPLY, S, COUNT > 0)
    rows, inside = block_rows(place, S)
    _store_selected(logits, block[3], block[4], rows, inside, number, lists, n, batch, S)


@triton.jit(do_not_specialize=["n", "batch"])
def _select_kernel(
    hidden, rows_of, lists, n, batch, READ: tl.constexpr, MULTIPLY: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr
):
    select_block(tl.program_id(0), hidden, rows_of, lists, n, batch, READ, MULTIPLY, S, PDL)


@dataclass(frozen=True)
class SelectLaunch:
    """How programs that select run. READ, MULTIPLY, S: constants of `select_block`."""

    READ: Any
    MULTIPLY: Any
    S: BlockSizes
    warps: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"READ": self.READ, "MULTIPLY": self.MULTIPLY, "S": constant_fields(self.S)}


def registers_launch(up: Tensor, block: int, rank: int, widest: int = 256) -> SelectLaunch:
    """One row of the batch, all rows of a block in registers. Numbers, or codes of a byte. widest: columns of a
    piece."""
    size = up.element_size()
    # Columns of a piece: a power of two, whole lines of memory where possible. One of 64 or more that divides the rank
    # takes the fewest instructions, but 64 of one byte are half a line.
    divisor = min(rank & -rank, widest)
    chunk = divisor if size > 1 and divisor >= 64 else min(128, widest, 1 << (rank.bit_length() - 1))
    warps = SelectSettings.find("float", up.device, block=block, bytes=block * rank * size).warps
    sizes = BlockSizes(block, rank, rank, chunk=chunk)
    return SelectLaunch(up_rows.read_registers, up_rows.multiply_registers, sizes, warps)


def tiles_launch(
    up: Tensor, block: int, rank: int, batch: int = 1, stages: int = 3, warps: int = WARPS
) -> SelectLaunch:
    """Any number of rows, any format, rank and block."""
    width, multiplied = stored_width(up, rank), dot_type(up.dtype)
    chunk = min(64, max(16, triton.next_power_of_2(width)))
    parts = PARTS[multiplied] if batch == 1 else min(2, PARTS[multiplied])
    sizes = BlockSizes(block, rank, width, triton.next_power_of_2(batch), chunk, min(stages, -(-width // chunk)), parts)
    return SelectLaunch(up_rows.read_nothing, up_rows.multiply_tiles, sizes, warps)


def row_words_launch(block: int, rank: int, warps: int) -> SelectLaunch:
    """One row of nibbles as words. `limits.takes_row_words` says of which ranks and blocks."""
    sizes = BlockSizes(block, rank, rank // 2, lanes=32 * warps)
    return SelectLaunch(up_rows.read_words, up_rows.multiply_row_words, sizes, warps)


def words_launch(block: int, rank: int, batch: int) -> SelectLaunch:
    """Two to eight rows of nibbles as words."""
    lanes = 32 * WARPS
    sizes = BlockSizes(block, rank, rank // 2, 4 if batch <= 4 else 8, lanes=lanes)
    return SelectLaunch(up_rows.read_words, up_rows.multiply_words, sizes, WARPS)


def grid_launch(predictor: Predictor, stages: int, warps: int) -> SelectLaunch:
    """One row, in a grid whose programs have so many warps: words where these have room for a block's, else tiles."""
    up, block, rank = predictor.weights.up, predictor.selection.block, predictor.hidden.shape[1]
    if predictor.products is Products.ROW_WORDS and takes_row_words(rank, block, 32 * warps):
        return row_words_launch(block, rank, warps)
    return tiles_launch(up, block, rank, 1, stages, warps)


def select_launch(predictor: Predictor) -> SelectLaunch:
    """Launch of a grid of its own, as `predictor.products` says."""
    up, block, (batch, rank) = predictor.weights.up, predictor.selection.block, predictor.hidden.shape
    if predictor.products is Products.REGISTERS:
        return registers_launch(up, block, rank)
    if predictor.products is Products.ROW_WORDS:
        return row_words_launch(block, rank, ROW_LANES // 32)
    if predictor.products is Products.WORDS:
        return words_launch(block, rank, batch)
    return tiles_launch(up, block, rank, batch)


def check_selects(predictor: Predictor, row_state: Tensor | None = None) -> None:
    """Raise ValueError where no kernel multiplies so, or where tensors do not fit together. These are hidden (B, rank),
    `up`, its bias and scales, the threshold, and what receives the list."""
    weights, hidden, out, products = predictor.weights, predictor.hidden, predictor.selection, predictor.products
    batch, rank = check_input("hidden", hidden)
    n, block = weights.up.shape[0], out.block
    check_matrix("predictor.up", weights.up, weights.up_scale, (n, rank), hidden)
    require(out.n == n, f"the selection is made for {out.n} rows, the predictor has {n}")
    blocks = triton.cdiv(n, block)
    check_tensor("selection.ids", out.ids, (blocks * block,), (torch.int32,), hidden)
    check_tensor("selection.counts", out.counts, (blocks,), (torch.int32,), hidden)
    check_tensor("selection.row_bits", out.row_bits, (n,), (torch.int32,), hidden)
    check_tensor("threshold", predictor.threshold, (1,), (torch.float32,), hidden)
    if weights.bias is not None:
        check_tensor("predictor.bias", weights.bias, (n,), FLOAT_TYPES, hidden)
    if row_state is not None:
        check_tensor("row_state", row_state, (batch,), (torch.int32,), hidden)
    nibbles, top_k = weights.up.dtype == torch.uint8, predictor.top_k
    fits = {
        Products.REGISTERS: batch == 1 and not nibbles,
        Products.ROW_TILES: batch == 1,
        Products.ROW_WORDS: batch == 1 and nibbles and takes_row_words(rank, block, ROW_LANES),
        Products.TILES: not nibbles,
        Products.WORDS: nibbles and takes_nibbles(batch, rank, 8) and block in (2 * 8 * WARPS, 4 * 8 * WARPS),
    }
    kind = str(weights.up.dtype).removeprefix("torch.")
    require(fits[products], f"{products}: not for {batch} rows of {kind}, rank {rank}, blocks of {block} neurons")
    require(top_k is None or 0 <= top_k <= n, f"top_k must be between 0 and {n}, got {top_k}")
    if predictor.listed is not None:
        require(
            products is Products.WORDS and top_k is None,
            "a list without gaps is made of several rows, by a predictor of nibbles and a threshold",
        )
        for name, tensor, size in zip(("ids", "count"), predictor.listed, (n, 1), strict=True):
            check_tensor(f"listed {name}", tensor, (size,), (torch.int32,), hidden)


def select_arguments(
    predictor: Predictor, row_state: Tensor | None = None, logits_out: Tensor | None = None
) -> tuple[Tensor, UpRows, Lists, int, int]:
    """Arguments of `select_block`: hidden, reads and writes, how many neurons and rows of the batch."""
    weights, hidden, out = predictor.weights, predictor.hidden, predictor.selection
    rows_of = UpRows(weights.up, weights.up_scale, weights.bias, predictor.threshold, row_state)
    lists = Lists(out.ids, out.counts, out.row_bits, logits_out, *(predictor.listed or ()))
    pairs = hidden.view(torch.int32) if predictor.products is Products.WORDS else hidden
    return pairs, rows_of, lists, out.n, len(hidden)


def select(
    predictor: Predictor, row_state: Tensor | None = None, logits_out: Tensor | None = None, pdl: bool = False
) -> None:
    """Fill the selection of `predictor` by its hidden values (B, rank) fp32.

    row_state: (B,) int32 on the device, 0 = the row selects nothing (finished), 1 = by its logits, 2 = everything (a
    dense position). logits_out: (B, n) fp32. pdl: launch as a programmatic dependent of the kernel before. threshold
    and row_state must then be older than the launch before that.

    Raises:
        ValueError: shapes, dtypes, a CPU tensor, or products that do not fit.
    """
    check_selects(predictor, row_state)
    hidden, top_k, n = predictor.hidden, predictor.top_k, predictor.selection.n
    if logits_out is not None:
        check_tensor("logits_out", logits_out, (len(hidden), n), (torch.float32,), hidden)
    elif top_k is not None:
        logits_out = torch.empty(len(hidden), n, dtype=torch.float32, device=hidden.device)
    has_pdl, use_pdl = programmatic(hidden, pdl)
    how = select_launch(predictor)
    _select_kernel[(predictor.selection.counts.numel(),)](
        *select_arguments(predictor, row_state, logits_out), **how.constants, PDL=has_pdl, num_warps=how.warps,
        launch_pdl=use_pdl,
    )  # fmt: skip
    if top_k is not None:
        assert logits_out is not None
        predictor.selection.set_mask(top_k_mask(logits_out, top_k, row_state))


def top_k_mask(logits: Tensor, top_k: int, row_state: Tensor | None = None) -> Tensor:
    """(B, n) bool: the top_k largest logits of each row, ties to the lower index, NaN never."""
    order = torch.sort(logits.nan_to_num(nan=float("-inf")), dim=1, descending=True, stable=True).indices
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order[:, :top_k], True) & ~logits.isnan()
    return mask_by_state(mask, row_state)
