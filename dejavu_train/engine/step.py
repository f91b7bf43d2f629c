"""One decoding step of the engine: its state, its layers in order, and the CUDA graph that replays them.

`DecodeStep.eager` is the forward pass. What each method in it queues follows the plan (`planned.StepPlan`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.guard import GuardState
from dejavu_train.engine.attention import Attention
from dejavu_train.engine.guarded import GuardedAttention, GuardedMlp
from dejavu_train.engine.mlp import Mlp
from dejavu_train.engine.one_kernel import layers_in_one
from dejavu_train.engine.ops import operations
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Engine, Kernels, Packer, Place, Run, StepPlan
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.engine.workspace import SitePredictor, TargetSelection, Workspace
from dejavu_train.families import LayerInput, Site, Target, UnitKey
from dejavu_train.kernels.common import launch
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.limits import selection_block
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.dense.screened_head import ScreenedHead
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite
from dejavu_train.kernels.persistent.decoder_layers import DecoderLayers
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.stages.predictor import HeadSite, head_selection


@dataclasses.dataclass(frozen=True)
class Layer:
    """Both halves of a layer, and the predictors that run as kernels of their own in front of each."""

    at_attention: tuple[SitePredictor, ...]
    attention: Attention | GuardedAttention
    at_mlp: tuple[SitePredictor, ...]
    mlp: Mlp | GuardedMlp


CAPTURING = threading.Lock()
"""Held while a graph is recorded. A capture ends in an error where another thread waits for the whole device, as the
beginning of another capture does."""


class DecodeStep:
    """State and kernels of a step, as a plan says.

    Attributes:
        layers: of the model. measured: the same in a dense step that a guard measures. None without one.
        x: (2 n_layers + 1, B, d) fp32, the residual stream in front of each half and behind the last. One buffer a
            half, because a look-ahead predictor may still read an older one.
        state: the tokens and all that decides about them, see `dejavu_train.kernels.sample.sampling`.
        logits: (B, V) fp32, of the last step that was not screened.
        screen: the LM head with its screen, or None.
    Args:
        beside: a step of other weights of the same model, whose tokens, K/V, watermarks and screen this one shares.
        join: of the outputs of the halves of layers. None = of one GPU.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        predictors: Mapping[UnitKey, TargetPredictor],
        plan: StepPlan,
        options: EngineOptions,
        device: torch.device,
        guard: GuardState | None = None,
        beside: "DecodeStep | None" = None,
        join: Join | None = None,
    ) -> None:
        self.guard, self.plan, self._beside = guard, plan, beside
        self.weights, self.shape, self.predictors = weights, weights.shape, predictors
        self.batch, self.context, self.device = plan.batch, plan.context, device
        self._graphed = options.graph and plan.engine is Engine.GPU
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        shape, dtype = weights.shape, weights.embedding.dtype
        shared: TokenState | None = None if beside is None else beside.state
        self.work = Workspace.empty(plan, operations(options.ops), options.pdl, dtype, device, shared, join)
        self.state: TokenState = self.work.state
        self.ops = self.work.ops
        self.x = torch.zeros(2 * shape.n_layers + 1, plan.batch, shape.d_model, device=device, dtype=torch.float32)
        self.logits = torch.zeros(plan.batch, shape.vocab_size, device=device, dtype=torch.float32)
        self.screen: ScreenedHead | None = None
        if plan.screened:
            (head,) = weights.lm_head.parts()
            self.screen = ScreenedHead.of(head, weights.final_norm) if beside is None else beside.screen
        if beside is None:
            self.watermark = torch.zeros(shape.n_layers, plan.batch, shape.n_kv_heads, dtype=torch.int32, device=device)
        else:
            self.watermark = beside.watermark
        chosen = {key: self._choose(key) for key in predictors}
        self.selections = {key: each.selection for key, each in chosen.items()}
        self.caches = [self._cache(layer) for layer in range(shape.n_layers)]
        self.layers = self._layers(chosen)
        self.one_kernel: DecoderLayers | None = None
        if plan.one_kernel is not None:
            self.one_kernel = layers_in_one(plan.one_kernel, weights, predictors, self.caches, self.state)
        self.measured = None if guard is None else [self._measured(i, layer) for i, layer in enumerate(self.layers)]

    def _layers(self, chosen: Mapping[UnitKey, TargetSelection]) -> list[Layer]:
        plan, work, found = self.plan, self.work, []
        late = {i: self._late_site(i, chosen) for i, half in enumerate(plan.halves[::2]) if half.late}
        runners = [each.runner for each in chosen.values() if each.runner is not None]
        for i, (weights, cache) in enumerate(zip(self.weights.layers, self.caches, strict=True)):
            heads, neurons = chosen.get(UnitKey(i, Target.HEADS)), chosen.get(UnitKey(i, Target.MLP))
            attention, mlp = plan.half(i, Target.HEADS), plan.half(i, Target.MLP)
            sites = [tuple(r for r in runners if r.site == Site(i, at)) for at in (LayerInput.ATTN, LayerInput.MLP)]
            found.append(
                Layer(
                    sites[0],
                    Attention(attention, weights, cache, work, heads, neurons, late.get(i)),
                    sites[1],
                    Mlp(mlp, plan.codes_down, weights, work, neurons, late.get(i + 1)),
                )  # fmt: skip
            )
        return found

    def _choose(self, key: UnitKey) -> TargetSelection:
        """The selection of a (layer, target), and its predictor where that runs on its own."""
        predictor, device, half = self.predictors[key], self.device, self.plan.half(*key)
        if half.place in (Place.FOLDED, Place.BEFORE):
            return TargetSelection(predictor, head_selection(self.shape.n_kv_heads, device))
        block = selection_block(self.shape.d_model, self.batch)
        selection = Selection.empty(self.shape.units(predictor.target), device, block)
        if half.place is Place.GRIDS:
            return TargetSelection(predictor, selection, half.products)
        weights = self.weights.layers[predictor.site.layer]
        norm = weights.norm1 if predictor.site.input == LayerInput.ATTN else weights.norm2
        carried = self.work.carried
        normalised = carried.normalised if half.own and half.target == Target.MLP else None
        known = dataclasses.replace(predictor, weights=predictor.weights.with_norm(norm))
        listed = carried.packed if half.packer is Packer.PREDICTOR else None
        runner = SitePredictor(
            known, half, selection, self.work, norm, normalised, listed
        )  # fmt: skip
        return TargetSelection(predictor, selection, half.products, runner)

    def _cache(self, layer: int) -> KvCache:
        """A layer that computes K/V of all its heads needs no inputs, or its own position of those that are shared."""
        shape, batch, device = self.shape, self.batch, self.device
        dtype, size = self.weights.embedding.dtype, (batch, shape.n_kv_heads, self.context)
        half = self.plan.half(layer, Target.HEADS)
        sparse = half.run is Run.SELECTED
        attn_in = self.work.carried.inputs
        if sparse or half.kernels is not Kernels.QKV_WITH_PREDICTOR:
            attn_in = torch.zeros(batch, self.context if sparse else 0, shape.d_model, dtype=dtype, device=device)
        if self._beside is None:
            k, v = (torch.zeros(*size, shape.head_dim, dtype=dtype, device=device) for _ in range(2))
        else:
            k, v = self._beside.caches[layer].k, self._beside.caches[layer].v
        return KvCache(
            k=k,
            v=v,
            attn_in=attn_in,
            watermark=self.watermark[layer] if sparse else None,
            positions=self.weights.placed,
        )

    def _late_site(self, layer: int, chosen: Mapping[UnitKey, TargetSelection]) -> LateSite:
        """Site that the MLP before a layer leaves for it."""
        heads, neurons, ahead = chosen.get(UnitKey(layer, Target.HEADS)), chosen[UnitKey(layer, Target.MLP)], None
        if heads is not None:
            ahead = HeadSite.of(heads.folded(), self.weights.layers[layer - 1].norm2, self.state.row_state)
        weights, position = self.weights.layers[layer], self.state.position
        return self.work.carried.late_site(weights, self.caches[layer], position, neurons.predictor, ahead)

    def _measured(self, number: int, layer: Layer) -> Layer:
        """The layer as a guard measures it: its halves with a predictor compute all units."""
        assert self.guard is not None
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, Attention) and attention.heads is not None:
            attention = GuardedAttention(attention, self.guard, number)
        if isinstance(mlp, Mlp) and mlp.neurons is not None:
            mlp = GuardedMlp(mlp, self.guard, number)
        return dataclasses.replace(layer, attention=attention, mlp=mlp)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Within it the engine's device is the current one: kernels launch there, graphs are captured there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def tail(self, mode: str, score: bool) -> None:
        """LM head and the choice of the next token, from x[-1]. A screened greedy step leaves `logits` as they are."""
        weights, state, pdl = self.weights, self.state, self.work.pdl
        with self.on_device():
            if self.screen is not None and mode == "greedy" and not score:
                self.ops.screened_head(self.x[-1], self.screen, state.position, state.least, state.stops, pdl=pdl)
                self.ops.advance(self.logits, state, mode, score, pdl=pdl, chosen=self.screen.best)
                return
            head = self.work.join.head(self.logits)
            self.ops.dense_rows(self.x[-1], weights.final_norm, weights.lm_head, None, "none", head, pdl=pdl)
            self.work.join.close_head(self.logits)
            if cap := self.shape.logit_cap:
                self.logits.div_(cap).tanh_().mul_(cap)
            self.ops.advance(self.logits, state, mode, score, pdl=pdl)

    def _normalise(self, x: Tensor, norm: LayerNormWeights | None) -> None:
        """x (B, d) becomes its norm, where there is one."""
        if norm is not None:
            self.ops.layer_norm(x, norm, x, pdl=self.work.pdl)

    def eager(self, mode: str, score: bool, measured: bool = False) -> None:
        """A step without a graph. `measured`: dense, measured by the guard, which then moves its thresholds.

        Norms in front of halves are prologues of the kernels that read them. Norms behind them are stages. Where a
        predictor runs, and which kernels a method queues, stands in the plan.
        """
        weights, guard = self.weights, self.guard if measured else None
        layers = self.layers if guard is None or self.measured is None else self.measured
        with self.on_device():
            self.ops.embed(self.state, weights.embedding, weights.positions, self.x[0], pdl=self.work.pdl)
            self._normalise(self.x[0], weights.embedding_norm)
            if self.one_kernel is not None:
                self.one_kernel(self.x[0], self.x[-1])
                self.tail(mode, score)
                return
            halves = zip(weights.layers, layers, self.x[::2], self.x[1::2], self.x[2::2], strict=False)
            for own, layer, x, between, out in halves:
                for predictor in layer.at_attention:
                    predictor.run(x)
                layer.attention.select(x)
                layer.attention.project_in(x)
                layer.attention.attend()
                layer.attention.project_out(x, between)
                self._normalise(between, own.behind[0])
                for predictor in layer.at_mlp:
                    predictor.run(between)
                layer.mlp.select(between)
                layer.mlp.multiply(between, out)
                self._normalise(out, own.behind[1])
            if guard is not None:
                guard.move(self.state.row_state == 1)
            self.tail(mode, score)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put back, also after an error, what a step changes and the next one reads.

        Caches only grow, at positions not yet valid.
        """
        s = self.state
        changed = [s.tokens, s.nll, s.position, s.done, s.row_state, s.fault, s.seen, self.watermark]
        changed += [] if self.guard is None else self.guard.tensors()
        saved = [(tensor, tensor.clone()) for tensor in changed]
        try:
            yield
        finally:
            for tensor, copy in saved:
                tensor.copy_(copy)

    def _capture(self, run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
        """Record ``run``: compile every kernel in a run whose effects are undone, then capture a graph."""
        with CAPTURING:
            return self._captured(run, pool)

    def _captured(self, run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
        # One stream for all: memory that one recording has given back is taken by the next on the same stream alone.
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), self.undone():
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        launch.share_carveout(self.plan.carveout)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of CUDA meanwhile is no part of this capture and does not break it.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done. Every N-th step is dense where a guard asks for that."""
        call = mode, score, self.guard is not None and self.guard.due()
        self.replay(call, partial(self.eager, *call))

    def replay(self, key: tuple[Any, ...], run: Callable[[], object], shared: bool = False) -> None:
        """``run`` once, from a graph of this key where steps are graphs. It is recorded the first time.

        Args:
            shared: its memory is that of other shared graphs. It leaves nothing there that is read later.
        """
        with self.on_device():
            if not self._graphed:
                run()
                return
            if key not in self._graphs:
                if shared and self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                self._graphs[key] = self._capture(run, self._pool if shared else None)
            self._graphs[key].replay()

    def reset(self) -> None:
        """Forget all rows. Captured graphs stay valid."""
        self.work.reset()
        self.watermark.zero_()
        if self.one_kernel is not None:
            self.one_kernel.reset()
