"""Look-ahead, stage 2: q/k/v and the second half of an MLP predictor of `attn_in`, in one grid.

The tiles of `qkv`, and after them programs that own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold
Independent work in a grid costs no launch edge and no event, and it fills the last wave of the tiles. So that no
program needs more registers than a tile of q/k/v does, this product runs on the tensor cores as well: a tile of `up`
times hidden, whose 16-bit parts (high, low) are columns of one product, which loses nothing to their rounding. In fp16
two parts hold up to 131008: a larger hidden value counts as that. Codes and nibbles become fp16 numbers, exactly.
Nibbles whose rows are whole words are multiplied as 4-bit weights are (`select_nibbles`), with fewer instructions. One
batch row. Shapes and layouts as in `qkv` and `select`. up (ffn, rank) as `select` takes it, hidden (1, rank) fp32.
Where the MLP before made the input (`mlp_ahead`), there was no stage 1: hidden is made by the first programs of this
grid, in tiles (`qkv_owned`) or a few rows each (`late_rows`), and the last ones wait for these.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_shape
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.late_norm import late_factors_reference, late_sums
from dejavu_train.kernels.common.launch import dot_type, use_pdl, wait_for_count, wait_for_predecessor
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.lookahead.late_rows import late_rows
from dejavu_train.kernels.lookahead.mlp_ahead import ROWS, LateSite
from dejavu_train.kernels.lookahead.select_nibbles import select_nibbles, takes
from dejavu_train.kernels.mlp.codes import nibble_halves
from dejavu_train.kernels.mlp.predictor import Predictor, PredictorWeights
from dejavu_train.kernels.mlp.select import check_second_half, predict_select_reference
from dejavu_train.kernels.mlp.select_batch import saturated, store_chosen
from dejavu_train.kernels.stages.qkv import qkv_launch, qkv_reference, qkv_tile
from dejavu_train.kernels.stages.qkv_owned import AheadSizes

PARTS = {tl.float32: 1, tl.float16: 2, tl.bfloat16: 3}  # of a hidden value, as columns of a product


def qkv_select_reference(
    weights: Linear,
    cache: KvCache,
    selection: Selection,
    position: Tensor,
    q: Tensor,
    mlp: Predictor,
    row_state: Tensor,
    policy: str = "backfill",
    pdl: bool = False,
    late: LateSite | None = None,
) -> None:
    """Plain torch, in place."""
    hidden, own = mlp.hidden, mlp.weights
    if late is not None:
        norm, t = late.norm, int(position)
        norm.factors[t] = late_factors_reference(norm, cache.attn_in.shape[2])
        gain, shift = norm.ln.folded
        n = cache.attn_in.float() * norm.factors[:, :1] + norm.factors[:, 1:] * gain + shift
        cache = replace(cache, attn_in=n)
        weights = replace(weights, bias=late.shifts - late_sums(weights.weight, norm.ln)[1])
        product = n[0, t] @ late.numbers().T[:, : hidden.shape[1]] * late.scale[: hidden.shape[1]]
        hidden.copy_(product.relu() if late.relu else product)
    qkv_reference(weights, cache, selection, position, q, policy)
    second = PredictorWeights(
        torch.eye(hidden.shape[1], device=hidden.device), own.up, own.bias, up_scale=own.up_scale
    )  # fmt: skip
    mlp.selection.set_mask(predict_select_reference(hidden, second, mlp.threshold, None, row_state))


@triton.jit
def _parts(hidden, place, n, TYPE: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """Hidden values at `place` (CHUNK,), zero from n on, as PARTS columns (CHUNK, 8) whose sum they are."""
    part = tl.arange(0, 8)
    if COUNT > 0:  # made in this grid: not out of the L1
        z = tl.load(hidden + place, mask=place < n, other=0.0, cache_modifier=".cg")
    else:
        z = tl.load(hidden + place, mask=place < n, other=0.0)
    high = saturated(z, TYPE)
    columns = tl.where((part == 0)[None, :], high.to(tl.float32)[:, None], 0.0)
    if PARTS > 1:
        rest = z - high.to(tl.float32)
        middle = saturated(rest, TYPE)
        columns = tl.where((part == 1)[None, :], middle.to(tl.float32)[:, None], columns)
    if PARTS > 2:
        columns = tl.where((part == 2)[None, :], (rest - middle.to(tl.float32))[:, None], columns)
    return columns.to(TYPE)


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
    arrived,
    COUNT: tl.constexpr,
):
    """Logits and list of the neurons block_number * BLOCK .. + BLOCK - 1. arrived, COUNT: as in `select_nibbles`."""
    NIBBLES: tl.constexpr = up.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = (RANK + 1) // 2 if NIBBLES else RANK  # elements of a row
    rows = block_number * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    k = tl.arange(0, CHUNK)
    scale = 1.0
    if up_scale is not None:
        scale = tl.load(up_scale + rows, mask=inside, other=0.0)
    offset = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    limit = tl.load(threshold)
    state = tl.load(row_state)
    w_ptrs = up + rows.to(tl.int64)[:, None] * WIDTH + k[None, :]
    wait_for_predecessor(PDL)
    if COUNT > 0:
        wait_for_count(arrived, COUNT)
    sums = tl.zeros((BLOCK, 8), tl.float32)
    for column in tl.range(0, WIDTH, CHUNK, num_stages=STAGES):
        if WIDTH % CHUNK == 0:
            w = tl.load(w_ptrs + column, mask=inside[:, None], other=0)
        else:
            w = tl.load(w_ptrs + column, mask=inside[:, None] & (column + k < WIDTH)[None, :], other=0)
        z = _parts(hidden, column + k, WIDTH, TYPE, PARTS, COUNT)
        if NIBBLES:
            low, high = nibble_halves(w)
            sums = tl.dot(low, z, sums, input_precision="ieee")
            more = _parts(hidden, WIDTH + column + k, RANK, TYPE, PARTS, COUNT)
            sums = tl.dot(high, more, sums, input_precision="ieee")
        else:
            sums = tl.dot(w.to(TYPE), z, sums, input_precision="ieee")
    logits = tl.sum(sums, 1) * scale + offset
    store_chosen(logits, limit, state, rows, inside, block_number, ids, counts, row_bits, BLOCK)


class Second(NamedTuple):
    """The second half of the MLP's predictor, and what it selects. up_scale, mlp_bias: or None."""

    hidden: Any
    up: Any
    up_scale: Any
    mlp_bias: Any
    mlp_threshold: Any
    row_state: Any
    ids: Any
    counts: Any
    mlp_bits: Any


