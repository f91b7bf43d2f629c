"""Look-ahead, stage 1: head selection and the first half of an MLP predictor of `attn_in`, in one grid.

The rows of both predictors times n = LayerNorm(x), as in `predict_down`. The input n is kept in attn_in as well:
    head i is selected where <heads[i], n> + bias[i] > threshold.   hidden[r] = act(scale[r] <down[r], n>)
One batch row: x (1, d) fp32, heads (h, d), down (rank, d) as `predict_down` takes it: numbers, or int8 codes or nibbles
with a scale a row. The output `hidden` is (1, rank) fp32. The first programs have rows of the heads' predictor, the
others of `down`.
Without heads (h = 0) only `down` is multiplied, and n kept.
Formulas and layouts of the selection as in `head_select`. The other stages are `qkv_select` and `attend_pack`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.attention.head_select import HeadPredictor, head_select_reference
from dejavu_train.kernels.common.checks import check_device, check_shape, require
from dejavu_train.kernels.common.launch import row_or, use_pdl
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.row_state import by_state
from dejavu_train.kernels.mlp.codes import CODE_TYPES, stored_width
from dejavu_train.kernels.mlp.predict import (
    norm_launch,
    norm_sums,
    normalised_rows,
    predict_down_reference,
    predicted_rows,
    row_values,
)
from dejavu_train.kernels.mlp.predictor import PredictorWeights


@dataclass(frozen=True)
class SiteRows:
    """The rows that read one site: of the heads' predictor (h, d) and of the MLP's `down`, see the module's docstring.

    scale: (rank,) fp32 of `down`, or None. head_sums, sums: of either with the LayerNorm in front of them, see
    `norm_sums`.
    """

    heads: Tensor
    down: Tensor
    scale: Tensor | None
    head_sums: tuple[Tensor, Tensor]
    sums: tuple[Tensor, Tensor]
    relu: bool

    @classmethod
    def of(cls, heads: Tensor | None, mlp: PredictorWeights, ln: LayerNormWeights) -> "SiteRows":
        """Of two predictors of one site, or of the MLP's alone. Nothing is copied."""
        heads = mlp.up.new_empty(0, len(ln.folded[0]), dtype=ln.folded[0].dtype) if heads is None else heads
        return cls(heads, mlp.down, mlp.down_scale, norm_sums(heads, ln), norm_sums(mlp.down, ln), mlp.relu)


def site_predict_reference(
    x: Tensor,
    ln: LayerNormWeights,
    site: SiteRows,
    heads: HeadPredictor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    hidden: Tensor,
    pdl: bool = False,
) -> None:
    """Plain torch, in place."""
    head_select_reference(x, ln, heads, position, row_state, attn_in)
    hidden.copy_(predict_down_reference(x, ln, site.down, site.scale, site.relu))


@triton.jit(do_not_specialize=["n_rows"])
def _site_kernel(
    x,
    norm_weight,
    norm_bias,
    heads,
    head_gains,
    head_shifts,
    bias,
    threshold,
    position,
    row_state,
    down,
    scale,
    gains,
    shifts,
    attn_in,
    row_bits,
    hidden,
    n_rows,
    eps,
    H: tl.constexpr,
    HEAD_PROGRAMS: tl.constexpr,
    RELU: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    # Position and state are those that the step before left: older than the launch before this one.
    kept = attn_in + tl.load(position).to(tl.int64) * D
    if pid < HEAD_PROGRAMS:
        offsets = row_values(bias, pid * ROWS, H, ROWS)
        limit = tl.load(threshold)
        state = tl.load(row_state)
        products = normalised_rows(
            pid, x, norm_weight, norm_bias, heads, head_gains, head_shifts, kept, H, eps, D, BLOCK, ROWS, SLICE, PDL
        )
        for r in tl.static_range(ROWS):
            row = pid * ROWS + r
            tl.store(row_bits + row, by_state((products[r] + offsets[r]) > limit, state).to(tl.int32), mask=row < H)
    else:
        predicted_rows(
            pid, x, norm_weight, norm_bias, down, scale, gains, shifts, hidden, kept, n_rows, eps, D, BLOCK, ROWS,
            SLICE, RELU, PDL, HEAD_PROGRAMS,
        )  # fmt: skip


def site_predict(
    x: Tensor,
    ln: LayerNormWeights,
    site: SiteRows,
    heads: HeadPredictor,
    position: Tensor,
    row_state: Tensor,
    attn_in: Tensor,
    hidden: Tensor,
    pdl: bool = False,
) -> None:
    """Stage 1: `head_select` and the first half of the MLP's predictor. x (1, d) fp32, hidden (1, rank) fp32.

    site: made of the heads' rows. Without these none is selected, and the selection is not written.

    position and row_state are older than the launch before this one. Errors: shapes, a CPU tensor.
    """
    check_device("x", x)
    d, rank, n_heads = x.shape[1], len(site.down), len(site.heads)
    check_shape("x", x, 1, d)
    check_shape("attn_in", attn_in, 1, attn_in.shape[1], d)
    require(n_heads in (0, heads.selection.n), f"rows of {n_heads} heads, a selection of {heads.selection.n}")
    check_shape("site.heads", site.heads, n_heads, d)
    check_shape("site.down", site.down, rank, stored_width(site.down, d))
    require(site.down.dtype not in CODE_TYPES or site.scale is not None, "codes in site.down need a scale a row")
    check_shape("hidden", hidden, 1, rank)
    if n_heads:
        assert heads.bias is not None
        check_shape("bias", heads.bias, n_heads)
    pdl = use_pdl(pdl, x.device)
    programs, constants, warps = norm_launch(d, (n_heads, rank))
    _site_kernel[(programs,)](
        x,
        *ln.folded,
        site.heads,
        *site.head_sums,
        row_or(heads.bias, x),
        row_or(heads.threshold, x),
        position,
        row_state,
        site.down,
        site.scale,
        *site.sums,
        attn_in,
        heads.selection.row_bits,
        hidden,
        rank,
        ln.eps,
        H=n_heads,
        HEAD_PROGRAMS=triton.cdiv(n_heads, constants["ROWS"]),
        RELU=site.relu,
        **constants,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
