"""The decode engine for CPUs: reads an OPT and a bundle, writes tokens. A whole step is one call of compiled code.

Dense and sparse come from the same code: a layer without a predictor runs densely. At batch 1 a processor reads weights
at the speed of its memory, so a step takes as long as the rows that it reads. Threads are as many as the process may
use. They wait without taking time from other work (see ``team``).
"""

import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import enter
from dejavu_train.engine.cpu.lossless import CpuPair
from dejavu_train.engine.cpu.prefill import PromptPass, fault, logits_of
from dejavu_train.engine.cpu.selectors import Rules, read_rules
from dejavu_train.engine.cpu.team import Team
from dejavu_train.engine.cpu.threads import SUPPORTED
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.cpu_limits import row_seed
from dejavu_train.engine.draft import DRAFT_WEIGHTS, Draft
from dejavu_train.engine.inputs import Row, check_rows
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine
from dejavu_train.engine.scores import AT_ONCE, Score, scores_of
from dejavu_train.engine.session import Session
from dejavu_train.engine.turns import Turns
from dejavu_train.families import blocks_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.machine import cores

CALL_SECONDS = 0.05  # a call of compiled code takes at most about this long, so that Ctrl-C is heard


def usable_cores() -> int:
    """How many threads an engine has by itself: as many as `machine.cores`, and no more than torch was told to use."""
    return max(1, min(cores(), torch.get_num_threads()))


