"""Look-ahead, stage 1: head selection and the first half of an MLP predictor of `attn_in`, in one grid.

The rows of both predictors, heads first, times n = LayerNorm(x), as in `predict_down`; n is kept in attn_in as well:
    head i is selected where <rows[i], n> + bias[i] > threshold;   hidden[r] = act(<rows[h + r], n>)
One batch row: x (1, d) fp32, rows (h + rank, d), hidden (1, rank) fp32. Formulas and layouts of the selection as in
`head_select`. The other stages are `qkv_select` and `attend_pack`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.head_select import head_select_reference
from kernels.common.checks import check_device, check_shape
from kernels.common.launch import use_pdl
from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.mlp.predict import norm_launch, norm_sums, normalised_rows, row_values, unscaled
from kernels.mlp.select import PredictorWeights, Selection


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
        down = unscaled(mlp.down, mlp.down_scale, torch.float32, heads.shape[1])
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
    first = pid * ROWS
    offsets = row_values(bias, first, H, ROWS)
    limit = tl.load(threshold)
    # Position and state are those that the step before left: older than the launch before this one.
    state = tl.load(row_state)
    kept = attn_in + tl.load(position).to(tl.int64) * D
    products = normalised_rows(
        pid, x, norm_weight, norm_bias, weight, gains, shifts, kept, n_rows, eps, D, BLOCK, ROWS, SLICE, PDL
    )
    for r in tl.static_range(ROWS):
        row = first + r
        y = products[r]
        chosen = ((((y + offsets[r]) > limit) & (state > 0)) | (state == 2)).to(tl.int32)
        tl.store(row_bits + row, chosen, mask=row < H)
        tl.store(counts + row, chosen, mask=row < H)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
        tl.store(hidden + row - H, y, mask=(row >= H) & (row < n_rows))


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
    """Stage 1: `head_select` and the first half of the MLP's predictor. x (1, d) fp32, hidden (1, rank) fp32.

    position and row_state are older than the launch before this one. Errors: shapes, a CPU tensor.
    """
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
