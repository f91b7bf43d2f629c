"""Look-ahead, stage 4: a layer's sparse MLP with 4-bit weights, and in the grid that ends it the next layer's input and
heads.

    out = residual + bias + sum of the partial sums;   u of out, and its moments, for a norm that comes late
    head i of the next layer is selected where <heads[i], LayerNorm(residual)> + head_bias[i] > threshold

One row. u and moments as in `late_norm`, u kept at the present position of attn_in. The heads' predictor reads what the
MLP read, half a block before the layer whose heads it selects. Its programs run while the MLP does: residual is older
than that. So no stage lies between the layers. Without such a predictor (`heads` None) nothing is selected.
The other stages are `qkv_select` and `attend_pack`. The first layer begins with `site_predict`, and so does one whose
heads are selected at their own site.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_int4, check_shape, check_tensor, require
from dejavu_train.kernels.common.lane_queue import as_it_comes
from dejavu_train.kernels.common.late_norm import LateNorm, add_moments, late_store_reference, late_sums
from dejavu_train.kernels.common.launch import (
    start_dependents,
    start_dependents_and_wait,
    sums_together,
    use_pdl,
    wait_for_started,
)
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, row_moments
from dejavu_train.kernels.common.limits import TILE_ROWS, TILED_FROM
from dejavu_train.kernels.common.partial_sums import SumSettings, summed_partials
from dejavu_train.kernels.common.row_state import by_state
from dejavu_train.kernels.common.selection import PackedSelection
from dejavu_train.kernels.formats.codes import nibble_codes, stored_width
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights
from dejavu_train.kernels.stages.mlp import mlp_sums
from dejavu_train.kernels.stages.predict import head_rows, site_predict_reference
from dejavu_train.kernels.stages.predictor import HeadSite, PredictorWeights, norm_sums
from dejavu_train.kernels.stages.qkv_owned import AheadSizes, Down, Late

ROWS = 4  # of a program of `late_rows`


@dataclass(frozen=True)
class LateSite:
    """A layer's attn_in that the MLP of the layer before makes, and what reads it.

    norm: in front of it. attn_in (1, T, d) fp16, which keeps u. position (1,) int32. gains, shifts (h, r + 2, head_dim)
    fp32: W gain, and W shift + bias, of q/k/v. heads: their predictor, which reads mlp_in of the layer before, or None.
    The first half of the MLP's predictor: down, its nibbles (rank, ceil(d / 2)), and scale, of its rows. With
    tile_scales, all one, down has words of 4-bit codes instead, rank rows and zeros up to a multiple of 16. Their
    groups are those of q/k/v's columns. down_gains, down_shifts: fp32, down's sums with gain and shift, without scale.
    arrived: (1,) int32, how many programs have made hidden values.
    """

    norm: LateNorm
    attn_in: Tensor
    position: Tensor
    gains: Tensor
    shifts: Tensor
    heads: HeadSite | None
    down: Tensor
    tile_scales: Tensor | None
    scale: Tensor
    down_gains: Tensor
    down_shifts: Tensor
    relu: bool
    arrived: Tensor

    @classmethod
    def of(
        cls, norm: LateNorm, attn_in: Tensor, position: Tensor, qkv: Linear, mlp: PredictorWeights, arrived: Tensor,
        heads: HeadSite | None,
    ) -> "LateSite":  # fmt: skip
        """Take q/k/v's rows (h, r + 2, head_dim, d) in 4 bits and a predictor of nibbles. Its first half is copied."""
        weight = qkv.weight
        gains, shifts = late_sums(weight, norm.ln)
        assert mlp.down_scale is not None
        down, rows = mlp.down, (mlp.down_scale, *norm_sums(mlp.down, norm.ln))
        tile_scales = None
        if attn_in.shape[2] >= TILED_FROM and weight.format is Format.INT4:
            missing = -len(down) % TILE_ROWS
            codes = torch.nn.functional.pad(nibble_codes(down, attn_in.shape[2]), (0, 0, 0, missing))
            ones = torch.ones(len(codes), weight.scales.shape[-1], device=codes.device, dtype=torch.float32)
            down, tile_scales = Int4Rows.of(codes, ones).parts()
            rows = tuple(torch.nn.functional.pad(each, (0, missing)) for each in rows)
        return cls(
            norm, attn_in, position, gains, shifts + qkv.bias.float(), heads, down, tile_scales, *rows,
            mlp.relu, arrived,
        )  # fmt: skip

    @property
    def tiled(self) -> bool:
        return self.tile_scales is not None

    def sizes(self, rank: int) -> AheadSizes:
        """Constants of a grid whose first programs make hidden values of this rank."""
        programs = triton.cdiv(rank, TILE_ROWS if self.tiled else ROWS)
        return AheadSizes(rank, self.norm.ln.eps, self.norm.centred, programs, self.relu)

    def numbers(self) -> Tensor:
        """down without scales, (rank or more, d) fp32."""
        if self.tile_scales is not None:
            return Int4Rows(self.down, self.tile_scales).dense()
        return nibble_codes(self.down, self.attn_in.shape[2]).float()

    def check(self, q: Tensor, rank: int, weight: Matrix) -> None:
        """Raise ValueError where its tensors do not fit q/k/v of one row and hidden values of this rank."""
        d = self.attn_in.shape[2]
        require(len(q) == 1, f"a norm comes late for one batch row, not {len(q)}")
        check_shape("gains", self.gains, *weight.shape[:-1])
        check_shape("moments", self.norm.moments, 2)
        check_shape("factors", self.norm.factors, self.attn_in.shape[1], 2)
        if weight.format is not Format.INT4:
            raise ValueError("a norm comes late for 4-bit rows")
        padded = rank
        if self.tile_scales is not None:
            padded += -rank % TILE_ROWS
            down = check_int4("down", Int4Rows(self.down, self.tile_scales), (padded, d), self.attn_in)
            require(down.group == weight.group, "down must have groups of q/k/v's columns")
        else:
            check_shape("down", self.down, rank, stored_width(self.down, d))
        for name in ("scale", "down_gains", "down_shifts"):
            check_shape(name, getattr(self, name), padded)

    def arguments(self, hidden: Tensor) -> tuple[Late, Down]:
        """Arguments of the kernel of `qkv_select`, which makes hidden (1, rank)."""
        norm = self.norm
        made = (self.down, self.tile_scales, self.down_gains, self.down_shifts, self.scale, hidden, self.arrived)
        return Late(norm.moments, norm.estimate, norm.factors), Down(*made)


