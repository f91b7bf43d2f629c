"""The decode engine: reads an OPT and a bundle, writes tokens. A whole step, sampling included, is one CUDA graph.

Dense and sparse come from the same code: a layer without a predictor runs densely. All state lives in device tensors:
tokens, positions, watermarks, counts, seeds, what is forced and what is sampled. So one captured step serves prompts,
generation and scoring of any length, and a reset only writes tensors. Rows of a batch have their own lengths. Two sets
of operations have the same signatures: the Triton kernels, and their plain-torch references (any device).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.draft_weights import NAME, bytes_beside, draft_weights
from dejavu_train.engine.facts import facts_of
from dejavu_train.engine.inputs import Row, Sampling, check_rows, rows_of
from dejavu_train.engine.memory import check_room, describe_memory, free_bytes, held_bytes, weight_bytes
from dejavu_train.engine.model_weights import engine_dtype, formats_of, weights_of_model
from dejavu_train.engine.one_kernel import with_one_kernel
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step, read_as_codes, with_screen
from dejavu_train.engine.planned import Engine
from dejavu_train.engine.predictors import TargetPredictor, load_predictors
from dejavu_train.engine.prefill import SIZES
from dejavu_train.engine.prompts import Prompts
from dejavu_train.engine.ranks.group import agree
from dejavu_train.engine.ranks.joins import Join, RankJoin
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.engine.ranks.ranks import Ranks, waiting
from dejavu_train.engine.row_numbers import sent
from dejavu_train.engine.scores import Score, scores_of
from dejavu_train.engine.session import Session, Sight
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.turns import in_turn
from dejavu_train.engine.verification import EnginePair
from dejavu_train.engine.weights import DecodeWeights, dtype_name
from dejavu_train.families import Target, UnitKey, dims_of
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.common.checks import runs_on
from dejavu_train.kernels.common.settings import settings_file
from dejavu_train.kernels.sample.sampling import MODES
from dejavu_train.models.finite import not_finite

DEFAULTS = EngineOptions()
CHUNK = 16  # steps between looks at the rows, when nobody listens


class DecodeEngine(Session):
    """Decodes up to `options.batch` rows of up to `options.context` tokens.

    Args:
        model: a Hugging Face model, which is copied, or `DecodeWeights`, of which this engine shares what
            already has its layout.
        bundle: a `Bundle`, or loaded predictors by (layer, target), as `load_predictors` gives them. None = dense.
        ranks: of one of several GPUs that decode together, each in a process of its own. Of a whole model and bundle
            this one keeps its units. Weights and loaded predictors may be its shard already. All ranks make the same
            calls. None = one GPU, or as a Hugging Face model says that `load_rank` has loaded.
    Attributes:
        plan: how a step runs. See `describe`.
        memory: bytes by what they are for.
    Raises:
        UserError: no GPU, a size that does not fit, an uncalibrated bundle, a bundle that cannot be guarded.
        DoesNotFit: the GPU's memory. Unsupported: what there are no kernels for.
    """

    beside = True
    scores = True

    def __init__(
        self, model: Any, bundle: Any = None, options: EngineOptions = DEFAULTS, ranks: Ranks | None = None
    ) -> None:
        given = isinstance(model, DecodeWeights)
        device = torch.device(options.device or (model.embedding.device if given else model.device))
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if options.ops == "triton" and not runs_on(device):
            raise UserError(
                "the triton backend needs a CUDA device and found none; use backend gather, or set TRITON_INTERPRET=1"
                " before starting Python (slow, for tests)"
            )
        engine = Engine.REFERENCE
        if options.ops == "triton":
            engine = Engine.GPU if device.type == "cuda" else Engine.INTERPRETER
        shape = model.shape if given else dims_of(model.config)
        part = None if given else ranks_of(model)
        ranks = ranks or part
        shard = None if ranks is None else ranks.shard
        if shard is not None and shape == shard.dims:
            shape = shard.whole
        if shard is not None and shape != shard.whole:
            raise UserError(f"the shard belongs to another shape, {shard.whole}, the model has {shape}")
        dtype = model.embedding.dtype if given else options.dtype or engine_dtype(model, options.ops)
        given_predictors = bundle is None or isinstance(bundle, dict)
        found: dict[UnitKey, TargetPredictor | None] = (bundle or {}) if given_predictors else {}
        facts = {
            UnitKey(layer, Target(target)): None if each is None else each.facts(options.batch)
            for (layer, target), each in found.items()
        }
        codes: frozenset[UnitKey] = frozenset()
        if not given_predictors:
            if not shape.has_layers_of(getattr(bundle, "shape", shape)):
                raise UserError(
                    f"the bundle belongs to another shape, {bundle.shape}, the model has {shape}; give the bundle of"
                    " this model"
                )
            codes = read_as_codes(bundle, dtype, options.batch)
            facts = facts_of(bundle, codes, dtype_name(dtype), options.batch)
        formats = model.formats if given else formats_of(model, dtype)
        own, world = (shape, 1) if shard is None else (shard.dims, shard.world)
        plan = plan_step(own, facts, formats, options, engine, world)
        if given:
            weights = model
        else:
            check_room({"weights": weight_bytes(model, dtype)}, device)
            weights = weights_of_model(model, dtype, device, held=None if part is None else part.shard.dims)
            weights = weights if part is None else part.shard.with_head(weights)
        if shard is not None and weights.shape != own:
            weights = shard.weights(weights)
        guard = options.guard
        if isinstance(guard, Guard):
            guard = GuardState(guard, bundle.specs, device) if guard.every else None
        if not given_predictors:
            found = load_predictors(bundle, dtype, device, codes)
        loaded = {key: each for key, each in found.items() if each is not None}
        if shard is not None:
            loaded = {key: shard.predictor(each) for key, each in loaded.items()}
        if guard is not None:
            loaded = {key: replace(each, threshold=guard.threshold(key)) for key, each in loaded.items()}
        plan = with_one_kernel(plan, loaded, device)
        self.plan = plan = with_screen(plan, options.screen, free_bytes(device) if device.type == "cuda" else None)
        self.memory = held_bytes(weights, loaded) | dict(plan.coming)
        check_room(plan.coming, device)
        self.weights = weights.arranged(plan.turned, options.release or not given)
        self.shape, self.batch, self.context, self.device = shape, plan.batch, plan.context, device
        self.guard, self.predictors = guard, loaded
        self.ranks = ranks
        self.join = Join() if ranks is None else RankJoin(ranks.shard, ranks.sums, plan.batch, device)
        self.core = DecodeStep(self.weights, loaded, plan, options, device, guard, join=self.join)
        self.state, self.prompts = self.core.state, Prompts(self.core, self.join)
        self.options = options
        self._selects: list[Any] = []  # what ranks must have alike, besides their models
        if ranks is not None:
            self._selects = sorted((*key, each.threshold.tolist()) for key, each in loaded.items())
        self._verifies_live = shape.activation in SILENT and options.zeros != "read"
        self._pairs: dict[str | None, EnginePair] = {}
        super().__init__()

    def describe(self) -> str:
        """Decisions made when the engine was built, with the reasons, and the memory that it takes."""
        lines = [self.plan.describe(), describe_memory(self.memory)]
        if self.plan.engine in (Engine.GPU, Engine.INTERPRETER):
            lines.insert(1, f"launch settings: {settings_file(self.device)}")
        lines += [pair.dense.describe() for pair in self._pairs.values()][:1]
        return "\n".join(lines)

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        self.core.step(mode, score)

    def begin(self, rows: Sequence[Row], stops: Sequence[int] = (), *, score: bool = False) -> None:
        """See `Session.begin`. A row's last token is not run, so total may exceed the context by one."""
        check_rows(rows, self.batch, self.context, self.shape, unheld=1)
        if self.ranks is not None:
            # Before all else, so that ranks that make other calls agree on nothing, in one message.
            agree(self.ranks.hosts, _seeded(rows, 0), stops, score, self._selects)
            rows = _seeded(rows, self.ranks.hosts.gather(rows[0].sampling.seed)[0])  # the first rank's counts
        self.open(stops)
        with waiting(self.ranks):
            self._see(0, rows)
            self.prompts.write(0, rows)
            for b, row in enumerate(rows):
                if row.prefilled:
                    self.prompts.run(b, row.prefilled)
            mode, tail = rows[0].sampling.mode, self.core.tail
            if self.ranks is None:
                self.core.replay(("begun", mode, score), partial(tail, mode, score), shared=True)
            else:
                tail(mode, score)

    def open(self, stops: Sequence[int]) -> None:
        """See `Session.open`."""
        self.core.reset()
        self.prompted.clear()
        self.state.stops[: len(stops)] = torch.tensor(stops, dtype=torch.int32)

    def placing(self, b: int, row: Row, reused: int = 0) -> Generator[None, None, list[Score]]:
        """See `Session.placing`. Raises UserError for an engine with a guard, whose thresholds all rows share, and for
        one of several ranks."""
        if self.guard is not None:
            raise UserError("rows that join others have no guard; pass guard=None")
        if self.ranks is not None:
            raise UserError("rows that join others are served by one GPU; start one process, without torchrun")
        check_rows([row], self.batch, self.context, self.shape, unheld=1)
        self._see(b, [row])
        scores = self.prompts.scores(b, row)
        self.prompted.pop(b, None)
        yield from self.prompts.joining(b, row, reused)
        self.prompted[b] = list(row.tokens[: row.prefilled])
        return scores

    @property
    def grid(self) -> int:  # type: ignore[override]
        """Tokens of a whole chunk. See `Session.grid`."""
        return self.prompts.most

    def score_last(self, b: int, top: int) -> Score:
        """See `Session.score_last`. It waits for the step."""
        token = int(self.state.tokens[b, self.state.position[b]])
        return scores_of(self.core.logits[b : b + 1], [token], top)[0]

    def warm_up(self) -> None:
        """See `Session.warm_up`. One prompt of each size of a chunk, and a step of each mode."""
        self.open(())
        longest = min(self.prompts.most, self.context - 1)
        for size in [*(size for size in (1, *SIZES) if size < longest), longest]:
            row = Row.of_prompt([0] * size, size + 1)
            for b in range(self.batch if size <= self.prompts.slotted else 1):  # slots have a graph a row
                self.place(b, row)
        self.place(0, Row.of_prompt([0], 2, Sampling(temperature=1.0)))
        for mode in MODES:
            self.core.step(mode)
        self.read(self.batch)
        self.open(())

    def cut(self, tokens: int) -> None:
        """See `Session.cut`. A whole chunk is one of few sizes."""
        if tokens not in SIZES:
            raise UserError(f"--prefill_chunk is one of {', '.join(map(str, SIZES))} on a GPU, got {tokens}")
        self.prompts.most = tokens

    def _see(self, first: int, rows: Sequence[Row]) -> None:
        """Which tokens penalties find in rows from number ``first`` on, where a row has any."""
        if any(row.sampling.penalised for row in rows):
            seen = torch.zeros(len(rows), self.shape.vocab_size, dtype=torch.int32)
            for b, row in enumerate(rows):
                seen[b, list(row.tokens[: row.prefilled])] = 1
            self.state.seen[first : first + len(rows)] = sent(seen, self.device)

    @torch.inference_mode(False)  # what it holds is written in later calls, which may be outside
    @torch.no_grad()
    def pair(self, draft: Draft) -> EnginePair:
        """See `Session.pair`. Raises UserError where several ranks are asked for different drafts."""
        if self.ranks is not None:
            agree(self.ranks.hosts, draft)
        if draft.weights not in self._pairs:
            with self.core.on_device():
                step = self.core if draft.weights is None else self._beside(draft.weights)
                self._pairs[draft.weights] = EnginePair(step, self.weights, self.begin, self.ranks, self._verifies_live)
        return self._pairs[draft.weights]

    def _beside(self, asked: str) -> DecodeStep:
        """A step by other weights over this engine's state and K/V. What it takes is checked and said first."""
        shard, world = (None, 1) if self.ranks is None else (self.ranks.shard, self.ranks.shard.world)
        weights = draft_weights(self.weights, asked, shard)
        facts = {key: each.facts(self.batch) for key, each in self.predictors.items()}
        engine, options = self.plan.engine, replace(self.options, context=self.context)
        plan = plan_step(weights.shape, facts, weights.formats, options, engine, world)
        plan = with_one_kernel(plan, self.predictors, self.device)
        plan = with_screen(plan, self.core.screen is not None and weights.lm_head is self.weights.lm_head, None)
        shared = ("K/V", "screen of the LM head")
        coming = {f"{name} of the draft": size for name, size in plan.coming.items() if name not in shared}
        check_room(coming, self.device)
        self.memory |= {NAME: bytes_beside(weights, self.weights), **coming}
        return DecodeStep(weights, self.predictors, plan, options, self.device, self.guard, self.core, self.join)

    def steps(self, n: int, mode: str, score: bool = False) -> int:
        """Up to CHUNK steps. See `Session.steps`. Where rows keep log-probabilities, all have the LM head whole."""
        n, score = min(n, CHUNK), score or self.scoring
        with waiting(self.ranks):
            for _ in range(n):
                self.core.step(mode, score)
        return n

    def heard(self, listens: bool) -> bool:
        """See `Session.heard`. Ranks step alike, whoever of them listens."""
        return listens if self.ranks is None else any(self.ranks.hosts.gather(int(listens)))

    def ended(self, ended: Sequence[bool]) -> list[bool]:
        """See `Session.ended`. A bit a row."""
        if self.ranks is None:
            return list(ended)
        found = self.ranks.hosts.gather(sum(1 << b for b, ends in enumerate(ended) if ends))
        return [any(each >> b & 1 for each in found) for b in range(len(ended))]

    def read(self, n: int) -> tuple[list[int], list[bool], dict[int, UserError]]:
        """One copy from the device. See `Session.read`."""
        with waiting(self.ranks):
            sight = self._sight(self._marks()[:, :n].cpu(), self.state.tokens)
        return sight.held, sight.done, sight.faults

    def sight(self) -> Callable[[], Sight]:
        """See `Session.sight`. Two copies, which a GPU makes behind the steps."""
        with self.core.on_device():
            marks, tokens = (
                each.to("cpu", non_blocking=True, copy=True) for each in (self._marks(), self.state.tokens)
            )
            made = torch.cuda.Event(blocking=True) if self.device.type == "cuda" else None
            if made is not None:
                made.record()

        def wait() -> Sight:
            if made is not None:
                made.synchronize()
            return self._sight(marks, tokens)

        return wait

    def _marks(self) -> Tensor:
        return torch.stack((self.state.done, self.state.position, self.state.fault))

    def _sight(self, marks: Tensor, tokens: Tensor) -> Sight:
        done, last, fault = marks.tolist()
        faults = {}
        for b, position in enumerate(fault):
            if position:
                what = f"the logits of row {b} for the token at position {position} hold NaN"
                if self.core.one_kernel is not None and (why := self.core.one_kernel.fault()):
                    what += f", because the kernel of all layers stopped ({why}); one_kernel=False runs a chain"
                    self.core.one_kernel.reset()
                faults[b] = not_finite(what, self.weights.embedding.dtype)
                faults[b].tokens = tokens[b, :position].tolist()
        return Sight(tokens, [position + 1 for position in last], [bool(each) for each in done], faults)

    def end(self, b: int) -> None:
        """See `Session.end`."""
        self.state.done[b], self.state.row_state[b] = 1, 0

    @in_turn
    def logits(
        self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Teacher forcing, every token through the decoding step: the logits behind every token.

        Args:
            rows: token ids, each of 1 to `context` tokens. At most `batch` rows.
            sparse_from: first sparse position. Earlier ones select everything.
        Returns:
            (B, T, V) on the engine's device, T the longest row. What stands behind a shorter row is undefined.
        """
        lengths = [len(row) for row in rows]
        self.begin(rows_of(rows, sparse_from, new=1), score=True)
        logits = torch.empty(len(rows), max(lengths), self.shape.vocab_size, dtype=dtype, device=self.device)
        for t in range(max(lengths)):
            self.core.step("greedy", score=True)  # logits, not a screen of them
            logits[:, t] = self.core.logits[: len(rows)]
        self.look(len(rows))
        return logits


def _seeded(rows: Sequence[Row], seed: int) -> list[Row]:
    return [replace(row, sampling=replace(row.sampling, seed=seed)) for row in rows]
