"""The decode engine: reads an OPT and a bundle, writes tokens; a whole step, sampling included, is one CUDA graph.

Dense and sparse come from the same code: a layer without a predictor runs densely. All state (tokens, positions, watermarks,
counts, seeds, what is forced and what is sampled) lives in device tensors, so one captured step serves prompts,
generation and scoring of any length, and a reset only writes tensors. Rows of a batch have their own lengths.
Two sets of operations have the same signatures: the Triton kernels, and their plain-torch references (any device).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dejavu_train import decode_reference
from dejavu_train.decode_weights import DecodeWeights, TargetPredictor, load_predictors
from dejavu_train.errors import UserError
from dejavu_train.prefill import prefill
from kernels import (
    batched,
    dense_gemv,
    dense_wide,
    flash_decode,
    gather_gemv,
    head_select,
    launch,
    listed_gemv,
    lookahead,
    out_projection,
    packed_rows,
    qkv,
    sampling,
    scatter_gemv,
    select,
    select_gather,
)
from kernels.attention_common import HEAD_DIMS, INTERPRET

POLICIES = tuple(qkv.POLICIES)
MAX_BATCH = 32
CHUNK = 16  # steps between looks at the rows that are done, when nobody listens

Callback = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen. temperature 0 = greedy; top_p < 1 = from the smallest set that reaches top_p."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be a number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie above 0 and at most at 1, got {self.top_p}")

    @property
    def mode(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return "top_p" if self.top_p < 1 else "temperature"


class DecodeEngine:
    """Decodes up to `batch` rows of up to `context` tokens.

    Args:
        model: a Hugging Face OPTForCausalLM, or `DecodeWeights`, whose fc2 is then laid out for this engine.
        bundle: a `Bundle`, or loaded predictors by (layer, target); None = dense.
        batch: rows, at most 32. Fewer prompts may be given; the graph always runs all rows.
        context: tokens a row can hold, prompt included; None = the model's limit.
        kv_policy: what happens to K/V of skipped heads: backfill (exact), always, stale.
        dtype: of weights and caches; the residual stream and all sums are fp32. None = the model's.
        ops: "triton", or "reference" for plain torch on any device.
        graph: capture the step in a CUDA graph (Triton on a GPU only).
        pdl: launch kernels as programmatic dependents of each other.
        look_ahead: where predictors of earlier sites run: "fused" = in the grids of the attention's first two kernels
            (one batch row, MLP predictors that read attn_in of their layer; the others inline), "inline" = as kernels of
            their own, "stream" = on a second stream inside the graph.
        one_kernel: select and fc1 in one kernel (one batch row, predictors that read mlp_in of their layer).
        pack_rows: fc2 of one batch row from a packed list, every column with one owner; else stripes that share columns.
        release: give up the Hugging Face model's own tensors while copying.
    Raises:
        UserError: no GPU, a size that does not fit, a head dim without kernels, an uncalibrated bundle.
    """

    def __init__(
        self,
        model: Any,
        bundle: Any = None,
        *,
        batch: int = 1,
        context: int | None = None,
        kv_policy: str = "backfill",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ops: str = "triton",
        graph: bool = True,
        pdl: bool = True,
        look_ahead: str = "fused",
        one_kernel: bool = False,
        pack_rows: bool = True,
        release: bool = False,
    ) -> None:
        given = isinstance(model, DecodeWeights)
        device = torch.device(device if device is not None else model.embedding.device if given else model.device)
        if ops == "triton" and device.type != "cuda" and not INTERPRET:
            raise UserError(
                "the triton backend needs a CUDA device and found none; use backend gather, or set TRITON_INTERPRET=1"
                " before starting Python (slow, for tests)"
            )
        if ops not in ("triton", "reference"):
            raise UserError(f"ops must be triton or reference, got {ops}")
        if kv_policy not in POLICIES:
            raise UserError(f"kv_policy must be one of {', '.join(POLICIES)}, got {kv_policy}")
        if not 1 <= batch <= MAX_BATCH:
            raise UserError(f"the engine decodes 1 to {MAX_BATCH} rows at once, got a batch of {batch}")
        if look_ahead not in ("fused", "inline", "stream"):
            raise UserError(f"look_ahead must be fused, inline or stream, got {look_ahead}")
        self.weights = model if given else DecodeWeights.from_model(model, dtype or model.dtype, device, release)
        self.shape = self.weights.shape
        limit = self.shape.max_positions
        if context is not None and not 2 <= context <= limit:
            raise UserError(f"a context of {context} tokens does not fit: this model has positions for 2 to {limit}")
        if ops == "triton" and self.shape.head_dim not in HEAD_DIMS:
            raise UserError(
                f"head dim {self.shape.head_dim} has no kernels (there are {', '.join(map(str, HEAD_DIMS))});"
                " use backend gather"
            )
        self.batch, self.context, self.kv_policy, self.device = batch, context or limit, kv_policy, device
        self.predictors = self._predictors(bundle)
        for layer, weights in enumerate(self.weights.layers):
            self.weights.layers[layer] = weights.with_fc2(transposed=(layer, "mlp") in self.predictors)
        self._ops = _operations(ops)
        self._pdl = pdl
        self._pack_rows = pack_rows
        self._one_kernel = one_kernel and ops == "triton" and self._can_select_and_gather()
        self._fused = {layer for layer in range(self.shape.n_layers) if look_ahead == "fused" and self._can_fuse(layer)}
        self._lookahead = torch.cuda.Stream(device) if look_ahead == "stream" and device.type == "cuda" else None
        self._graphed = graph and ops == "triton" and device.type == "cuda"
        self._graphs: dict[tuple[str, bool], torch.cuda.CUDAGraph] = {}
        self._pending: dict[tuple[int, str], torch.cuda.Event] = {}
        self._allocate(ops == "triton")

    def _predictors(self, bundle: Any) -> dict[tuple[int, str], TargetPredictor]:
        if bundle is None or isinstance(bundle, dict):
            return bundle or {}
        if getattr(bundle, "shape", self.shape) != self.shape:
            raise UserError(f"the bundle belongs to another shape, {bundle.shape}, the model has {self.shape}")
        return load_predictors(bundle, self.shape, self.weights.embedding.dtype, self.device)

    def _can_select_and_gather(self) -> bool:
        """Whether every MLP predictor reads its own site, thresholds, and serves one row."""
        found = [predictor for (_, target), predictor in self.predictors.items() if target == "mlp"]
        own = all((p.site, p.site_layer) == ("mlp_in", p.layer) and p.top_k is None for p in found)
        return self.batch == 1 and bool(found) and own

    def _can_fuse(self, layer: int) -> bool:
        """Whether the MLP's predictor can ride with the attention's kernels."""
        heads, mlp = self.predictors.get((layer, "heads")), self.predictors.get((layer, "mlp"))
        if self.batch > 1 or heads is None or mlp is None or heads.folded is None or mlp.top_k is not None:
            return False
        return (mlp.site, mlp.site_layer) == ("attn_in", layer) and mlp.weights.down_scale is None

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
        self._x = torch.zeros(2 * shape.n_layers + 1, batch, d, device=device)
        self._q = torch.zeros(batch, h, hd, device=device)
        self._order = torch.zeros(h + 1, dtype=torch.int32, device=device)
        self._heads_out = torch.zeros(batch, h * hd, device=device)
        self._attention = flash_decode.AttentionScratch.empty(batch, h, hd, self.context, device)
        self._scatter = scatter_gemv.ScatterScratch.empty(batch, d, device)
        self._normalised = torch.zeros(batch, d, dtype=dtype, device=device)
        self._hidden_dense = torch.zeros(batch, shape.d_ffn, device=device)
        # The references keep values of unselected neurons as zeros; the kernels a list of those that are not zero.
        self._live: Any = self._hidden_dense
        packed = triton_ops and batch == 1 and self._pack_rows
        self._packed = packed_rows.PackedRows.empty(shape.d_ffn, device) if packed else None
        if triton_ops and self._one_kernel:
            self._live = select_gather.select_gather_rows(shape.d_ffn, d, device)
        elif triton_ops and batch == 1:
            self._live = listed_gemv.listed_rows(shape.d_ffn, d, device)
        elif triton_ops:
            programs = launch.gather_settings(d, batch, False, shape.d_ffn).programs
            self._live = gather_gemv.LiveRows.empty(shape.d_ffn, batch, device, programs=programs)
        self.selections: dict[tuple[int, str], select.Selection] = {}
        self._rank_scratch: dict[tuple[int, str], Tensor] = {}
        self._at_site: dict[tuple[int, str], list[TargetPredictor]] = {}
        self._out_bias = [layer.out_bias for layer in self.weights.layers]
        for (layer, _), predictor in self.predictors.items():
            if predictor.mean is not None:
                folded = self.weights.layers[layer].out.float() @ predictor.mean.flatten()
                self._out_bias[layer] = self.weights.layers[layer].out_bias.float() + folded
        block = listed_gemv.listed_block(d) if batch == 1 else 64
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

    # ---------------------------------------------------------------- one step

    def _predict(self, layer: int, site: str, x: Tensor, norm: Any) -> None:
        """Run every predictor that reads this site; look-ahead ones on the second stream, if there is one."""
        for predictor in self._at_site.get((layer, site), []):
            key = (predictor.layer, predictor.target)
            own = key == (layer, "mlp" if site == "mlp_in" else "heads")

            def run(pdl: bool, predictor: TargetPredictor = predictor, own: bool = own) -> None:
                self._ops.predict_select(
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
        ops, state, pdl = self._ops, self.state, self._pdl
        weights = self.weights.layers[layer]
        x = self._x[2 * layer]
        predictor = self.predictors.get((layer, "heads"))
        self._predict(layer, "attn_in", x, weights.norm1)
        caches = (self._q, self.k[layer], self.v[layer])
        if predictor is None:
            ops.qkv_dense(x, weights.norm1, weights.qkv, weights.qkv_bias, state.position, *caches, pdl=pdl)
            selection, watermark, valid = None, None, None
        else:
            selection, watermark, valid = (self.selections[layer, "heads"], self.watermark[layer], self.valid[layer])
            self._join((layer, "heads"))
            site = (
                x, weights.norm1, predictor.folded, predictor.bias, predictor.threshold, state.position,
                state.row_state, self.attn_in[layer], selection,
            )  # fmt: skip
            rows = (
                self.attn_in[layer], weights.qkv, weights.qkv_bias, selection, state.position, watermark, valid, *caches,
                self._order,
            )  # fmt: skip
            if layer in self._fused:
                mlp, hidden = self.predictors[layer, "mlp"], self._rank_scratch[layer, "mlp"]
                ops.site_predict(*site, mlp.weights, hidden, pdl=pdl)
                ops.qkv_select(
                    *rows, mlp.weights, hidden, mlp.threshold, state.row_state, self.selections[layer, "mlp"],
                    policy=self.kv_policy, pdl=pdl,
                )  # fmt: skip
            else:
                ops.head_select(*site, pdl=pdl)
                ops.qkv(*rows, policy=self.kv_policy, pdl=pdl)
        ops.flash_decode(
            *caches, selection, state.position, watermark, valid, self._heads_out, self._attention, pdl=pdl,
            mean=None if predictor is None else predictor.mean,
        )  # fmt: skip
        middle = self._x[2 * layer + 1]
        ops.project_heads(
            self._heads_out, weights.out, self._out_bias[layer], x, selection, self._order, middle, pdl=pdl
        )

    def _mlp_half(self, layer: int) -> None:
        ops, pdl = self._ops, self._pdl
        weights = self.weights.layers[layer]
        x, out = self._x[2 * layer + 1], self._x[2 * layer + 2]
        predictor = self.predictors.get((layer, "mlp"))
        if not self._one_kernel:
            self._predict(layer, "mlp_in", x, weights.norm2)
        if predictor is None:
            hidden: Any = self._hidden_dense
            if self.batch > 1 and ops.dense_hidden is not None:
                hidden = ops.dense_hidden(x, weights.norm2, weights.fc1, weights.fc1_bias, "relu", pdl=pdl)
                ops.dense_add(hidden, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)
                return
            ops.dense_rows(x, weights.norm2, weights.fc1, weights.fc1_bias, "relu", hidden, pdl=pdl)
            ops.dense_wide(hidden, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)
            return
        if self._one_kernel:
            hidden, low = self._live, self._rank_scratch[layer, "mlp"]
            ops.gather_gemv(
                x, predictor.weights.down, None, None, "relu" if predictor.weights.relu else "none", low,
                ln=weights.norm2, normalised_out=self._normalised, pdl=pdl,
            )  # fmt: skip
            ops.select_gather(
                low, predictor.weights, predictor.threshold, self._normalised, weights.fc1, weights.fc1_bias, hidden,
                row_state=self.state.row_state, pdl=pdl,
            )  # fmt: skip
        else:
            self._join((layer, "mlp"))
            hidden = self._live
            own = (predictor.site, predictor.site_layer) == ("mlp_in", layer)
            source, norm = (self._normalised, None) if own else (x, weights.norm2)
            chosen = self.selections[layer, "mlp"]
            if self.batch == 1:
                # A list made half a block ago is older than the launch before: its first rows may be read early.
                early = not own and self._lookahead is None
                ops.listed_gemv(
                    source, norm, weights.fc1, weights.fc1_bias, chosen, hidden, early=early, pdl=pdl
                )  # fmt: skip
            else:
                ops.gather_gemv(source, weights.fc1, weights.fc1_bias, chosen, "relu", hidden, ln=norm, pdl=pdl)
        if self._packed is None:
            ops.scatter_gemv(hidden, weights.fc2, weights.fc2_bias, x, None, out, scratch=self._scatter, pdl=pdl)
            return
        ops.pack(hidden, self._packed, pdl=pdl)
        ops.packed_rows(self._packed, weights.fc2, weights.fc2_bias, x, out, pdl=pdl)

    def _tail(self, mode: str, score: bool) -> None:
        head = self.weights.lm_head
        self._ops.dense_rows(self._x[-1], self.weights.final_norm, head, None, "none", self.logits, pdl=self._pdl)
        self._ops.advance(self.logits, self.state, mode, score, pdl=self._pdl)

    def _step_eager(self, mode: str, score: bool) -> None:
        self._ops.embed(self.state, self.weights.embedding, self.weights.positions, self._x[0], pdl=self._pdl)
        for layer in range(self.shape.n_layers):
            self._attention_half(layer)
            self._mlp_half(layer)
        self._tail(mode, score)

    def _capture(self, mode: str, score: bool) -> torch.cuda.CUDAGraph:
        """Compile every kernel in a step whose effects are undone, then record one."""
        saved = [(tensor, tensor.clone()) for tensor in self._mutable()]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step_eager(mode, score)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        for tensor, copy in saved:
            tensor.copy_(copy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step_eager(mode, score)
        return graph

    def _mutable(self) -> list[Tensor]:
        """State that a step changes and that the next one reads (caches grow in place, at positions not yet valid)."""
        s = self.state
        return [s.tokens, s.nll, s.position, s.done, s.row_state, self.watermark]

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        if not self._graphed:
            self._step_eager(mode, score)
            return
        if (mode, score) not in self._graphs:
            self._graphs[mode, score] = self._capture(mode, score)
        self._graphs[mode, score].replay()

    # ---------------------------------------------------------------- prompts, generation, scoring

    def reset(self) -> None:
        """Forget all rows. Captured graphs stay valid."""
        empty = sampling.TokenState.empty(self.batch, self.context, self.device)
        for name, tensor in vars(empty).items():
            getattr(self.state, name).copy_(tensor)
        self.watermark.zero_()
        self._attention.tickets.zero_()
        self._scatter.tickets.zero_()
        for valid in self.valid:
            if valid is not None:
                valid.zero_()

    def _begin(
        self,
        rows: Sequence[Sequence[int]],
        total: Sequence[int],
        sparse_from: Sequence[int],
        prefilled: Sequence[int],
        sampler: Sampling,
    ) -> None:
        """Write the known tokens, run `prefilled` tokens of each row densely at once, and stand before the first step."""
        if not rows or len(rows) > self.batch:
            raise UserError(f"this engine holds {self.batch} rows, got {len(rows)}; build it with batch={len(rows)}")
        for row, length in zip(rows, total, strict=True):
            if not row:
                raise UserError("an empty prompt cannot be continued; give at least the start token </s> (id 2)")
            if length > self.context:
                raise UserError(
                    f"{length} tokens do not fit the engine's context of {self.context}"
                    f" (the model's limit is {self.shape.max_positions}); shorten the prompt or max_new_tokens"
                )
            if not 0 <= min(row) <= max(row) < self.shape.vocab_size:
                raise UserError(f"token ids must lie in 0 to {self.shape.vocab_size - 1}, got {min(row)} to {max(row)}")
        self.reset()
        state, n = self.state, len(rows)
        known = torch.zeros(n, max(map(len, rows)), dtype=torch.int32)
        for b, row in enumerate(rows):
            known[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        state.tokens[:n, : known.shape[1]] = known.to(self.device)

        def put(tensor: Tensor, values: Sequence[float]) -> None:
            tensor[:n] = torch.tensor(values, dtype=tensor.dtype).to(self.device)

        put(state.known, [len(row) for row in rows])
        put(state.limit, total)
        put(state.sparse_from, sparse_from)
        put(state.done, [0] * n)
        put(state.position, [count - 1 for count in prefilled])
        put(state.temperature, [sampler.temperature or 1.0] * n)
        put(state.top_p, [sampler.top_p] * n)
        put(state.seed, [sampler.seed * MAX_BATCH + b for b in range(n)])
        if max(prefilled) > 0:
            self._x[-1, :n] = prefill(self.weights, state.tokens[:n], prefilled, self.k, self.v)
            put(self.watermark.movedim(1, 0), torch.tensor(prefilled)[:, None, None].tolist())
            for valid in self.valid:
                for b in range(n if valid is not None else 0):
                    valid[b, :, : prefilled[b]] = 1  # type: ignore[index]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (2,),
        sparse_from: int | Sequence[int] | None = None,
        prompt_phase: str = "dense",
        callback: Callback | None = None,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) until a stop token or the limit; returns the new tokens.

        Args:
            max_new_tokens: at most this many per row; prompt and new tokens must fit the context.
            sampling: None = greedy.
            stop_tokens: at most 8 ids; the stop token is the row's last new token.
            sparse_from: first sparse position of each row; None = after the prompt, as in the paper; 0 = everywhere.
            prompt_phase: "dense" = what lies before `sparse_from` at once; "steps" = token by token.
            callback: called as (row, token) for each new token as soon as it exists.
        Raises:
            UserError: see the messages; nothing is decoded then.
        """
        sampler = sampling or Sampling()
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if len(stop_tokens) > len(self.state.stops):
            raise UserError(f"at most {len(self.state.stops)} stop tokens are supported, got {len(stop_tokens)}")
        if prompt_phase not in ("dense", "steps"):
            raise UserError(f"prompt_phase must be dense or steps, got {prompt_phase}")
        lengths = [len(prompt) for prompt in prompts]
        starts = _per_row(sparse_from, lengths)
        at_once = [min(s, n) if self.predictors else n for s, n in zip(starts, lengths, strict=True)]
        if prompt_phase == "steps":
            at_once = [0] * len(lengths)
        self._begin(prompts, [length + max_new_tokens for length in lengths], starts, at_once, sampler)
        for i, token in enumerate(stop_tokens):
            self.state.stops[i] = token
        self._tail(sampler.mode, score=False)
        n, shown = len(prompts), list(lengths)
        n_steps = max(n + max_new_tokens - 1 - m for n, m in zip(lengths, at_once, strict=True))
        for i in range(n_steps + 1):
            if callback is not None or i % CHUNK == 0:
                done = bool(self.state.done[:n].all())
                if callback is not None:
                    self._tell(callback, shown)
                if done:
                    break
            if i < n_steps:
                self.step(sampler.mode)
        position = self.state.position[:n].tolist()
        return [self.state.tokens[b, lengths[b] : position[b] + 1].tolist() for b in range(n)]

    def _tell(self, callback: Callback, shown: list[int]) -> None:
        position = self.state.position[: len(shown)].tolist()
        for b, first in enumerate(shown):
            for token in self.state.tokens[b, first : position[b] + 1].tolist():
                callback(b, token)
            shown[b] = max(first, position[b] + 1)

    def score(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> list[Tensor]:
        """Teacher forcing, every token through the decoding step: -log p of all tokens of a row but its first.

        Args:
            rows: token ids, each of 2 to `context` tokens; any number of rows, taken `batch` at a time.
            sparse_from: first sparse position; earlier ones select everything.
        Returns:
            One fp32 tensor (n - 1,) per row, on the CPU.
        """
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) < 2:
            raise UserError("scoring needs rows of at least 2 tokens: the first is given, the others are scored")
        starts = _per_row(sparse_from, lengths)
        result: list[Tensor] = []
        for first in range(0, len(rows), self.batch):
            part = slice(first, first + self.batch)
            n = lengths[part]
            self._begin(rows[part], n, starts[part], [0] * len(n), Sampling())
            self._tail("greedy", score=True)
            for _ in range(max(n) - 1):
                self.step("greedy", score=True)
            nll = self.state.nll.cpu()
            result += [nll[b, 1:length].clone() for b, length in enumerate(n)]
        return result

    def perplexity(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> dict[str, float]:
        """exp of the mean of `score` over all rows; {"perplexity", "nats", "tokens"}."""
        nll = torch.cat(self.score(rows, sparse_from)).double()
        return {"perplexity": math.exp(nll.mean().item()), "nats": nll.sum().item(), "tokens": float(nll.numel())}


def _per_row(sparse_from: int | Sequence[int] | None, lengths: Sequence[int]) -> list[int]:
    if sparse_from is None:
        return list(lengths)
    starts = [sparse_from] * len(lengths) if isinstance(sparse_from, int) else list(sparse_from)
    if len(starts) != len(lengths) or any(start < 0 for start in starts):
        raise UserError(f"sparse_from must be at least 0, one for all rows or one each, got {sparse_from}")
    return starts


def _operations(kind: str) -> SimpleNamespace:
    """The step's operations: Triton kernels, or the same in plain torch."""
    if kind == "triton":
        return SimpleNamespace(
            embed=sampling.embed,
            head_select=head_select.head_select,
            qkv=qkv.qkv,
            site_predict=lookahead.site_predict,
            qkv_select=lookahead.qkv_select,
            qkv_dense=qkv.qkv_dense,
            flash_decode=flash_decode.flash_decode,
            predict_select=select.predict_select,
            gather_gemv=gather_gemv.gather_gemv,
            listed_gemv=listed_gemv.listed_gemv,
            project_heads=out_projection.project_heads,
            select_gather=select_gather.select_gather,
            scatter_gemv=scatter_gemv.scatter_gemv,
            pack=packed_rows.pack,
            packed_rows=packed_rows.packed_rows,
            dense_rows=dense_gemv.dense_rows,
            dense_hidden=batched.dense_hidden,
            dense_add=batched.dense_add,
            dense_wide=dense_wide.dense_wide,
            advance=sampling.advance,
        )
    return SimpleNamespace(
        embed=sampling.embed_reference,
        head_select=head_select.head_select_reference,
        qkv=qkv.qkv_reference,
        site_predict=lookahead.site_predict_reference,
        qkv_select=lookahead.qkv_select_reference,
        qkv_dense=qkv.qkv_dense_reference,
        flash_decode=flash_decode.flash_decode_reference,
        dense_rows=dense_gemv.dense_rows_reference,
        dense_hidden=None,
        dense_wide=dense_wide.dense_wide_reference,
        advance=sampling.advance_reference,
        predict_select=decode_reference.predict_select,
        gather_gemv=decode_reference.gather_gemv,
        listed_gemv=listed_gemv.listed_gemv_reference,
        project_heads=out_projection.project_heads_reference,
        scatter_gemv=decode_reference.scatter_gemv,
    )
