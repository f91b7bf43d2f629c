"""Look-ahead, stage 2: q/k/v and the second half of an MLP predictor of `attn_in`, in one grid.

The tiles of `qkv`, and after them programs that own `block` neurons each and list those with
    up[i] . hidden + bias[i] > threshold
Independent work in a grid costs no launch edge and no event, and it fills the last wave of the tiles. No program may
need more registers than a tile of q/k/v does, so this product runs on the tensor cores as well. It is one of words
where rows are nibbles whose words have room, else of tiles (`up_rows`). One batch row. Shapes and layouts as in `qkv`
and `select`. hidden (1, rank) fp32.
Where the MLP before made the input (`mlp_ahead`), there was no stage 1. Then the first programs of this grid make
hidden, in tiles (`qkv_owned`) or a few rows each (`late_rows`). The last ones wait for these.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_shape
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.late_norm import late_factors_reference, late_sums
from dejavu_train.kernels.common.launch import as_dependent, constant_fields
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.lookahead.mlp_ahead import ROWS, LateSite
from dejavu_train.kernels.stages.late_rows import late_rows, late_sizes
from dejavu_train.kernels.stages.predictor import Predictor
from dejavu_train.kernels.stages.qkv import qkv_launch, qkv_reference, qkv_tile
from dejavu_train.kernels.stages.qkv_owned import AheadSizes
from dejavu_train.kernels.stages.select import (
    check_selects,
    grid_launch,
    select_arguments,
    select_block,
    select_reference,
)


def qkv_select_reference(
    weights: Linear,
    step: HeadStep,
    mlp: Predictor,
    row_state: Tensor,
    late: LateSite | None = None,
) -> None:
    """Plain torch, in place."""
    hidden = mlp.hidden
    if late is not None:
        cache, norm, t = step.cache, late.norm, int(step.position)
        norm.factors[t] = late_factors_reference(norm, cache.attn_in.shape[2])
        gain, shift = norm.ln.folded
        n = cache.attn_in.float() * norm.factors[:, :1] + norm.factors[:, 1:] * gain + shift
        step = replace(step, cache=replace(cache, attn_in=n))
        weights = replace(weights, bias=late.shifts - late_sums(weights.weight, norm.ln)[1])
        product = n[0, t] @ late.numbers().T[:, : hidden.shape[1]] * late.scale[: hidden.shape[1]]
        hidden.copy_(product.relu() if late.relu else product)
    qkv_reference(weights, step)
    select_reference(mlp, row_state)


@triton.jit(do_not_specialize=["n"])
def _qkv_select_kernel(
    attn_in, rows, wanted, stored, late, down, hidden, up_rows, lists, n, n_tiles, S: tl.constexpr, A: tl.constexpr,
    LATE_ROWS: tl.constexpr, READ: tl.constexpr, MULTIPLY: tl.constexpr, UP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """READ, MULTIPLY, UP: of `select_block`. LATE_ROWS: sizes of `late_rows`, None where no program is one."""
    DOWN: tl.constexpr = A.DOWN
    pid = tl.program_id(0) - DOWN
    arrived = None
    if DOWN > 0:
        arrived = down.arrived
    if pid >= n_tiles:
        select_block(pid - n_tiles, hidden, up_rows, lists, n, 1, READ, MULTIPLY, UP, PDL, arrived, DOWN)
    elif LATE_ROWS is not None and pid < 0:
        late_rows(pid + DOWN, attn_in, wanted.position, late, down, A.RANK, LATE_ROWS, A.EPS, A.CENTRED, PDL)
    elif LATE_ROWS is not None:  # made by programs of their own
        qkv_tile(pid, n_tiles, attn_in, rows, wanted, stored, late, None, S, A, PDL)
    else:
        qkv_tile(pid, n_tiles, attn_in, rows, wanted, stored, late, down, S, A, PDL)


def qkv_select(
    weights: Linear,
    step: HeadStep,
    mlp: Predictor,
    row_state: Tensor,
    pdl: bool = False,
    late: LateSite | None = None,
) -> None:
    """Stage 2: `qkv`, and the second half of the MLP's predictor. One batch row.

    mlp.hidden: (1, rank) fp32 from `site_predict`. late: as `mlp_ahead` left it. Then hidden is made here, the bias of
    q/k/v is replaced by `late.shifts`, and their weight has 4 bits. Errors: shapes, a CPU tensor.
    """
    given, made, gains = weights, (None, None), None
    if late is not None:
        given, gains = replace(weights, bias=late.shifts), late.gains
    n_tiles, arguments, sizes, options = qkv_launch(given, step, gains)
    check_shape("q", step.q, 1, *step.q.shape[1:])
    check_shape("hidden", mlp.hidden, 1, mlp.hidden.shape[1])
    check_selects(mlp, row_state)
    rank, warps, late_rows_sizes = mlp.hidden.shape[1], options["num_warps"], None
    if late is not None:
        late.check(step.q, rank, weights.weight)
        made = late.arguments(mlp.hidden)
        if not late.tiled:
            late_rows_sizes = constant_fields(late_sizes(sizes.D, ROWS, 32 * warps, late.relu))
    # The pipeline's buffers and the queue of 4-bit rows share 48 KB, what a kernel may have without asking for more.
    # Where the queue's room says how many programs fit on a multiprocessor, the buffers of codes should not.
    stages = 2 if sizes.ROOM or (sizes.GROUP and mlp.weights.up.element_size() > 1) else 4
    how = grid_launch(mlp, stages, warps)
    ahead = AheadSizes(rank) if late is None else late.sizes(rank)
    given_hidden, up_rows, lists, n, _ = select_arguments(mlp, row_state)
    _qkv_select_kernel[(ahead.DOWN + n_tiles + mlp.selection.counts.numel(),)](
        *arguments, *made, given_hidden, up_rows, lists, n, n_tiles, S=constant_fields(sizes), A=ahead,
        LATE_ROWS=late_rows_sizes, READ=how.READ, MULTIPLY=how.MULTIPLY, UP=how.constants["S"],
        **as_dependent(pdl, step.q.device), **options,
    )  # fmt: skip