@triton.jit
def _select(block_number, second, n, arrived, A: tl.constexpr, PDL: tl.constexpr):
    """A program of the second half: its whole work, its wait included."""
    if A.WORDS:
        select_nibbles(
            block_number, second.hidden, second.up, second.up_scale, second.mlp_bias, second.mlp_threshold,
            second.row_state, second.ids, second.counts, second.mlp_bits, n, A.RANK, A.BLOCK, A.LANES, PDL, arrived,
            A.DOWN,
        )  # fmt: skip
    else:
        _select_tile(
            block_number, second.hidden, second.up, second.up_scale, second.mlp_bias, second.mlp_threshold,
            second.row_state, second.ids, second.counts, second.mlp_bits, n, A.RANK, A.BLOCK, A.CHUNK, A.STAGES,
            A.TYPE, A.PARTS, PDL, arrived, A.DOWN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _qkv_select_kernel(
    attn_in, rows, wanted, stored, late, down, second, n, n_tiles, S: tl.constexpr, A: tl.constexpr, PDL: tl.constexpr
):
    DOWN: tl.constexpr = A.DOWN
    DOWN_ROWS: tl.constexpr = A.DOWN_ROWS
    pid = tl.program_id(0) - DOWN
    arrived = None
    if DOWN > 0:
        arrived = down.arrived
    if pid >= n_tiles:
        _select(pid - n_tiles, second, n, arrived, A, PDL)
    elif DOWN_ROWS > 0 and pid < 0:
        late_rows(
            pid + DOWN, attn_in, wanted.position, late.moments, late.estimate, late.factors, down.down,
            down.down_scale, down.down_gains, down.down_shifts, down.hidden, down.arrived, A.RANK, S.D, A.LANES,
            DOWN_ROWS, A.EPS, A.RELU, PDL,
        )  # fmt: skip
    elif DOWN_ROWS > 0:  # made by programs of their own
        qkv_tile(pid, n_tiles, attn_in, rows, wanted, stored, late, None, S, A, PDL)
    else:
        qkv_tile(pid, n_tiles, attn_in, rows, wanted, stored, late, down, S, A, PDL)


def qkv_select(
    weights: Linear,
    cache: KvCache,
    selection: Selection,
    position: Tensor,
    q: Tensor,
    mlp: Predictor,
    row_state: Tensor,
    policy: str = "backfill",
    pdl: bool = False,
    late: LateSite | None = None,
) -> None:
    """Stage 2: `qkv`, and the second half of the MLP's predictor. One batch row.

    mlp.hidden: (1, rank) fp32 from `site_predict`. late: as `mlp_ahead` left it. Then hidden is made here, the bias of
    q/k/v is replaced by `late.shifts`, and their weight has 4 bits. Errors: shapes, policy, a CPU tensor.
    """
    pdl = use_pdl(pdl, q.device)
    given, made, gains = weights, (None, None), None
    if late is not None:
        given, gains = replace(weights, bias=late.shifts), late.gains
    n_tiles, arguments, sizes, options = qkv_launch(given, cache, selection, position, q, policy, gains=gains)
    own, chosen = mlp.weights, mlp.selection
    check_shape("q", q, 1, *q.shape[1:])
    check_shape("hidden", mlp.hidden, 1, mlp.hidden.shape[1])
    _, rank, n, width = check_second_half(mlp, row_state)
    if late is not None:
        late.check(q, rank, weights.weight)
        made = late.arguments(mlp.hidden)
    n_blocks, lanes = chosen.counts.numel(), 32 * options["num_warps"]
    chunk = min(64, max(16, triton.next_power_of_2(width)))
    # The pipeline's buffers and the queue of 4-bit rows share 48 KB, what a kernel may have without asking for more.
    # Where the queue's room says how many programs fit on a multiprocessor, the buffers of codes should not.
    stages = 2 if sizes.ROOM or (sizes.GROUP and own.up.element_size() > 1) else 4
    multiplied = dot_type(own.up.dtype)
    ahead = AheadSizes(
        RANK=rank,
        EPS=0.0 if late is None else late.norm.ln.eps,
        DOWN=0 if late is None else late.programs(rank),
        DOWN_ROWS=0 if late is None or late.tiled else ROWS,
        RELU=late is not None and late.relu,
        BLOCK=chosen.block,
        CHUNK=chunk,
        STAGES=min(stages, triton.cdiv(width, chunk)),
        TYPE=multiplied,
        PARTS=PARTS[multiplied],
        WORDS=own.up.dtype == torch.uint8 and own.up_scale is not None and takes(rank, chosen.block, lanes),
        LANES=lanes,
    )
    _qkv_select_kernel[(ahead.DOWN + n_tiles + n_blocks,)](
        *arguments,
        *made,
        Second(
            mlp.hidden, own.up, own.up_scale, own.bias, mlp.threshold, row_state, chosen.ids, chosen.counts,
            chosen.row_bits,
        ),
        n,
        n_tiles,
        S=sizes,
        A=ahead,
        PDL=pdl,
        launch_pdl=pdl,
        **options,
    )  # fmt: skip