class CpuEngine(Session):
    """Decodes up to `batch` rows of up to `context` tokens on a CPU, by the selection rules of a bundle.

    Threads may share an engine: a call waits until those before it have their last token.
    K and V of skipped heads are computed when a head is next selected, so decoding equals the masked dense model.

    Args:
        model: a Hugging Face model, or `CpuWeights`, which several engines may share.
        bundle: a `Bundle`, a list of `CpuPredictor`, or the `rules` of an engine with the same weights. None: a
            dense engine.
        batch: rows, at most 8. Fewer prompts may be given.
        context: tokens a row can hold, prompt included. None = the model's limit.
        stored: one of `cpu_limits.STORED`, how weights are kept. A given `CpuWeights` keeps its own. None = the codes
            of a 4-bit model, else the model's dtype.
        group: columns that share a scale, as `CpuWeights.from_model` takes it.
        threads: None = as many as the process may use.
        release: give up the Hugging Face model's own tensors while copying.
    Raises:
        UserError: a size or format that does not fit, or an uncalibrated bundle.
    """

    scores = True

    def __init__(
        self,
        model: Any,
        bundle: Any = None,
        *,
        batch: int = 1,
        context: int | None = None,
        stored: str | None = None,
        group: int | None = None,
        threads: int | None = None,
        release: bool = False,
    ) -> None:
        if not SUPPORTED:
            raise UserError("the CPU engine needs POSIX threads (Linux or macOS); use backend gather")
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1, got {threads}")
        given = isinstance(model, CpuWeights)
        options = EngineOptions(batch, context)
        # Planes of a second stage are made from the weights as the model has them, not from rounded ones.
        late = release and stored in ("int8", "int4") and hasattr(bundle, "cascades") and bool(bundle.cascades())
        self.weights = model if given else CpuWeights.from_model(model, stored, group, release and not late)
        self.shape = self.weights.shape
        if not self.shape.has_layers_of(getattr(bundle, "shape", self.shape)):
            raise UserError(
                f"the bundle belongs to another shape, {bundle.shape}, the model has {self.shape}; give the bundle of"
                " this model"
            )
        self.threads = threads or usable_cores()
        up = None if given or self.weights.model.rows.itemsize > 1 else lambda i: blocks_of(model)[i].up.weight
        self.rules = bundle if isinstance(bundle, Rules) else read_rules(self.weights, bundle, up)
        self.selectors = self.rules.selectors
        self.plan = plan_step(self.shape, self.rules.facts(batch), self.weights.formats, options, Engine.CPU)
        self.batch, self.context = self.plan.batch, self.plan.context
        if late:
            for parameter in (each for block in blocks_of(model) for each in block.whole.parameters()):
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        operand = self.weights.operand
        kept = int((self.selectors.kept >= 0).sum())
        self.state = arrays.new_state(self.shape, batch, self.context, kept, operand, cached=self.weights.cached)
        self.scratch = arrays.new_scratch(self.shape, batch, self.context, self.threads, self.selectors, operand)
        self._seconds_per_step = CALL_SECONDS
        self._prompts = PromptPass(self.weights, self.selectors, self.state, self.context, self.threads)
        self._team = Team(enter, (self.weights.model, self.selectors, self.state, self.scratch), self.threads)
        self._pairs: dict[str | None, CpuPair] = {}
        super().__init__()

    def describe(self) -> str:
        """Decisions made when the engine was built, with the reasons, how weights are kept, and the threads."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.plan.describe()}\nkept as {self.weights.describe()}, {threads}"

    def close(self) -> None:
        """Send the threads home. The engine cannot be used afterwards. Done by itself when the engine is forgotten."""
        self._team.close()
        self._prompts.team.close()
        for pair in self._pairs.values():
            pair.team.close()
            pair.prompts.team.close()

    @property
    def turns(self) -> Turns:
        """Turns of this process: one that was forked may have copied them while a call held them."""
        self._team.check_alive()
        return super().turns

    def step(self, mode: str = "greedy", score: bool = False) -> None:
        """One token for every row that is not done."""
        self._team.call(1, mode, score)

    def steps(self, n: int, mode: str, score: bool = False) -> int:
        """Up to n steps in one call of compiled code that takes about CALL_SECONDS. See `Session.steps`."""
        n = max(1, min(n, int(CALL_SECONDS / self._seconds_per_step)))
        started = time.perf_counter()
        self._team.call(n, mode, score)
        self._seconds_per_step = max((time.perf_counter() - started) / n, 1e-6)
        return n

    def read(self, n: int) -> tuple[list[int], list[bool], dict[int, UserError]]:
        """Read rows. Names what is not finite by layer. See `Session.read`."""
        state = self.state
        faults = {
            int(b): fault(int(state.fault_site[b]) - 1, int(b), int(state.fault[b]) - 1)
            for b in state.fault[:n].nonzero()[0]
        }
        return (state.position[:n] + 1).tolist(), (state.row_state[:n] == arrays.DONE).tolist(), faults

    def begin(self, rows: Sequence[Row], stops: Sequence[int] = (), *, score: bool = False) -> None:
        """See `Session.begin`."""
        check_rows(rows, self.batch, self.context, self.shape)
        self.open(stops)
        for b, row in enumerate(rows):
            self.state.tokens[b, : len(row.tokens)] = row.tokens
            self._write(b, row, self._prompts.run(b, row.prefilled) if row.prefilled else None)
        self._team.call(1, rows[0].sampling.mode, score, tail_only=True)

    def open(self, stops: Sequence[int]) -> None:
        """See `Session.open`."""
        self.state.clear()
        self.prompted.clear()
        self.state.stops[: len(stops)] = list(stops)

    def prompt_states(self, tokens: Sequence[int]) -> Tensor:
        """The residual stream (T, d) fp32 behind the last layer of a prompt, run densely in row 0."""
        self.state.tokens[0, : len(tokens)] = tokens
        return self._prompts.run(0, len(tokens), 0, whole=True)

    def placing(self, b: int, row: Row, reused: int = 0) -> Generator[None, None, list[Score]]:
        """See `Session.placing`."""
        check_rows([row], self.batch, self.context, self.shape)
        state, whole, parts = self.state, row.scored_from is not None, []
        state.row_state[b], state.tokens[b, : len(row.tokens)] = arrays.DONE, row.tokens
        self.prompted.pop(b, None)
        for first in range(reused, row.prefilled, self.chunk):
            stop = min(first + self.chunk, row.prefilled)
            parts.append(self._prompts.run(b, stop, first, whole))
            if stop < row.prefilled:
                yield
        self.prompted[b] = list(row.tokens[: row.prefilled])
        behind = torch.cat(parts) if whole and parts else parts[-1] if parts else None
        others = state.row_state.copy()
        others[b] = arrays.DONE
        try:
            state.row_state[:] = arrays.DONE
            self._write(b, row, behind)
            self._team.call(1, row.sampling.mode, tail_only=True)
            others[b] = state.row_state[b]
        finally:
            state.row_state[:] = others
        if row.scored_from is None or row.scored_from >= row.prefilled:
            return []
        first, found = row.scored_from, list[Score]()
        assert behind is not None
        for start in range(first, row.prefilled, AT_ONCE):  # logits of position p stand behind token p - 1
            stop = min(row.prefilled, start + AT_ONCE)
            logits = logits_of(self.weights, behind[start - 1 : stop - 1], b, start - 1)
            found += scores_of(logits, row.tokens[start:stop], row.top)
        return found

    def score_last(self, b: int, top: int) -> Score:
        """See `Session.score_last`."""
        raw = torch.from_numpy(self.scratch.raw[b : b + 1])
        token = int(self.state.tokens[self.state.sequence[b], self.state.position[b]])
        return scores_of(raw, [token], top)[0]

    def end(self, b: int) -> None:
        """See `Session.end`."""
        self.state.row_state[b] = arrays.DONE

    def _write(self, b: int, row: Row, behind: Tensor | None) -> None:
        """A row's state, and the residual stream behind its prompt (., d), from which the tail chooses the next token.

        None: no token is prefilled.
        """
        state, known, sampler = self.state, len(row.tokens), row.sampling
        state.tokens[b, :known] = row.tokens
        state.known[b], state.limit[b], state.sparse_from[b] = known, row.total, row.sparse_from
        state.least[b], state.position[b] = row.least, row.prefilled - 1
        state.fault[b] = state.fault_site[b] = 0
        state.temperature[b], state.top_p[b], state.top_k[b] = sampler.temperature, sampler.top_p, sampler.top_k
        state.min_p[b], state.repetition[b] = sampler.min_p, sampler.repetition_penalty
        state.presence[b], state.frequency[b] = sampler.presence_penalty, sampler.frequency_penalty
        state.seed[b] = row_seed(sampler.seed, row.number)
        state.scored[b] = row.scored_from is not None
        if behind is not None:
            self.scratch.residual[b] = behind[-1].numpy()
        state.seen[b] = 0
        state.seen[b, list(row.tokens[: row.prefilled])] = 1
        state.watermark[:, b] = row.prefilled
        # Not done, so that the tail gives the row its next token. Whether it is sparse is decided there.
        state.row_state[b] = arrays.DENSE

    def pair(self, draft: Draft) -> CpuPair:
        """See `Session.pair`. Rounded weights are made here, once for all engines with these weights."""
        if draft.weights not in self._pairs:
            if draft.weights not in (None, *DRAFT_WEIGHTS):
                named = ", ".join(DRAFT_WEIGHTS)
                raise UserError(f"on a CPU draft_weights is {named} or left out, got {draft.weights}")
            weights = self.weights if draft.weights is None else self.weights.rounded(draft.weights)
            self._pairs[draft.weights] = CpuPair(
                self.weights, weights, self.selectors, self.state, self.scratch, self.threads
            )
        return self._pairs[draft.weights]

    def bytes_read(self) -> dict[str, int]:
        """Bytes that the steps since the last call of this read: weights, predictors, lm_head, kv."""
        total = self.scratch.bytes_read.sum(axis=0)
        self.scratch.bytes_read[:] = 0
        names = {"weights": arrays.WEIGHTS, "predictors": arrays.PREDICTORS, "lm_head": arrays.LM_HEAD, "kv": arrays.KV}
        return {name: int(total[column]) for name, column in names.items()}
