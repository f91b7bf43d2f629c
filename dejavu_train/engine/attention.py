"""The attention half of a decoding step, x (B, d) -> out (B, d), fp32, as its plan says.

LayerNorms are prologues of the kernels, biases and the residual epilogues. With `Kernels.QKV_WITH_PREDICTOR` the grids
of one row also run the predictor of the layer's MLP. A stream of its own costs two events a layer, and its kernels
cannot start while others end.
"""

import torch
from torch import Tensor

from dejavu_train.engine.planned import HalfPlan, Kernels, Place, Run
from dejavu_train.engine.weights import LayerWeights
from dejavu_train.engine.workspace import TargetSelection, Workspace
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite
from dejavu_train.kernels.stages.predictor import HeadPredictor, HeadSite, head_selection


class Attention:
    """Heads are selected, queries, keys and values made, heads mixed and projected. Heads that share K and V are one.

    Args:
        heads, mlp: what selects heads and neurons, or None. late: where the MLP before makes the input.
    """

    def __init__(
        self,
        plan: HalfPlan,
        weights: LayerWeights,
        cache: KvCache,
        work: Workspace,
        heads: TargetSelection | None,
        mlp: TargetSelection | None,
        late: LateSite | None,
    ) -> None:
        self.plan, self.weights, self.cache, self.work, self.late = plan, weights, cache, work, late
        self.heads, self.mlp = heads, mlp
        self.bias, self.mean, self.selection = weights.out.bias, None, None
        self.position, self.inputs = work.state.position, cache.attn_in
        if heads is not None:
            self.mean, self.selection = heads.predictor.mean, heads.selection
            if self.mean is not None:  # of each unit, to that of each head
                self.mean = self.mean.view(work.q.shape[1:])
            self.predictor = (
                heads.folded().with_norm(weights.norm1)
                if plan.place is Place.FOLDED
                else HeadPredictor(None, None, None, heads.selection)
            )
        if self.mean is not None:
            # Attention takes the mean off the selected heads: W (keep ? o - mean : 0) + (b + W mean).
            self.bias = weights.out.bias.float() + weights.whole_out(torch.float32) @ self.mean.flatten()
        if plan.run is Run.MASKED:  # nothing is ever missing, but the kernel that selects keeps its input somewhere
            self.position, self.inputs = (
                torch.zeros_like(work.state.position),
                torch.zeros_like(work.carried.normalised)[:, None],
            )
        if plan.kernels is Kernels.QKV_WITH_PREDICTOR:
            assert mlp is not None
            self.neurons = mlp.in_use(weights.norm1 if late is None else None)
            if heads is None:
                every = head_selection(cache.k.shape[1], work.q.device)
                every.set_mask(torch.ones(cache.k.shape[:2], dtype=torch.bool, device=work.q.device))
                self.predictor = HeadPredictor(None, None, None, every)

    def step(self, selection: Selection | None) -> HeadStep:
        """State that the stages of attention share, with these heads."""
        return HeadStep(self.work.q, self.cache, self.work.state.position, selection)

    def site(self) -> HeadSite:
        """The predictor of heads with what it reads."""
        return HeadSite(self.predictor, self.weights.norm1, self.work.state.row_state)

    def select(self, x: Tensor) -> None:
        """Fill the selection of heads, keep the input where K/V are computed later, begin the MLP's predictor."""
        plan, work, state = self.plan, self.work, self.work.state
        if self.heads is not None:
            self.heads.join()
        if plan.kernels is Kernels.QKV_WITH_PREDICTOR:
            if self.late is None:
                work.ops.site_predict(x, self.site(), state.position, self.inputs, self.neurons, pdl=work.pdl)
        elif plan.kernels is Kernels.QKV_SELECTED or plan.place is Place.FOLDED:
            work.ops.site_predict(x, self.site(), self.position, self.inputs, pdl=work.pdl)

    def project_in(self, x: Tensor) -> None:
        """Queries, and keys and values into the cache, those that are missing too."""
        work, weights = self.work, self.weights
        if self.plan.kernels is Kernels.QKV_ALL:
            work.ops.qkv_dense(x, weights.norm1, weights.qkv, self.step(None), pdl=work.pdl)
        elif self.plan.kernels is Kernels.QKV_SELECTED:
            assert self.selection is not None
            work.ops.qkv(weights.qkv, self.step(self.selection), pdl=work.pdl)
        else:
            work.ops.qkv_select(
                weights.qkv, self.step(self.predictor.selection), self.neurons, work.state.row_state, pdl=work.pdl,
                late=self.late,
            )  # fmt: skip
        if weights.head_norms is not None:
            selected = self.selection if self.plan.run is Run.SELECTED else None
            work.ops.norm_heads(self.step(selected), weights.head_norms, pdl=work.pdl)

    def attend(self) -> None:
        """Every head's output, and the list of neurons, where its predictor ran beside q/k/v."""
        work = self.work
        mixed = (self.step(self.selection), work.heads_out, work.attention)
        if self.plan.kernels is Kernels.QKV_WITH_PREDICTOR:
            listed = self.neurons.selection, work.carried.packed
            work.ops.attend_pack(*mixed, listed, pdl=work.pdl, mean=self.mean)
        else:
            work.ops.flash_decode(*mixed, pdl=work.pdl, mean=self.mean)

    def project_out(self, x: Tensor, out: Tensor) -> None:
        """out = x + the projected outputs of the selected heads."""
        work, join = self.work, self.work.join
        work.ops.project_heads(
            work.heads_out, self.weights.out.weight, self.bias, join.base(x), self.selection, join.part(out),
            pdl=work.pdl,
        )  # fmt: skip
        join.close(out)
