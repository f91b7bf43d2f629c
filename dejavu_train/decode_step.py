"""One decoding step of the engine: its static buffers, its kernels in order, and the CUDA graph that replays them.

A layer of a sparse step, one batch row: head_select (LayerNorm, head predictor) - qkv - flash_decode - project_heads -
predict_select (LayerNorm, predictor, list) - pack - listed_mlp (fc1, fc2); with a second test predict_select - pack -
cascade - packed_rows. With look-ahead by half a block: site_predict (LayerNorm, both predictors) - qkv_select -
attend_pack - project_heads - listed_mlp (or layer_norm - cascade - packed_rows). A dense one: qkv_dense - flash_decode
- project_heads - dense_rows - dense_wide. LayerNorms are prologues, biases and residuals epilogues.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dejavu_train.decode_ops import operations
from dejavu_train.decode_weights import DecodeWeights, LayerWeights, TargetPredictor
from kernels import (
    cascade,
    flash_decode,
    head_select,
    launch,
    listed_batch,
    packed_rows,
    sampling,
    scatter_gemv,
    select,
    site_predict,
)


def _with_norm(predictor: TargetPredictor, weights: DecodeWeights) -> TargetPredictor:
    """The predictor with what one row's kernel wants to know of the LayerNorm in front of it."""
    if predictor.folded is not None:
        return predictor
    layer = weights.layers[predictor.site_layer]
    norm = layer.norm1 if predictor.site == "attn_in" else layer.norm2
    return dataclasses.replace(predictor, weights=predictor.weights.with_norm(norm))


