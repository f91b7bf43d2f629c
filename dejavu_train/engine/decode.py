"""The decode engine: reads an OPT and a bundle, writes tokens; a whole step, sampling included, is one CUDA graph.

Dense and sparse come from the same code: a layer without a predictor runs densely. All state (tokens, positions,
watermarks, counts, seeds, what is forced and what is sampled) lives in device tensors, so one captured step serves
prompts, generation and scoring of any length, and a reset only writes tensors. Rows of a batch have their own lengths.
Two sets of operations have the same signatures: the Triton kernels, and their plain-torch references (any device).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine.dispatch import choose_execution, describe_execution, fused_layers, late_layers
from dejavu_train.engine.inputs import MAX_BATCH, Sampling, check_rows, per_row
from dejavu_train.engine.memory import (
    cache_bytes,
    check_room,
    describe_memory,
    fits,
    held_bytes,
    late_bytes,
    scratch_bytes,
    weight_bytes,
)
from dejavu_train.engine.predictors import TargetPredictor, load_predictors, read_as_codes
from dejavu_train.engine.prefill import prefill
from dejavu_train.engine.session import Session
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.turns import in_turn
from dejavu_train.engine.weights import DecodeWeights, check_four_bits, engine_dtype
from dejavu_train.errors import UserError
from dejavu_train.families import dims_of
from kernels.attention import qkv
from kernels.common.checks import FLOAT_TYPES, HEAD_DIMS, runs_on
from kernels.dense.screened_head import SCREENED_WIDTHS, screen_bytes
from kernels.formats.int4 import Int4Rows
from kernels.formats.linear import Matrix

POLICIES = tuple(qkv.POLICIES)
MAX_PACKED_ROWS = 8  # of `qkv` with 4-bit weights
SPARE = 2**31  # bytes that stay free beside a screen of the LM head
CHUNK = 16  # steps between looks at the rows, when nobody listens


class DecodeEngine(Session):
    """Decodes up to `batch` rows of up to `context` tokens.

    Args:
        model: a Hugging Face OPTForCausalLM, which is copied, or `DecodeWeights`, of which this engine shares what
            already has its layout.
        bundle: a `Bundle`, or loaded predictors by (layer, target); None = dense.
        batch: rows, at most 32. Fewer prompts may be given; the graph always runs all rows.
        context: tokens a row can hold, prompt included; None = the model's limit.
        kv_policy: what happens to K/V of skipped heads: backfill (exact), always, stale.
        dtype: of weights and caches; the residual stream and all sums are fp32. None = the model's, or float16 for
            4-bit weights with Triton.
        ops: "triton", or "reference" for plain torch on any device.
        graph: capture the step in a CUDA graph (Triton on a GPU only).
        pdl: launch kernels as programmatic dependents of each other.
        look_ahead: where predictors of earlier sites run: "fused" = in the grids of q/k/v and attention (one batch row,
            MLP predictors that read attn_in of their layer; where all heads are kept, 4-bit weights only) and, with
            4-bit weights and int4 predictors, of the MLP before (heads that read its input), the others as with
            "stream" = on a second stream inside the graph, or, several rows with 4-bit weights, as with "inline" = as
            kernels between the others.
        crossover: compute a layer whole and mask it where, at this width and batch, that was measured to be faster; see
            `describe`. What is selected stays the same. Only on a GPU, where it was measured. False = read the selected
            units only, everywhere; with 4-bit weights the MLPs of up to eight rows always do, those of more never.
        release: take the layers out of the given `DecodeWeights`, which is left without; see `DecodeWeights.arranged`.
        guard: every N-th step is dense and moves thresholds; settings, or the state that several engines share.
        screen: find the greedy token of one row through an int8 screen of the LM head, which is the token that all
            logits give, for half of its bytes; the screen takes as many beside it, and is of the LM head as it is when
            the engine is built. None = on a GPU where it fits; True = also under the interpreter.
    Raises:
        UserError: no GPU, a size that does not fit, a head dim without kernels, an uncalibrated bundle; a bundle that
            cannot be guarded. DoesNotFit: the GPU's memory. Unsupported: what is not done with 4-bit weights.
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
        crossover: bool = True,
        release: bool = False,
        guard: Guard | GuardState | None = None,
        screen: bool | None = None,
    ) -> None:
        given = isinstance(model, DecodeWeights)
        device = torch.device(device if device is not None else model.embedding.device if given else model.device)
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if ops == "triton" and not runs_on(device):
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
        self.shape = model.shape if given else dims_of(model.config)
        limit = self.shape.max_positions
        if context is not None and not 2 <= context <= limit:
            raise UserError(f"a context of {context} tokens does not fit: this model has positions for 2 to {limit}")
        if ops == "triton" and self.shape.head_dim not in HEAD_DIMS:
            raise UserError(
                f"head dim {self.shape.head_dim} has no kernels (there are {', '.join(map(str, HEAD_DIMS))});"
                " use backend gather"
            )
        self.batch, self.context, self.device = batch, context or limit, device
        if given:
            weights = model
        else:
            dtype = dtype or engine_dtype(model, ops)
            check_room({"weights": weight_bytes(model, dtype)}, device)
            weights = DecodeWeights.from_model(model, dtype, device)
        if isinstance(guard, Guard):
            guard = GuardState(guard, bundle.specs, device) if guard.every else None
        self.guard = guard
        self.predictors: dict[tuple[int, str], TargetPredictor] = self._predictors(bundle, weights.embedding.dtype)
        native = ops == "triton" and device.type == "cuda"
        if weights.packed:
            staged = any(predictor.grid is not None for predictor in self.predictors.values())
            check_four_bits(staged, weights.embedding.dtype, ops)
        self.modes = choose_execution(
            self.predictors, self.shape.d_model, batch, crossover and native, kv_policy, weights.packed
        )
        by_head = any(mode.sparse and mode.target == "heads" for mode in self.modes.values())
        if weights.packed and by_head and batch > MAX_PACKED_ROWS:
            raise UserError(
                f"4-bit weights of selected heads are read for up to {MAX_PACKED_ROWS} rows at once, not {batch};"
                " take fewer rows, or the policy backfill with crossover"
            )
        layers = sum(mode.sparse and mode.target == "heads" for mode in self.modes.values())
        fused, late = set[int](), set[int]()
        if look_ahead == "fused":
            fused = fused_layers(self.predictors, self.shape.n_layers, batch, weights.packed)
            if weights.packed and guard is None:  # a guard's dense steps make no input for the next layer
                late = late_layers(self.predictors, self.shape.n_layers, batch)
                fused |= late
        if any((layer, "heads") not in self.predictors for layer in fused):
            layers += 1  # those of all heads share what one layer keeps
        coming = cache_bytes(self.shape, batch, self.context, weights.embedding.dtype, layers)
        head = isinstance(weights.lm_head, Int4Rows)
        scratch = scratch_bytes(self.shape, batch, weights.packed, head)
        coming |= {"scratch": scratch + late_bytes(self.shape, self.context, self.predictors, late)}
        screen = self._screens(screen, coming, weights.lm_head, ops)
        coming |= {"screen of the LM head": screen_bytes(*weights.lm_head.shape)} if screen else {}
        self.memory = held_bytes(weights, self.predictors) | coming
        check_room(coming, device)
        self.weights = weights.arranged(self.predictors, batch, release or not given)
        self.core = DecodeStep(
            self.weights, self.predictors, self.modes, batch, self.context, kv_policy, device, ops, graph, pdl,
            look_ahead, fused, late, self.guard, screen,
        )  # fmt: skip
        self.state = self.core.state
        super().__init__()

    def _predictors(self, bundle: Any, dtype: torch.dtype) -> dict[tuple[int, str], TargetPredictor]:
        if bundle is None or isinstance(bundle, dict):
            loaded = bundle or {}
        else:
            if not self.shape.has_layers_of(getattr(bundle, "shape", self.shape)):
                raise UserError(f"the bundle belongs to another shape, {bundle.shape}, the model has {self.shape}")
            loaded = load_predictors(bundle, dtype, self.device, read_as_codes(bundle, dtype, self.batch))
        guard = self.guard
        if guard is None:
            return loaded
        return {key: dataclasses.replace(each, threshold=guard.threshold(key)) for key, each in loaded.items()}

    def _screens(self, asked: bool | None, coming: Mapping[str, int], head: Matrix, ops: str) -> bool:
        """Whether greedy steps go through a screen of the LM head, for which there must be room beside `coming`, and
        SPARE beyond that: what nobody needs must not take the room of weights that are still to be arranged."""
        if asked is False or self.batch > 1 or isinstance(head, Int4Rows):
            return False
        if head.shape[1] % SCREENED_WIDTHS or head.dtype not in FLOAT_TYPES:
            return False
        if asked is None:
            room = [*coming.values(), screen_bytes(*head.shape), SPARE]
            return ops == "triton" and self.device.type == "cuda" and fits(room, self.device)
        return True

    def describe(self) -> str:
        """What was decided when the engine was built: size, policy, and how every layer runs."""
        names = {str(p.weights.up.dtype).removeprefix("torch.") for p in self.predictors.values() if p.folded is None}
        stored = {"int4" if name == "uint8" else name for name in names}
        kinds = f", MLP predictors in {', '.join(sorted(stored))}" if stored else ""
        head = f"{self.batch} rows of {self.context} tokens, K/V of skipped heads: {self.core.kv_policy}{kinds}"
        head += ", weights in 4 bits" * self.weights.packed
        head += ", LM head in 4 bits" * isinstance(self.weights.lm_head, Int4Rows)
        head += ", greedy tokens through a screen" * (self.core.screen is not None)
        modes = describe_execution(self.modes, self.shape.n_layers)
        return f"{head}\n{modes}\n{describe_memory(self.memory)}"

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        self.core.step(mode, score)

    def reset(self) -> None:
        """Forget all rows. Captured graphs stay valid."""
        self.core.reset()

    def begin(
        self,
        rows: Sequence[Sequence[int]],
        total: Sequence[int],
        sparse_from: Sequence[int],
        prefilled: Sequence[int],
        sampler: Sampling,
        *,
        least: Sequence[int] | None = None,
        stops: Sequence[int] = (),
        score: bool = False,
    ) -> None:
        """See `Session.begin`. A row's last token is not run, so total may exceed the context by one."""
        check_rows(rows, [length - 1 for length in total], self.batch, self.context, self.shape)
        self.core.reset()
        state, n = self.state, len(rows)
        known = torch.zeros(n, max(map(len, rows)), dtype=torch.int32)
        for b, row in enumerate(rows):
            known[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        state.tokens[:n, : known.shape[1]] = known.to(self.device)

        def put(tensor: Tensor, values: Sequence[float]) -> None:
            tensor[:n] = torch.tensor(values, dtype=tensor.dtype).to(self.device)

        put(state.known, [len(row) for row in rows])
        put(state.least, least or [0] * n)
        put(state.limit, total)
        state.stops[: len(stops)] = torch.tensor(stops, dtype=torch.int32)
        put(state.sparse_from, sparse_from)
        put(state.done, [0] * n)
        put(state.position, [count - 1 for count in prefilled])
        put(state.temperature, [sampler.temperature or 1.0] * n)
        put(state.top_p, [sampler.top_p] * n)
        put(state.top_k, [sampler.top_k] * n)
        put(state.seed, [sampler.seed * MAX_BATCH + b for b in range(n)])
        if max(prefilled) > 0:
            caches = self.core.caches
            self.core.x[-1, :n] = prefill(
                self.weights, state.tokens[:n], prefilled, [cache.k for cache in caches], [cache.v for cache in caches]
            )
            put(self.core.watermark.movedim(1, 0), torch.tensor(prefilled)[:, None, None].tolist())
            for valid in (cache.valid for cache in caches if cache.valid is not None):
                for b in range(n):
                    valid[b, :, : prefilled[b]] = 1
        self.core.tail(sampler.mode, score)

    def steps(self, n: int, mode: str, score: bool = False) -> int:
        """Up to CHUNK steps; see `Session.steps`."""
        n = min(n, CHUNK)
        for _ in range(n):
            self.core.step(mode, score)
        return n

    def look(self, n: int) -> tuple[list[int], bool]:
        """One copy from the device. Raises UserError for logits that hold NaN; see `Session.look`."""
        done, last, fault = torch.stack((self.state.done[:n], self.state.position[:n], self.state.fault[:n])).tolist()
        for b, position in enumerate(fault):
            if position:
                dtype = str(self.weights.embedding.dtype).removeprefix("torch.")
                error = UserError(
                    f"the logits of row {b} for the token at position {position} hold NaN; check the weights, and if"
                    f" {dtype} is too narrow for this model's activations load it with dtype bfloat16 or float32"
                )
                error.tokens = self.state.tokens[b, :position].tolist()
                raise error
        return [position + 1 for position in last], all(done)

    @in_turn
    def logits(
        self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Teacher forcing, every token through the decoding step: the logits behind every token.

        Args:
            rows: token ids, each of 1 to `context` tokens; at most `batch` rows.
            sparse_from: first sparse position; earlier ones select everything.
        Returns:
            (B, T, V) on the engine's device, T the longest row; what stands behind a shorter row is undefined.
        """
        lengths = [len(row) for row in rows]
        total, starts = [n + 1 for n in lengths], per_row(sparse_from, lengths)
        self.begin(rows, total, starts, [0] * len(rows), Sampling(), score=True)
        logits = torch.empty(len(rows), max(lengths), self.shape.vocab_size, dtype=dtype, device=self.device)
        for t in range(max(lengths)):
            self.core.step("greedy", score=True)  # logits, not a screen of them
            logits[:, t] = self.core.logits[: len(rows)]
        self.look(len(rows))
        return logits
