"""The attention halves of a decoding step, x (B, d) -> out (B, d), fp32: dense, sparse, or with a look-ahead predictor.

One is chosen for each layer when a step is built; `run` queues its kernels in order: `select` those that choose heads,
`attend` the others. LayerNorms are prologues of the kernels, biases and the residual epilogues.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.weights import LayerWeights
from dejavu_train.engine.workspace import TargetSelection, Workspace
from kernels.attention.head_select import head_selection
from kernels.lookahead.mlp_ahead import LateSite
from kernels.lookahead.site_predict import SiteRows


@dataclass(frozen=True)
class LayerCache:
    """State of one layer's attention.

    k, v (B, h, T, head_dim); attn_in (B, T, d), inputs kept for K/V that are computed later; watermark (B, h) int32,
    K/V are there below it; valid (B, h, T) uint8 with the policy "stale", else None.
    """

    k: Tensor
    v: Tensor
    attn_in: Tensor
    watermark: Tensor
    valid: Tensor | None


class DenseAttention:
    """All heads of every row."""

    def __init__(self, weights: LayerWeights, cache: LayerCache, work: Workspace) -> None:
        self.weights, self.cache, self.work = weights, cache, work

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        ops, position, pdl = work.ops, work.state.position, work.pdl
        ops.qkv_dense(
            x, weights.norm1, weights.qkv, weights.qkv_bias, position, work.q, cache.k, cache.v, pdl=pdl
        )  # fmt: skip
        ops.flash_decode(
            work.q, cache.k, cache.v, None, position, None, None, work.heads_out, work.attention, pdl=pdl
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out, weights.out_bias, x, None, out, pdl=pdl)


def bias_with_mean(weights: LayerWeights, heads: TargetSelection) -> Tensor:
    """(d,): the output projection's bias, with the projected mean outputs of all heads where these stand in.

    Attention takes the mean off the selected heads: W (keep ? o - mean : 0) + (b + W mean).
    """
    if heads.predictor.mean is None:
        return weights.out_bias
    return weights.out_bias.float() + weights.whole_out(torch.float32) @ heads.predictor.mean.flatten()


class SparseAttention:
    """The heads that each row selects; K/V that they lack are filled in as the policy says."""

    def __init__(self, weights: LayerWeights, cache: LayerCache, work: Workspace, heads: TargetSelection) -> None:
        self.weights, self.cache, self.work, self.heads = weights, cache, work, heads
        self.bias = bias_with_mean(weights, heads)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        weights, cache, work, predictor = self.weights, self.cache, self.work, self.heads.predictor
        self.heads.join()
        work.ops.head_select(
            x, weights.norm1, predictor.own_folded, predictor.bias, predictor.threshold, work.state.position,
            work.state.row_state, cache.attn_in, self.heads.selection, pdl=work.pdl,
        )  # fmt: skip

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv(
            cache.attn_in, weights.qkv, weights.qkv_bias, selection, state.position, cache.watermark, cache.valid,
            work.q, cache.k, cache.v, policy=work.kv_policy, pdl=pdl,
        )  # fmt: skip
        ops.flash_decode(
            work.q, cache.k, cache.v, selection, state.position, cache.watermark, cache.valid, work.heads_out,
            work.attention, pdl=pdl, mean=predictor.mean,
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out, self.bias, x, selection, out, pdl=pdl)


class MaskedAttention:
    """The heads that each row selects, with K/V computed for all of them: for several rows, which lack many.

    So nothing is ever missing, and neither inputs nor watermarks are kept.
    """

    def __init__(self, weights: LayerWeights, cache: LayerCache, work: Workspace, heads: TargetSelection) -> None:
        self.weights, self.cache, self.work, self.heads = weights, cache, work, heads
        self.bias = bias_with_mean(weights, heads)
        self.scratch = torch.zeros_like(work.normalised)[:, None]  # the kernel that selects keeps its input somewhere
        self.first = torch.zeros_like(work.state.position)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        work, predictor = self.work, self.heads.predictor
        if predictor.own_folded is None:
            self.heads.join()
        else:
            work.ops.head_select(
                x, self.weights.norm1, predictor.own_folded, predictor.bias, predictor.threshold, self.first,
                work.state.row_state, self.scratch, self.heads.selection, pdl=work.pdl,
            )  # fmt: skip

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv_dense(
            x, weights.norm1, weights.qkv, weights.qkv_bias, state.position, work.q, cache.k, cache.v, pdl=pdl
        )  # fmt: skip
        ops.flash_decode(
            work.q, cache.k, cache.v, selection, state.position, None, None, work.heads_out, work.attention, pdl=pdl,
            mean=predictor.mean,
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out, self.bias, x, selection, out, pdl=pdl)


class FusedAttention:
    """`SparseAttention` of one row whose grids also run the predictor of its layer's MLP, and pack that list.

    late: of this layer, where the MLP before it makes its input and selects its heads; or None.
    """

    def __init__(
        self,
        weights: LayerWeights,
        cache: LayerCache,
        work: Workspace,
        heads: TargetSelection,
        mlp: TargetSelection,
        late: LateSite | None = None,
    ) -> None:
        self.weights, self.cache, self.work, self.heads, self.mlp, self.late = weights, cache, work, heads, mlp, late
        self.bias = bias_with_mean(weights, heads)
        assert heads.predictor.folded is not None
        self.site = None
        if late is None:
            self.site = SiteRows.of(heads.predictor.folded, mlp.predictor.weights, weights.norm1)
        self.hidden = torch.zeros(1, mlp.predictor.weights.down.shape[0], device=work.q.device, dtype=torch.float32)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        work, predictor = self.work, self.heads.predictor
        if self.late is None:
            work.ops.site_predict(
                x, self.weights.norm1, self.site, predictor.bias, predictor.threshold, work.state.position,
                work.state.row_state, self.cache.attn_in, self.heads.selection, self.hidden, pdl=work.pdl,
            )  # fmt: skip

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work, mlp = self.weights, self.cache, self.work, self.mlp
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv_select(
            cache.attn_in, weights.qkv, late_bias(weights, self.late), selection, state.position, cache.watermark,
            cache.valid, work.q, cache.k, cache.v, mlp.predictor.weights, self.hidden, mlp.predictor.threshold,
            state.row_state, mlp.selection, policy=work.kv_policy, pdl=pdl, late=self.late,
        )  # fmt: skip
        ops.attend_pack(
            work.q, cache.k, cache.v, selection, state.position, cache.watermark, cache.valid, work.heads_out,
            work.attention, mlp_selection=mlp.selection, packed=work.packed, pdl=pdl, mean=predictor.mean,
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out, self.bias, x, selection, out, pdl=pdl)


class FusedDenseAttention:
    """`DenseAttention` of one row whose grids also run the predictor of its layer's MLP, and pack that list.

    A predictor on a stream of its own costs two events a layer, and its kernels cannot start while others end. inputs:
    (1, T, d), of which a step fills and reads its own position: all layers share it. late: as in `FusedAttention`.
    """

    def __init__(
        self,
        weights: LayerWeights,
        cache: LayerCache,
        work: Workspace,
        mlp: TargetSelection,
        inputs: Tensor,
        late: LateSite | None = None,
    ) -> None:
        self.weights, self.cache, self.work, self.mlp, self.inputs = weights, cache, work, mlp, inputs
        self.late = late
        self.site = SiteRows.of(None, mlp.predictor.weights, weights.norm1) if late is None else None
        self.hidden = torch.zeros(1, mlp.predictor.weights.down.shape[0], device=work.q.device, dtype=torch.float32)
        self.every_head = head_selection(work.q.shape[1], work.q.device)
        self.every_head.set_mask(torch.ones(work.q.shape[:2], dtype=torch.bool, device=work.q.device))

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work, mlp, every = self.weights, self.cache, self.work, self.mlp, self.every_head
        ops, state, pdl = work.ops, work.state, work.pdl
        predictor = mlp.predictor
        if self.late is None:
            ops.site_predict(
                x, weights.norm1, self.site, predictor.bias, predictor.threshold, state.position, state.row_state,
                self.inputs, every, self.hidden, pdl=pdl,
            )  # fmt: skip
        ops.qkv_select(
            self.inputs, weights.qkv, late_bias(weights, self.late), every, state.position, cache.watermark, None,
            work.q, cache.k, cache.v, predictor.weights, self.hidden, predictor.threshold, state.row_state,
            mlp.selection, policy="always", pdl=pdl, late=self.late,
        )  # fmt: skip
        ops.attend_pack(
            work.q, cache.k, cache.v, None, state.position, None, None, work.heads_out, work.attention,
            mlp_selection=mlp.selection, packed=work.packed, pdl=pdl,
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out, weights.out_bias, x, None, out, pdl=pdl)


def late_bias(weights: LayerWeights, late: LateSite | None) -> Tensor:
    """(h, 3, head_dim): the bias of q/k/v, with the LayerNorm's shift where that is not in their input."""
    return weights.qkv_bias if late is None else late.shifts


Attention = DenseAttention | SparseAttention | MaskedAttention | FusedAttention | FusedDenseAttention
