"""The attention halves of a decoding step, x (B, d) -> out (B, d), fp32: dense, sparse, or with a look-ahead predictor.

One is chosen for each layer when a step is built; `run` queues its kernels in order: `select` those that choose heads,
`attend` the others. LayerNorms are prologues of the kernels, biases and the residual epilogues.
"""

import torch
from torch import Tensor

from dejavu_train.engine.weights import LayerWeights
from dejavu_train.engine.workspace import TargetSelection, Workspace
from kernels.attention.head_select import HeadPredictor, head_selection
from kernels.common.kv_cache import KvCache
from kernels.lookahead.mlp_ahead import LateSite
from kernels.lookahead.site_predict import SiteRows


class DenseAttention:
    """All heads of every row."""

    def __init__(self, weights: LayerWeights, cache: KvCache, work: Workspace) -> None:
        self.weights, self.cache, self.work = weights, cache, work

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        ops, position, pdl = work.ops, work.state.position, work.pdl
        ops.qkv_dense(x, weights.norm1, weights.qkv, position, work.q, cache, pdl=pdl)
        ops.flash_decode(work.q, cache, None, position, work.heads_out, work.attention, pdl=pdl)
        ops.project_heads(work.heads_out, weights.out.weight, weights.out.bias, x, None, out, pdl=pdl)


def bias_with_mean(weights: LayerWeights, heads: TargetSelection) -> Tensor:
    """(d,): the output projection's bias, with the projected mean outputs of all heads where these stand in.

    Attention takes the mean off the selected heads: W (keep ? o - mean : 0) + (b + W mean).
    """
    if heads.predictor.mean is None:
        return weights.out.bias
    return weights.out.bias.float() + weights.whole_out(torch.float32) @ heads.predictor.mean.flatten()


class SparseAttention:
    """The heads that each row selects; K/V that they lack are filled in as the policy says."""

    def __init__(self, weights: LayerWeights, cache: KvCache, work: Workspace, heads: TargetSelection) -> None:
        self.weights, self.cache, self.work, self.heads = weights, cache, work, heads
        self.bias = bias_with_mean(weights, heads)
        self.folded = heads.folded()

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        work, state = self.work, self.work.state
        self.heads.join()
        work.ops.head_select(
            x, self.weights.norm1, self.folded, state.position, state.row_state, self.cache.attn_in, pdl=work.pdl
        )

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv(weights.qkv, cache, selection, state.position, work.q, policy=work.kv_policy, pdl=pdl)
        ops.flash_decode(
            work.q, cache, selection, state.position, work.heads_out, work.attention, pdl=pdl, mean=predictor.mean
        )
        ops.project_heads(work.heads_out, weights.out.weight, self.bias, x, selection, out, pdl=pdl)


class MaskedAttention:
    """The heads that each row selects, with K/V computed for all of them: for several rows, which lack many.

    So nothing is ever missing, and neither inputs nor watermarks are kept.
    """

    def __init__(self, weights: LayerWeights, cache: KvCache, work: Workspace, heads: TargetSelection) -> None:
        self.weights, self.cache, self.work, self.heads = weights, cache, work, heads
        self.bias = bias_with_mean(weights, heads)
        self.folded = heads.folded()
        self.scratch = torch.zeros_like(work.normalised)[:, None]  # the kernel that selects keeps its input somewhere
        self.first = torch.zeros_like(work.state.position)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        work = self.work
        if self.folded.rows is None:
            self.heads.join()
        else:
            work.ops.head_select(
                x, self.weights.norm1, self.folded, self.first, work.state.row_state, self.scratch, pdl=work.pdl
            )

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work = self.weights, self.cache, self.work
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv_dense(x, weights.norm1, weights.qkv, state.position, work.q, cache, pdl=pdl)
        ops.flash_decode(
            work.q, cache, selection, state.position, work.heads_out, work.attention, pdl=pdl, mean=predictor.mean
        )
        ops.project_heads(work.heads_out, weights.out.weight, self.bias, x, selection, out, pdl=pdl)


class FusedAttention:
    """`SparseAttention` of one row whose grids also run the predictor of its layer's MLP, and pack that list.

    late: of this layer, where the MLP before it makes its input and selects its heads; or None.
    """

    def __init__(
        self,
        weights: LayerWeights,
        cache: KvCache,
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
        self.folded = heads.folded()
        self.second = mlp.in_use(1)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.select(x)
        self.attend(x, out)

    def select(self, x: Tensor) -> None:
        work, state = self.work, self.work.state
        if self.site is not None:
            work.ops.site_predict(
                x, self.weights.norm1, self.site, self.folded, state.position, state.row_state, self.cache.attn_in,
                self.second.hidden, pdl=work.pdl,
            )  # fmt: skip

    def attend(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work, mlp = self.weights, self.cache, self.work, self.mlp
        predictor, selection = self.heads.predictor, self.heads.selection
        ops, state, pdl = work.ops, work.state, work.pdl
        ops.qkv_select(
            weights.qkv, cache, selection, state.position, work.q, self.second, state.row_state,
            policy=work.kv_policy, pdl=pdl, late=self.late,
        )  # fmt: skip
        ops.attend_pack(
            work.q, cache, selection, state.position, work.heads_out, work.attention, mlp.selection, work.packed,
            pdl=pdl, mean=predictor.mean,
        )  # fmt: skip
        ops.project_heads(work.heads_out, weights.out.weight, self.bias, x, selection, out, pdl=pdl)


class FusedDenseAttention:
    """`DenseAttention` of one row whose grids also run the predictor of its layer's MLP, and pack that list.

    A predictor on a stream of its own costs two events a layer, and its kernels cannot start while others end. cache:
    its inputs are those of all such layers, of which a step fills and reads its own position. late: as in
    `FusedAttention`.
    """

    def __init__(
        self,
        weights: LayerWeights,
        cache: KvCache,
        work: Workspace,
        mlp: TargetSelection,
        late: LateSite | None = None,
    ) -> None:
        self.weights, self.cache, self.work, self.mlp, self.late = weights, cache, work, mlp, late
        self.site = SiteRows.of(None, mlp.predictor.weights, weights.norm1) if late is None else None
        self.second = mlp.in_use(1)
        every = head_selection(work.q.shape[1], work.q.device)
        every.set_mask(torch.ones(work.q.shape[:2], dtype=torch.bool, device=work.q.device))
        self.every_head = HeadPredictor(None, mlp.predictor.bias, mlp.predictor.threshold, every)

    def run(self, x: Tensor, out: Tensor) -> None:
        weights, cache, work, mlp, every = self.weights, self.cache, self.work, self.mlp, self.every_head
        ops, state, pdl = work.ops, work.state, work.pdl
        if self.site is not None:
            ops.site_predict(
                x, weights.norm1, self.site, every, state.position, state.row_state, cache.attn_in, self.second.hidden,
                pdl=pdl,
            )  # fmt: skip
        ops.qkv_select(
            weights.qkv, cache, every.selection, state.position, work.q, self.second, state.row_state, policy="always",
            pdl=pdl, late=self.late,
        )  # fmt: skip
        ops.attend_pack(
            work.q, cache, None, state.position, work.heads_out, work.attention, mlp.selection, work.packed, pdl=pdl
        )
        ops.project_heads(work.heads_out, weights.out.weight, weights.out.bias, x, None, out, pdl=pdl)


Attention = DenseAttention | SparseAttention | MaskedAttention | FusedAttention | FusedDenseAttention
