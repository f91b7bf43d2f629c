"""One decoding step of the engine: its state, its halves in order, and the CUDA graph that replays them.

The step is a loop: embed; then for each layer an attention half and an MLP half (`attention`, `mlp`), in
front of each of which the predictors that read its site run; then the LM head and the choice of the next token. Which
kernels a half launches stands in its `run`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dejavu_train.bundle.guard import GuardState
from dejavu_train.engine.attention import (
    Attention,
    DenseAttention,
    FusedAttention,
    FusedDenseAttention,
    MaskedAttention,
    SparseAttention,
)
from dejavu_train.engine.guarded import GuardedAttention, GuardedMlp
from dejavu_train.engine.mlp import BatchMlp, CascadeMlp, DenseMlp, ListedMlp, MaskedMlp, Mlp, SparseMlp
from dejavu_train.engine.ops import operations
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Engine, Kernels, Packer, Place, Run, StepPlan
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.engine.workspace import SitePredictor, TargetSelection, Workspace
from dejavu_train.families import Target, UnitKey
from kernels.attention import head_select
from kernels.common import launch
from kernels.common.kv_cache import KvCache
from kernels.common.late_norm import LateNorm
from kernels.dense.screened_head import ScreenedHead
from kernels.lookahead.mlp_ahead import HeadsAhead, LateSite
from kernels.mlp import sparse_fc2
from kernels.mlp.selection import Selection

BATCH_BLOCK = 64  # of the selections of several rows


@dataclasses.dataclass(frozen=True)
class Half:
    """Half a layer: the predictors that read its site, and what then computes x -> out."""

    sites: tuple[SitePredictor, ...]
    body: Attention | Mlp | GuardedAttention | GuardedMlp


CAPTURING = threading.Lock()
"""Held while a graph is recorded. A capture ends in an error where another thread waits for the whole device, as the
beginning of another capture does."""


class DecodeStep:
    """State and kernels of a step, as a plan says.

    Attributes:
        halves: attention and MLP of each layer in turn; half i reads x[i] and writes x[i + 1], (B, d) fp32 each: one
            buffer a half, because a look-ahead predictor may still read an older one.
        measured: the same halves in a dense step that a guard measures; None without one.
        state: the tokens and all that decides about them, see `kernels.sampling`.
        logits: (B, V) fp32, of the last step that was not screened.
        screen: the LM head with its screen, or None.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        predictors: Mapping[UnitKey, TargetPredictor],
        plan: StepPlan,
        options: EngineOptions,
        device: torch.device,
        guard: GuardState | None = None,
    ) -> None:
        self.guard, self.plan = guard, plan
        self.weights, self.shape, self.predictors = weights, weights.shape, predictors
        self.batch, self.context, self.device = plan.batch, plan.context, device
        self._graphed = options.graph and plan.engine is Engine.GPU
        self._graphs: dict[tuple[str, bool, bool], torch.cuda.CUDAGraph] = {}
        shape, dtype = weights.shape, weights.embedding.dtype
        ahead = torch.cuda.Stream(device) if plan.streams else None
        self.work = Workspace.empty(
            shape, plan.batch, plan.context, dtype, device, operations(options.ops), options.pdl, plan.kv_policy, ahead,
            plan.formats.packed,
        )  # fmt: skip
        self.state, self.ops = self.work.state, self.work.ops
        self.x = torch.zeros(2 * shape.n_layers + 1, plan.batch, shape.d_model, device=device, dtype=torch.float32)
        self.logits = torch.zeros(plan.batch, shape.vocab_size, device=device, dtype=torch.float32)
        self.screen: ScreenedHead | None = None
        if plan.screened:
            (head,) = weights.lm_head.parts()
            self.screen = ScreenedHead.of(head, weights.final_norm)
        self.watermark = torch.zeros(shape.n_layers, plan.batch, shape.n_heads, dtype=torch.int32, device=device)
        chosen = {key: self._choose(key) for key in predictors}
        self.selections = {key: each.selection for key, each in chosen.items()}
        inputs = plan.context if plan.shares_inputs else 0
        self.inputs = torch.zeros(plan.batch, inputs, shape.d_model, dtype=dtype, device=device)
        self.caches = [self._cache(layer) for layer in range(shape.n_layers)]
        sites = self._late_sites(chosen)
        self.halves: list[Half] = []
        for layer in range(shape.n_layers):
            heads, mlp = chosen.get(UnitKey(layer, Target.HEADS)), chosen.get(UnitKey(layer, Target.MLP))
            attention = self._attention(layer, heads, mlp, sites.get(layer))
            self.halves.append(Half(_reading(chosen, layer, "attn_in"), attention))
            body = self._mlp(layer, mlp, sites.get(layer + 1))
            self.halves.append(Half(_reading(chosen, layer, "mlp_in"), body))
        self.measured = None if guard is None else [Half(half.sites, self._measured(half.body)) for half in self.halves]

    def _choose(self, key: UnitKey) -> TargetSelection:
        """The selection of a (layer, target), and its predictor where that runs on its own."""
        predictor, device, half = self.predictors[key], self.device, self.plan.half(*key)
        if half.place in (Place.FOLDED, Place.BEFORE):
            return TargetSelection(predictor, head_select.head_selection(self.shape.n_heads, device), None)
        block = sparse_fc2.packed_block(self.shape.d_model) if self.batch == 1 else BATCH_BLOCK
        selection = Selection.empty(self.shape.units(predictor.target), device, block)
        if half.place is Place.GRIDS:
            return TargetSelection(predictor, selection, None)
        weights = self.weights.layers[predictor.site_layer]
        norm = weights.norm1 if predictor.site == "attn_in" else weights.norm2
        normalised = self.work.normalised if half.own and half.target == "mlp" else None
        known = dataclasses.replace(predictor, weights=predictor.weights.with_norm(norm))
        listed = self.work.packed if half.packer is Packer.PREDICTOR else None
        runner = SitePredictor(
            known, selection, self.work, norm, half.place is not Place.STREAM, normalised, listed
        )  # fmt: skip
        return TargetSelection(predictor, selection, runner)

    def _cache(self, layer: int) -> KvCache:
        """A layer that computes K/V of all its heads needs no inputs, or its own position of those that are shared."""
        shape, batch, device = self.shape, self.batch, self.device
        dtype, size = self.weights.embedding.dtype, (batch, shape.n_heads, self.context)
        half = self.plan.half(layer, Target.HEADS)
        sparse = half.run is Run.SELECTED
        stale = sparse and self.plan.kv_policy == "stale"
        attn_in = self.inputs
        if sparse or half.kernels is not Kernels.QKV_SELECT:
            attn_in = torch.zeros(batch, self.context if sparse else 0, shape.d_model, dtype=dtype, device=device)
        return KvCache(
            k=torch.zeros(*size, shape.head_dim, dtype=dtype, device=device),
            v=torch.zeros(*size, shape.head_dim, dtype=dtype, device=device),
            attn_in=attn_in,
            watermark=self.watermark[layer] if sparse else None,
            valid=torch.zeros(size, dtype=torch.uint8, device=device) if stale else None,
        )

    def _late_sites(self, chosen: Mapping[UnitKey, TargetSelection]) -> dict[int, LateSite]:
        """What the MLP before each late layer leaves for it."""
        device, found = self.device, {}
        estimate, moments = torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        for layer in [i for i, half in enumerate(self.plan.halves[::2]) if half.late]:
            weights, cache, ahead = self.weights.layers[layer], self.caches[layer], None
            heads, mlp = chosen.get(UnitKey(layer, Target.HEADS)), chosen[UnitKey(layer, Target.MLP)].predictor
            if heads is not None:
                predictor = head_select.HeadPredictor(
                    heads.predictor.folded, heads.predictor.bias, heads.predictor.threshold, heads.selection
                )
                ahead = HeadsAhead.of(predictor, self.weights.layers[layer - 1].norm2, self.state.row_state)
            found[layer] = LateSite.of(
                LateNorm.empty(weights.norm1, self.context, estimate, moments),
                cache.attn_in, self.state.position, weights.qkv, mlp.weights, arrived, ahead,
            )  # fmt: skip
        return found

    def _attention(
        self, layer: int, heads: TargetSelection | None, mlp: TargetSelection | None, late: LateSite | None
    ) -> Attention:
        weights, cache, half = self.weights.layers[layer], self.caches[layer], self.plan.half(layer, "heads")
        if half.kernels is Kernels.QKV_SELECT:
            assert mlp is not None
            if heads is None:
                return FusedDenseAttention(weights, cache, self.work, mlp, late)
            return FusedAttention(weights, cache, self.work, heads, mlp, late)
        if heads is None:
            return DenseAttention(weights, cache, self.work)
        if half.run is Run.MASKED:
            return MaskedAttention(weights, cache, self.work, heads)
        return SparseAttention(weights, cache, self.work, heads)

    def _mlp(self, layer: int, mlp: TargetSelection | None, ahead: LateSite | None) -> Mlp:
        weights, half = self.weights.layers[layer], self.plan.half(layer, "mlp")
        if mlp is None:
            return DenseMlp(weights, self.work, half.kernels is Kernels.LISTED_GRID)
        if half.kernels is Kernels.PRODUCTS:
            return MaskedMlp(weights, self.work, mlp)
        if half.kernels in (Kernels.LISTED_CODES, Kernels.LISTED_BATCH):
            return (ListedMlp if half.kernels is Kernels.LISTED_CODES else BatchMlp)(weights, self.work, mlp)
        packed = half.packer is Packer.ATTENTION
        if half.kernels is Kernels.SECOND_STAGE:
            return CascadeMlp(weights, self.work, mlp, packed)
        return SparseMlp(weights, self.work, mlp, packed, ahead)

    def _measured(self, body: Any) -> Any:
        assert self.guard is not None
        if isinstance(body, (DenseAttention, FusedDenseAttention, DenseMlp)):
            return body
        kind = GuardedMlp if isinstance(body, Mlp) else GuardedAttention
        return kind(body, self.guard)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Within it the engine's device is the current one: kernels launch there, graphs are captured there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def tail(self, mode: str, score: bool) -> None:
        """LM head and the choice of the next token, from x[-1]; a screened greedy step leaves `logits` as they are."""
        weights, state, pdl = self.weights, self.state, self.work.pdl
        with self.on_device():
            if self.screen is not None and mode == "greedy" and not score:
                self.ops.screened_head(self.x[-1], self.screen, state.position, state.least, state.stops, pdl=pdl)
                self.ops.advance(self.logits, state, mode, score, pdl=pdl, chosen=self.screen.best)
                return
            self.ops.dense_rows(self.x[-1], weights.final_norm, weights.lm_head, None, "none", self.logits, pdl=pdl)
            self.ops.advance(self.logits, state, mode, score, pdl=pdl)

    def eager(self, mode: str, score: bool, measured: bool = False) -> None:
        """A step without a graph; `measured`: dense, measured by the guard, which then moves its thresholds."""
        with self.on_device():
            weights = self.weights
            self.ops.embed(self.state, weights.embedding, weights.positions, self.x[0], pdl=self.work.pdl)
            halves = self.measured if measured and self.measured is not None else self.halves
            for half, x, out in zip(halves, self.x, self.x[1:], strict=False):
                for site in half.sites:
                    site.run(x)
                half.body.run(x, out)
            if measured and self.guard is not None:
                self.guard.move(self.state.row_state == 1)
            self.tail(mode, score)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put back, also after an error, what a step changes and the next one reads.

        Caches only grow, at positions not yet valid.
        """
        s = self.state
        changed = [s.tokens, s.nll, s.position, s.done, s.row_state, s.fault, self.watermark]
        changed += [] if self.guard is None else self.guard.tensors()
        saved = [(tensor, tensor.clone()) for tensor in changed]
        try:
            yield
        finally:
            for tensor, copy in saved:
                tensor.copy_(copy)

    def _capture(self, *call: Any) -> torch.cuda.CUDAGraph:
        """`eager` with these arguments: compile every kernel in a step whose effects are undone, then record one."""
        with CAPTURING:
            return self._captured(*call)

    def _captured(self, *call: Any) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), self.undone():
            self.eager(*call)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        launch.share_carveout(self.plan.carveout)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of CUDA meanwhile is no part of this capture and does not break it.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.eager(*call)
        return graph

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done; every N-th step is dense where a guard asks for that."""
        call = mode, score, self.guard is not None and self.guard.due()
        if not self._graphed:
            self.eager(*call)
            return
        with self.on_device():
            if call not in self._graphs:
                self._graphs[call] = self._capture(*call)
            self._graphs[call].replay()

    def reset(self) -> None:
        """Forget all rows. Captured graphs stay valid."""
        self.work.reset()
        self.watermark.zero_()
        for cache in self.caches:
            if cache.valid is not None:
                cache.valid.zero_()


def _reading(chosen: Mapping[UnitKey, TargetSelection], layer: int, site: str) -> tuple[SitePredictor, ...]:
    """The predictors that run at this site, in the order of their targets."""
    runners = (each.runner for each in chosen.values() if each.runner is not None)
    return tuple(r for r in runners if (r.predictor.site_layer, r.predictor.site) == (layer, site))