def add_ahead_reference(residual: Tensor, out: Tensor, ahead: LateSite) -> None:
    """Plain torch, of what follows the sum `out`."""
    position, heads = int(ahead.position), ahead.heads
    late_store_reference(ahead.norm, residual, out, ahead.attn_in[:, position])
    if heads is not None:
        nowhere = ahead.attn_in.new_empty(1, 1, out.shape[1])
        site_predict_reference(residual, heads, ahead.position * 0, nowhere)


@triton.jit
def _select_head(head, residual, norm, heads, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """All of it before the wait: residual is older than the launch before, and no L1 may have it as it was.

    heads: `predict.HeadRows`.
    """
    start_dependents(PDL)
    columns = tl.arange(0, BLOCK)
    offset = tl.load(heads.bias + head)
    limit = tl.load(heads.threshold)
    state = tl.load(heads.row_state)
    gain_sum = tl.load(heads.gains + head)
    shift_sum = tl.load(heads.shifts + head)
    products = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, as_it_comes(D), BLOCK):
        c = begin + columns
        x = tl.load(residual + c, mask=c < D, other=0.0, cache_modifier=".cg")
        w = tl.load(heads.weight + head * D + c, mask=c < D, other=0.0).to(tl.float32)
        products += x * tl.load(norm.gain + c, mask=c < D, other=0.0).to(tl.float32) * w
        total += x
        squares += x * x
    sums = sums_together((products, total, squares), 3)
    mean, rstd = row_moments(sums[1], sums[2], norm, D)
    logit = rstd * (sums[0] - mean * gain_sum) + shift_sum + offset
    chosen = by_state(logit > limit, state).to(tl.int32)
    wait_for_started(PDL)
    tl.store(heads.row_bits + head, chosen)


@triton.jit
def _add_ahead_kernel(
    partials, bias, residual, out, gain, estimate, position, attn_in, moments, arrived, norm, heads, D: tl.constexpr,
    STRIPE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    stripe = tl.program_id(0) - H
    if stripe < 0:
        if H > 0:
            _select_head(stripe + H, residual, norm, heads, D, BLOCK, PDL)
    else:
        columns = stripe * STRIPE + tl.arange(0, STRIPE)
        inside = columns < D
        offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(residual + columns, mask=inside, other=0.0, cache_modifier=".cg")
        gains = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
        place = tl.load(position).to(tl.int64)
        start_dependents_and_wait(PDL)
        m = tl.load(estimate)
        r = tl.load(estimate + 1)
        x = summed_partials(partials, columns, inside, D, STRIPE, SPLITS, CHUNK) + offset + base
        z = tl.where(inside, (x - m) * r, 0.0)
        tl.store(out + columns, x, mask=inside)
        tl.store(attn_in + place * D + columns, (z * gains).to(attn_in.dtype.element_ty), mask=inside)
        add_moments(moments, z)
        if stripe == 0:
            tl.store(arrived, 0)


def mlp_ahead(
    x: Tensor,
    ln: LayerNormWeights,
    weights: MlpWeights,
    rows: PackedSelection,
    out: Tensor,
    ahead: LateSite,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
) -> None:
    """`mlp` of x (1, d) fp32, the residual too, and what it leaves for the next layer. Errors: as there."""
    pdl = use_pdl(pdl, out.device)
    partials, splits = mlp_sums(x, ln, weights, rows, partials, early, pdl, late=ahead.norm)
    d, heads = out.shape[1], ahead.heads
    check_shape("out", out, 1, d)
    check_tensor("attn_in", ahead.attn_in, (1, ahead.attn_in.shape[1], d), (torch.float16,), out)
    check_shape("moments", ahead.norm.moments, 2)
    selecting, norm, n_heads = None, None, 0
    if heads is not None:
        selecting = head_rows(heads, out)
        norm, n_heads = heads.ln.args()._replace(shift=None), heads.predictor.selection.n
    settings = SumSettings.of(partials, splits)
    _add_ahead_kernel[(n_heads + triton.cdiv(d, settings.stripe),)](
        partials, weights.down.bias, x, out, ahead.norm.ln.folded[0], ahead.norm.estimate, ahead.position,
        ahead.attn_in, ahead.norm.moments, ahead.arrived, norm, selecting, D=d, STRIPE=settings.stripe, SPLITS=splits,
        CHUNK=settings.chunk, H=n_heads, BLOCK=min(1024, triton.next_power_of_2(d)), PDL=pdl,
        num_warps=settings.warps, launch_pdl=pdl,
    )  # fmt: skip
