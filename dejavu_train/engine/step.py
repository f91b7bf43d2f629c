"""One decoding step of the engine: its state, its halves in order, and the CUDA graph that replays them.

The step is a loop: embed; then for each layer an attention half and an MLP half (`attention`, `mlp`), in
front of each of which the predictors that read its site run; then the LM head and the choice of the next token. Which
kernels a half launches stands in its `run`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Mapping
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
from dejavu_train.engine.dispatch import ExecutionMode
from dejavu_train.engine.guarded import GuardedAttention, GuardedMlp
from dejavu_train.engine.mlp import BatchMlp, CascadeMlp, DenseMlp, ListedMlp, MaskedMlp, Mlp, SparseMlp
from dejavu_train.engine.ops import operations
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.engine.workspace import SitePredictor, TargetSelection, Workspace
from kernels.attention import head_select
from kernels.common import launch
from kernels.common.kv_cache import KvCache
from kernels.common.late_norm import LateNorm
from kernels.dense.screened_head import ScreenedHead
from kernels.lookahead.mlp_ahead import HeadsAhead, LateSite
from kernels.mlp import select, sparse_fc2
from kernels.mlp.selection import Selection

Key = tuple[int, str]
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
    """State and kernels of a step for `batch` rows of up to `context` tokens; arguments as in `DecodeEngine`.

    fused: layers whose MLP's predictor runs in the grids of q/k/v and attention, see `dispatch.fused_layers`; late:
    those of them whose input the MLP before makes, see `dispatch.late_layers`; screen: greedy steps find their token
    through a screen of the LM head.

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
        predictors: Mapping[Key, TargetPredictor],
        modes: Mapping[Key, ExecutionMode],
        batch: int,
        context: int,
        kv_policy: str,
        device: torch.device,
        ops: str,
        graph: bool,
        pdl: bool,
        look_ahead: str,
        fused: Collection[int] = (),
        late: Collection[int] = (),
        guard: GuardState | None = None,
        screen: bool = False,
    ) -> None:
        self.guard = guard
        self.weights, self.shape, self.predictors = weights, weights.shape, predictors
        self.batch, self.context, self.kv_policy, self.device = batch, context, kv_policy, device
        self._fused, self._late = fused, late
        self._graphed = graph and ops == "triton" and device.type == "cuda"
        self._graphs: dict[tuple[str, bool, bool], torch.cuda.CUDAGraph] = {}
        shape, dtype = weights.shape, weights.embedding.dtype
        # Several rows with 4-bit weights fill every multiprocessor: a predictor beside them waits, and they for it.
        beside = look_ahead == "stream" or (look_ahead == "fused" and not (weights.packed and batch > 1))
        ahead = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self.work = Workspace.empty(
            shape, batch, context, dtype, device, operations(ops), pdl, kv_policy, ahead, weights.packed
        )  # fmt: skip
        self.state, self.ops = self.work.state, self.work.ops
        self.x = torch.zeros(2 * shape.n_layers + 1, batch, shape.d_model, device=device, dtype=torch.float32)
        self.logits = torch.zeros(batch, shape.vocab_size, device=device, dtype=torch.float32)
        self.screen: ScreenedHead | None = None
        if screen:
            assert isinstance(weights.lm_head, torch.Tensor)
            self.screen = ScreenedHead.of(weights.lm_head, weights.final_norm)
        self.watermark = torch.zeros(shape.n_layers, batch, shape.n_heads, dtype=torch.int32, device=device)
        chosen = {key: self._choose(key, key[1] == "mlp" and key[0] in fused) for key in predictors}
        self.selections = {key: each.selection for key, each in chosen.items()}
        masked = {key for key, each in modes.items() if not each.sparse}
        inputs = context if any((layer, "heads") not in predictors for layer in fused) else 0
        self.inputs = torch.zeros(batch, inputs, shape.d_model, dtype=dtype, device=device)
        self.caches = [
            self._cache(layer, (layer, "heads") in predictors and (layer, "heads") not in masked)
            for layer in range(shape.n_layers)
        ]
        sites = self._late_sites(chosen)
        self.halves: list[Half] = []
        for layer in range(shape.n_layers):
            heads, mlp = chosen.get((layer, "heads")), chosen.get((layer, "mlp"))
            attention = self._attention(
                layer, heads, mlp if layer in fused else None, (layer, "heads") in masked, sites.get(layer)
            )
            self.halves.append(Half(_reading(chosen, layer, "attn_in"), attention))
            body = self._mlp(layer, mlp, layer in fused, (layer, "mlp") in masked, sites.get(layer + 1))
            self.halves.append(Half(_reading(chosen, layer, "mlp_in"), body))
        self.measured = None if guard is None else [Half(half.sites, self._measured(half.body)) for half in self.halves]

    def _choose(self, key: Key, fused: bool) -> TargetSelection:
        """The selection of a (layer, target), and its predictor where that runs on its own."""
        predictor, device = self.predictors[key], self.device
        layer, target = key
        if predictor.own_folded is not None or (target == "heads" and layer in self._late):
            return TargetSelection(predictor, head_select.head_selection(self.shape.n_heads, device), None)
        block = sparse_fc2.packed_block(self.shape.d_model) if self.batch == 1 else BATCH_BLOCK
        selection = Selection.empty(self.shape.units(predictor.target), device, block)
        if fused:
            return TargetSelection(predictor, selection, None)
        weights = self.weights.layers[predictor.site_layer]
        norm = weights.norm1 if predictor.site == "attn_in" else weights.norm2
        own = (predictor.site, predictor.site_layer) == ("mlp_in" if target == "mlp" else "attn_in", layer)
        normalised = self.work.normalised if own and target == "mlp" else None
        known = dataclasses.replace(predictor, weights=predictor.weights.with_norm(norm))
        # Only between its own MLP and itself: every layer's list lies in the same place.
        lists = normalised is not None and weights.packed and select.lists(known.weights, self.batch, known.top_k)
        runner = SitePredictor(
            known, selection, self.work, norm, own, normalised, self.work.packed if lists else None
        )  # fmt: skip
        return TargetSelection(predictor, selection, runner)

    def _cache(self, layer: int, sparse: bool) -> KvCache:
        """A layer that computes K/V of all its heads needs no inputs, or its own position of those that are shared."""
        shape, batch, device = self.shape, self.batch, self.device
        dtype, size = self.weights.embedding.dtype, (batch, shape.n_heads, self.context)
        stale = sparse and self.kv_policy == "stale"
        attn_in = self.inputs
        if sparse or layer not in self._fused:
            attn_in = torch.zeros(batch, self.context if sparse else 0, shape.d_model, dtype=dtype, device=device)
        return KvCache(
            k=torch.zeros(*size, shape.head_dim, dtype=dtype, device=device),
            v=torch.zeros(*size, shape.head_dim, dtype=dtype, device=device),
            attn_in=attn_in,
            watermark=self.watermark[layer] if sparse else None,
            valid=torch.zeros(size, dtype=torch.uint8, device=device) if stale else None,
        )

    def _late_sites(self, chosen: Mapping[Key, TargetSelection]) -> dict[int, LateSite]:
        """What the MLP before each late layer leaves for it."""
        device, found = self.device, {}
        estimate, moments = torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        for layer in sorted(self._late):
            weights, cache, ahead = self.weights.layers[layer], self.caches[layer], None
            heads, mlp = chosen.get((layer, "heads")), chosen[layer, "mlp"].predictor
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
        self,
        layer: int,
        heads: TargetSelection | None,
        fused_mlp: TargetSelection | None,
        masked: bool,
        late: LateSite | None,
    ) -> Attention:
        weights, cache = self.weights.layers[layer], self.caches[layer]
        if heads is None and fused_mlp is not None:
            return FusedDenseAttention(weights, cache, self.work, fused_mlp, late)
        if heads is None:
            return DenseAttention(weights, cache, self.work)
        if masked:
            return MaskedAttention(weights, cache, self.work, heads)
        if fused_mlp is not None:
            return FusedAttention(weights, cache, self.work, heads, fused_mlp, late)
        return SparseAttention(weights, cache, self.work, heads)

    def _mlp(self, layer: int, mlp: TargetSelection | None, fused: bool, masked: bool, ahead: LateSite | None) -> Mlp:
        weights = self.weights.layers[layer]
        if mlp is None:
            return DenseMlp(weights, self.work)
        if self.batch > 1 and masked:
            return MaskedMlp(weights, self.work, mlp)
        if self.batch > 1:
            return (ListedMlp if weights.packed else BatchMlp)(weights, self.work, mlp)
        if weights.cascade is not None:
            return CascadeMlp(weights, self.work, mlp, fused)
        return SparseMlp(weights, self.work, mlp, fused, ahead)

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
        selected = {target for _, target in self.predictors}
        if self._fused:
            selected.add("heads")  # q/k/v by the kernel of selected heads, whether or not these are all
        launch.share_carveout(launch.carveout(selected, self.weights.packed))
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


def _reading(chosen: Mapping[Key, TargetSelection], layer: int, site: str) -> tuple[SitePredictor, ...]:
    """The predictors that run at this site, in the order of their targets."""
    runners = (each.runner for each in chosen.values() if each.runner is not None)
    return tuple(r for r in runners if (r.predictor.site_layer, r.predictor.site) == (layer, site))