class DecodeStep:
    """Buffers and kernels of a step for `batch` rows of up to `context` tokens; arguments as in `DecodeEngine`."""

    def __init__(
        self,
        weights: DecodeWeights,
        predictors: dict[tuple[int, str], TargetPredictor],
        batch: int,
        context: int,
        kv_policy: str,
        device: torch.device,
        ops: str,
        graph: bool,
        pdl: bool,
        look_ahead: str,
    ) -> None:
        self.weights, self.shape = weights, weights.shape
        self.predictors = {key: _with_norm(predictor, weights) for key, predictor in predictors.items()}
        self.batch, self.context, self.kv_policy, self.device = batch, context, kv_policy, device
        for layer, old in enumerate(weights.layers):
            mlp = predictors.get((layer, "mlp"))
            weights.layers[layer] = old.with_fc2(transposed=mlp is not None).with_planes(mlp.grid if mlp else None)
        self.ops = operations(ops)
        self._pdl = pdl
        self._fused = {
            layer: self._stacked(layer)
            for layer in range(self.shape.n_layers)
            if look_ahead == "fused" and self._can_fuse(layer)
        }
        self._lookahead = torch.cuda.Stream(device) if look_ahead != "inline" and device.type == "cuda" else None
        self._graphed = graph and ops == "triton" and device.type == "cuda"
        self._graphs: dict[tuple[str, bool], torch.cuda.CUDAGraph] = {}
        self._pending: dict[tuple[int, str], torch.cuda.Event] = {}
        self._allocate(ops == "triton")

    def _can_fuse(self, layer: int) -> bool:
        """Whether the MLP's predictor can ride with q/k/v and attention: it then costs no stage of its own."""
        heads, mlp = self.predictors.get((layer, "heads")), self.predictors.get((layer, "mlp"))
        if self.batch > 1 or heads is None or mlp is None or heads.folded is None or mlp.top_k is not None:
            return False
        return (mlp.site, mlp.site_layer) == ("attn_in", layer)

    def _stacked(self, layer: int) -> site_predict.SiteRows:
        heads, mlp = self.predictors[layer, "heads"], self.predictors[layer, "mlp"]
        assert heads.folded is not None
        return site_predict.SiteRows.stack(heads.folded, mlp.weights, self.weights.layers[layer].norm1)

    def _allocate(self, triton_ops: bool) -> None:
        shape, batch, device = self.shape, self.batch, self.device
        h, hd, d = shape.n_heads, shape.head_dim, shape.d_model
        dtype = self.weights.embedding.dtype
        sparse_heads = [(layer, "heads") in self.predictors for layer in range(shape.n_layers)]

        def cache() -> Tensor:
            return torch.zeros(batch, h, self.context, hd, dtype=dtype, device=device)

        self.k = [cache() for _ in range(shape.n_layers)]
        self.v = [cache() for _ in range(shape.n_layers)]
        self.attn_in = [
            torch.zeros(batch, self.context if sparse else 0, d, dtype=dtype, device=device) for sparse in sparse_heads
        ]
        self.watermark = torch.zeros(shape.n_layers, batch, h, dtype=torch.int32, device=device)
        self.valid: list[Tensor | None] = [None] * shape.n_layers
        if self.kv_policy == "stale":
            size = (batch, h, self.context)
            self.valid = [torch.zeros(size, dtype=torch.uint8, device=device) if s else None for s in sparse_heads]
        self.state = sampling.TokenState.empty(batch, self.context, device)
        self.logits = torch.zeros(batch, shape.vocab_size, device=device)
        # One residual buffer per half-block: a look-ahead predictor may still read an older one.
        self.x = torch.zeros(2 * shape.n_layers + 1, batch, d, device=device)
        self.q = torch.zeros(batch, h, hd, device=device)
        self.heads_out = torch.zeros(batch, h * hd, device=device)
        self.attention = flash_decode.AttentionScratch.empty(batch, h, hd, self.context, device)
        self.scatter = scatter_gemv.ScatterScratch.empty(batch, d, device)
        self._normalised = torch.zeros(batch, d, dtype=dtype, device=device)
        self._hidden_dense = torch.zeros(batch, shape.d_ffn, device=device)
        # The references keep values of unselected neurons as zeros; one row's kernels a list of the selected.
        packed = triton_ops and batch == 1
        self._packed = packed_rows.PackedRows.empty(shape.d_ffn, device) if packed else None
        self._partials = packed_rows.partial_sums(d, device) if packed else None
        self._batched: listed_batch.BatchRows | None = None
        if triton_ops and batch > 1:
            self._batched = listed_batch.BatchRows.empty(shape.d_ffn, batch, d, dtype, device)
        self.selections: dict[tuple[int, str], select.Selection] = {}
        self._rank_scratch: dict[tuple[int, str], Tensor] = {}
        self._at_site: dict[tuple[int, str], list[TargetPredictor]] = {}
        self._out_bias = [layer.out_bias for layer in self.weights.layers]
        for (layer, _), predictor in self.predictors.items():
            if predictor.mean is not None:
                folded = self.weights.layers[layer].out.float() @ predictor.mean.flatten()
                self._out_bias[layer] = self.weights.layers[layer].out_bias.float() + folded
        block = packed_rows.listed_block(d) if batch == 1 else 64
        self._tested: Any = self._hidden_dense
        self._levels: cascade.InputLevels | None = None
        cascades = any(predictor.grid is not None for predictor in self.predictors.values())
        if triton_ops and batch > 1 and cascades:  # one row rounds its input in the kernel, into the packed list
            self._tested = cascade.cascade_rows(shape.d_ffn, d, batch, block, device)
            self._levels = cascade.InputLevels.empty(batch, d, device)
        for key, predictor in self.predictors.items():
            heads = predictor.target == "heads"
            self.selections[key] = (
                head_select.head_selection(h, device)
                if predictor.folded is not None
                else select.Selection.empty(h if heads else shape.d_ffn, device, block)
            )
            self._rank_scratch[key] = torch.zeros(batch, predictor.weights.down.shape[0], device=device)
            if predictor.folded is None and not (key[1] == "mlp" and key[0] in self._fused):
                self._at_site.setdefault((predictor.site_layer, predictor.site), []).append(predictor)

    def _predict(self, layer: int, site: str, x: Tensor, norm: Any) -> None:
        """Run every predictor that reads this site; look-ahead ones on the second stream, if there is one."""
        for predictor in self._at_site.get((layer, site), []):
            key = (predictor.layer, predictor.target)
            own = key == (layer, "mlp" if site == "mlp_in" else "heads")

            def run(pdl: bool, predictor: TargetPredictor = predictor, own: bool = own) -> None:
                self.ops.predict_select(
                    x,
                    predictor.weights,
                    predictor.threshold,
                    self.selections[predictor.layer, predictor.target],
                    ln=norm,
                    row_state=self.state.row_state,
                    top_k=predictor.top_k,
                    hidden=self._rank_scratch[predictor.layer, predictor.target],
                    normalised_out=self._normalised if own and site == "mlp_in" else None,
                    pdl=pdl,
                )

            if own or self._lookahead is None:
                run(self._pdl)
                continue
            self._lookahead.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._lookahead):
                run(False)
                self._pending[key] = self._lookahead.record_event()

    def _join(self, key: tuple[int, str]) -> None:
        event = self._pending.pop(key, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _attention_half(self, layer: int) -> None:
        ops, state, pdl = self.ops, self.state, self._pdl
        weights = self.weights.layers[layer]
        x = self.x[2 * layer]
        predictor = self.predictors.get((layer, "heads"))
        self._predict(layer, "attn_in", x, weights.norm1)
        caches = (self.q, self.k[layer], self.v[layer])
        if predictor is None:
            ops.qkv_dense(x, weights.norm1, weights.qkv, weights.qkv_bias, state.position, *caches, pdl=pdl)
            selection, watermark, valid = None, None, None
        else:
            selection, watermark, valid = (self.selections[layer, "heads"], self.watermark[layer], self.valid[layer])
            self._join((layer, "heads"))
            site = (
                predictor.bias, predictor.threshold, state.position, state.row_state, self.attn_in[layer], selection,
            )  # fmt: skip
            rows = (
                self.attn_in[layer], weights.qkv, weights.qkv_bias, selection, state.position, watermark, valid,
                *caches,
            )  # fmt: skip
            if layer in self._fused:
                mlp, hidden = self.predictors[layer, "mlp"], self._rank_scratch[layer, "mlp"]
                chosen = (mlp.threshold, state.row_state, self.selections[layer, "mlp"])
                ops.site_predict(x, weights.norm1, self._fused[layer], *site, hidden, pdl=pdl)
                ops.qkv_select(*rows, mlp.weights, hidden, *chosen, policy=self.kv_policy, pdl=pdl)
            else:
                ops.head_select(x, weights.norm1, predictor.folded, *site, pdl=pdl)
                ops.qkv(*rows, policy=self.kv_policy, pdl=pdl)
        attention = (*caches, selection, state.position, watermark, valid, self.heads_out, self.attention)
        mean = None if predictor is None else predictor.mean
        if layer in self._fused and self._packed is not None:
            ops.attend_pack(*attention, self.selections[layer, "mlp"], self._packed, pdl=pdl, mean=mean)
        else:
            ops.flash_decode(*attention, pdl=pdl, mean=mean)
        middle = self.x[2 * layer + 1]
        ops.project_heads(self.heads_out, weights.out, self._out_bias[layer], x, selection, middle, pdl=pdl)

    def _mlp_half(self, layer: int) -> None:
        ops, pdl = self.ops, self._pdl
        weights = self.weights.layers[layer]
        x, out = self.x[2 * layer + 1], self.x[2 * layer + 2]
        predictor = self.predictors.get((layer, "mlp"))
        self._predict(layer, "mlp_in", x, weights.norm2)
        if predictor is None:
            self._dense_mlp(weights, x, out)
            return
        self._join((layer, "mlp"))
        own = (predictor.site, predictor.site_layer) == ("mlp_in", layer)
        source, norm = (self._normalised, None) if own else (x, weights.norm2)
        chosen, fused, plain = self.selections[layer, "mlp"], layer in self._fused, weights.cascade is None
        if self._packed is not None and not fused:
            ops.pack(chosen, self._packed, pdl=pdl)
        if not own and (weights.cascade is not None or self._batched is not None):
            ops.layer_norm(x, weights.norm2, self._normalised, pdl=pdl)
        if plain and self._packed is not None:
            # What was written before the launch before this one is read before it waits: x, as the predictor normalised
            # it, or the list of a predictor that rode with attention.
            ops.listed_mlp(
                source, norm, weights.fc1, weights.fc1_bias, weights.fc2, weights.fc2_bias, x, self._packed, out,
                self._partials, "x" if own else "list" if fused else None, pdl,
            )  # fmt: skip
            return
        if plain and self._batched is not None:
            ops.listed_batch(self._normalised, weights.fc1, weights.fc1_bias, chosen, self._batched, pdl=pdl)
            ops.packed_batch(self._batched, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)
            return
        hidden = self._hidden_dense if plain else self._tested
        if plain:
            ops.gather_gemv(source, weights.fc1, weights.fc1_bias, chosen, "relu", hidden, ln=norm, pdl=pdl)
        else:
            ops.cascade(
                self._normalised, weights.cascade, chosen, self._packed or hidden, row_state=self.state.row_state,
                pdl=pdl, scratch=self._levels,
            )  # fmt: skip
        if self._packed is not None:
            ops.packed_rows(self._packed, weights.fc2, weights.fc2_bias, x, out, partials=self._partials, pdl=pdl)
        else:
            ops.scatter_gemv(hidden, weights.fc2, weights.fc2_bias, x, None, out, scratch=self.scatter, pdl=pdl)

    def _dense_mlp(self, weights: LayerWeights, x: Tensor, out: Tensor) -> None:
        ops, pdl = self.ops, self._pdl
        if self.batch > 1 and ops.dense_hidden is not None:
            hidden = ops.dense_hidden(x, weights.norm2, weights.fc1, weights.fc1_bias, "relu", pdl=pdl)
            ops.dense_add(hidden, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)
            return
        ops.dense_rows(x, weights.norm2, weights.fc1, weights.fc1_bias, "relu", self._hidden_dense, pdl=pdl)
        ops.dense_wide(self._hidden_dense, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)

    def tail(self, mode: str, score: bool) -> None:
        head = self.weights.lm_head
        self.ops.dense_rows(self.x[-1], self.weights.final_norm, head, None, "none", self.logits, pdl=self._pdl)
        self.ops.advance(self.logits, self.state, mode, score, pdl=self._pdl)

    def eager(self, mode: str, score: bool) -> None:
        self.ops.embed(self.state, self.weights.embedding, self.weights.positions, self.x[0], pdl=self._pdl)
        for layer in range(self.shape.n_layers):
            self._attention_half(layer)
            self._mlp_half(layer)
        self.tail(mode, score)

    def _capture(self, mode: str, score: bool) -> torch.cuda.CUDAGraph:
        """Compile every kernel in a step whose effects are undone, then record one."""
        saved = [(tensor, tensor.clone()) for tensor in self._mutable()]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.eager(mode, score)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        for tensor, copy in saved:
            tensor.copy_(copy)
        launch.share_carveout(launch.SPARSE_CARVEOUT if self.predictors else launch.DRIVERS_CARVEOUT)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager(mode, score)
        return graph

    def _mutable(self) -> list[Tensor]:
        """State that a step changes and that the next one reads (caches grow in place, at positions not yet valid)."""
        s = self.state
        return [s.tokens, s.nll, s.position, s.done, s.row_state, self.watermark]

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        if not self._graphed:
            self.eager(mode, score)
            return
        if (mode, score) not in self._graphs:
            self._graphs[mode, score] = self._capture(mode, score)
        self._graphs[mode, score].replay()

    def reset(self) -> None:
        """Forget all rows. Captured graphs stay valid."""
        empty = sampling.TokenState.empty(self.batch, self.context, self.device)
        for name, tensor in vars(empty).items():
            getattr(self.state, name).copy_(tensor)
        self.watermark.zero_()
        self.attention.tickets.zero_()
        self.scatter.tickets.zero_()
        if self._batched is not None:
            self._batched.tickets.zero_()
        for valid in self.valid:
            if valid is not None:
                valid.zero_()
