"""Calls of a decode engine, from the first token to the last: generation, scoring, callbacks and stop tokens.

Rows of a batch have their own lengths. The engine's state is that of one call, so calls wait for each other.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.draft import Draft, check_alone
from dejavu_train.engine.inputs import Row, Sampling, check_continuation, check_length, check_rows, rows_of
from dejavu_train.engine.lossless import Acceptance, Pair
from dejavu_train.engine.planned import StepPlan
from dejavu_train.engine.scores import Score
from dejavu_train.engine.turns import Turns, in_turn
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError

Callback = Callable[[int, int], Any]
NO_SCORES = "this engine gives no log-probabilities; leave logprobs and echo out"


@dataclasses.dataclass(frozen=True)
class Sight:
    """Contents of an engine's rows: ``tokens`` (batch, T) integers on the host, and what `Session.read` gives."""

    tokens: Any
    held: list[int]
    done: list[bool]
    faults: dict[int, UserError]


class Session(ABC):
    """Interface of an engine to its callers. A subclass says how its rows begin, step and are read.

    Attributes:
        batch, context: rows that the engine holds, and tokens of a row. plan: how a step runs.
        state: has ``tokens`` (batch, T) integers and ``nll`` (batch, T) fp32, tensors or arrays. T: at least context.
        acceptance: of the last lossless call.
        beside: steps go on while the caller does something else. Otherwise `steps` returns when they are done.
        scores: a row may keep log-probabilities, see `Row.scored_from`.
        scoring: some of the rows that step keep them.
        chunk: tokens of a prompt that run between two steps of other rows. grid: where a prompt's chunks may be cut so
            that its numbers stay the same bits.
    """

    beside = False
    scores = False
    scoring = False
    chunk = 64
    grid = 1

    shape: ModelDims
    batch: int
    context: int
    plan: StepPlan
    state: Any

    def __init__(self) -> None:
        self._turns, self.acceptance = Turns(), Acceptance()
        self.prompted: dict[int, list[int]] = {}  # by row the tokens whose K and V its prompt left

    @property
    def turns(self) -> Turns:
        """Held from the first token of a call to its last."""
        return self._turns

    @abstractmethod
    def begin(self, rows: Sequence[Row], stops: Sequence[int] = (), *, score: bool = False) -> None:
        """Write the known tokens, run what is prefilled of each row densely at once, and choose what follows it.

        Args:
            rows: of one sampling mode. stops: at most 8 ids that end a row. score: -log p of the known tokens is kept.
        Raises:
            UserError: rows that do not fit.
        """

    @abstractmethod
    def steps(self, n: int, mode: str, score: bool = False) -> int:
        """Up to n tokens for every row that is not done, as many as pass between two looks. Returns how many."""

    @abstractmethod
    def read(self, n: int) -> tuple[list[int], list[bool], dict[int, UserError]]:
        """Read the first n rows: how many tokens each holds, whether it is done, and by row what was not finite."""

    def sight(self) -> Callable[[], Sight]:
        """A call that waits for the steps that were asked for by now, and says what all rows held behind them."""
        found = Sight(self.state.tokens, *self.read(self.batch))
        return lambda: found

    def look(self, n: int) -> tuple[list[int], bool]:
        """How many tokens each of the first n rows holds, and whether all of these rows are done.

        Raises:
            UserError: numbers that were not finite since `begin`.
        """
        held, done, faults = self.read(n)
        for error in faults.values():
            raise error
        return held, all(done)

    def heard(self, listens: bool) -> bool:
        """Whether somebody hears every token of a call, here or where else the engine runs."""
        return listens

    def ended(self, ended: Sequence[bool]) -> list[bool]:
        """Which rows whoever hears them ends, here or where else the engine runs. Called where `heard` is true."""
        return list(ended)

    def open(self, stops: Sequence[int]) -> None:
        """Forget all rows. Others then come by `place`, between two steps. stops: at most 8 ids that end a row.

        Raises:
            UserError: an engine whose rows begin together.
        """
        raise UserError("rows of this engine begin together; use generate()")

    def placing(self, b: int, row: Row, reused: int = 0) -> Generator[None, None, list[Score]]:
        """Begin a row in the place of row b, chunk by chunk of its prompt, and choose its next token.

        Between two chunks other rows may take steps, and they stay as they are. Row b is done until the end.

        Args:
            reused: positions whose K and V are there, as `reusable` says.
        Returns:
            the scores of the tokens that are prefilled, from ``row.scored_from`` on.
        Raises:
            UserError: a row that does not fit, or that asks for scores where the engine has none.
        """
        raise UserError("rows of this engine begin together; use generate()")

    def place(self, b: int, row: Row) -> list[Score]:
        """`placing` at once, whose result and errors it has."""
        placing = self.placing(b, row)
        while True:
            try:
                next(placing)
            except StopIteration as ended:
                return list(ended.value)

    def warm_up(self) -> None:
        """Compile and record what a first prompt and the steps behind it would wait for. Rows are forgotten.

        Whoever calls has the engine to himself.
        """
        self.begin([Row.of_prompt([0], 2)])
        self.steps(1, "greedy")
        self.open(())

    def cut(self, tokens: int) -> None:
        """Let so many tokens of a prompt run between two steps of other rows. Raises UserError for a wrong number."""
        self.chunk = tokens

    def reusable(self, b: int, row: Row) -> int:
        """How many first positions of a row have their K and V in place b, from a prompt that ran there densely.

        They end on the grid of chunks and before the row's last prefilled token. So the rest is computed as alone.
        """
        if row.scored_from is not None:
            return 0
        held, most = self.prompted.get(b, ()), row.prefilled - 1
        common = next((i for i, (a, c) in enumerate(zip(held, row.tokens[:most], strict=False)) if a != c), None)
        found = min(len(held), max(most, 0)) if common is None else common
        return found // self.grid * self.grid

    def score_last(self, b: int, top: int) -> Score:
        """Score of the last token of a row that keeps log-probabilities. Asked behind every step.

        Raises:
            UserError: an engine without scores.
        """
        raise UserError(NO_SCORES)

    @abstractmethod
    def end(self, b: int) -> None:
        """Row b is done."""

    def pair(self, draft: Draft) -> Pair:
        """A draft and its verification over this engine's state, for lossless decoding. Kept for later calls.

        Raises:
            UserError: an engine without verification, or weights of the draft that this engine cannot have.
        """
        raise UserError("this engine verifies no drafts; leave lossless out")

    @in_turn
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (2,),
        min_new_tokens: int = 0,
        sparse_from: int | Sequence[int] | None = None,
        prompt_phase: str = "dense",
        callback: Callback | None = None,
        lossless: bool | Draft = False,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) until a stop token or the limit. Returns the new tokens.

        Args:
            max_new_tokens: at most this many per row. Prompt and new tokens must fit the context.
            sampling: None = greedy.
            stop_tokens: at most 8 ids. The stop token is the row's last new token.
            min_new_tokens: before so many new tokens no stop token is chosen. At most `max_new_tokens`.
            sparse_from: first sparse position of each row. None = after the prompt, as in the paper. 0 = everywhere.
            prompt_phase: "dense" = what lies before `sparse_from` at once. "steps" = token by token.
            callback: called as (row, token) for each new token as soon as it exists. It cannot call this engine. Where
                it returns True the row ends with this token, in all of several processes where one returns it.
            lossless: the text of the dense model, drafted sparsely. One prompt. ``acceptance`` says what was accepted.
        Raises:
            UserError: see the messages. Nothing is decoded then. Or numbers that are not finite, while decoding.
        """
        sampler = sampling or Sampling()
        dense = not self.plan.selecting
        check_continuation(max_new_tokens, min_new_tokens, stop_tokens, prompt_phase)
        rows = rows_of(prompts, sparse_from, sampler, new=max_new_tokens, least_new=min_new_tokens)
        check_length(max((row.total for row in rows), default=0), self.context, self.shape)
        if prompt_phase == "dense":
            rows = [row.prefilling(len(row.tokens) if dense else row.sparse_from) for row in rows]
        if lossless:
            check_alone(len(prompts))
            if self.batch != 1:
                raise UserError(
                    f"lossless decoding needs an engine of one row, this one has {self.batch}; pass batch=1"
                )
            if sparse_from is not None or prompt_phase != "dense":
                raise UserError("under lossless the whole prompt is dense; leave sparse_from and prompt_phase out")
            check_rows(rows, 1, self.context, self.shape)
            return [self._verified(rows[0], stop_tokens, callback, lossless)]
        self.begin(rows, stop_tokens)
        heard = self.heard(callback is not None)
        lengths = [len(row.tokens) for row in rows]
        left, shown, ended = max(row.total - 1 - row.prefilled for row in rows), list(lengths), [False] * len(rows)
        while True:
            held, done = self.look(len(rows))
            if heard:
                if callback is not None:
                    for b, end in enumerate(held):
                        for token in self.state.tokens[b, shown[b] : end].tolist():
                            ended[b] = callback(b, token) is True
                ended = self.ended(ended)
                for b, end in enumerate(held):
                    if ended[b] and end > shown[b]:
                        self.end(b)
                    shown[b] = max(shown[b], end)
                done = done or all(ended)
            if done or left <= 0:
                return [self.state.tokens[b, lengths[b] : end].tolist() for b, end in enumerate(held)]
            left -= self.steps(1 if heard else left, sampler.mode)

    def _verified(self, row: Row, stops: Sequence[int], callback: Callback | None, lossless: bool | Draft) -> list[int]:
        """The new tokens of one prompt, see `Pair.generate`."""
        draft, new = lossless if isinstance(lossless, Draft) else Draft(), []
        if row.sampling.penalised:
            raise UserError("lossless decoding has no penalties, since a draft is judged all at once; leave them out")

        pair = self.pair(draft)
        heard = self.heard(callback is not None)

        def show(start: int, stop: int, tokens: Sequence[int]) -> bool:
            for token in tokens:  # of the report: a look at the engine's state would wait for the next cycle
                new.append(token)
                ends = callback is not None and callback(0, token) is True
                if heard and self.ended([ends])[0]:
                    return True
            return False

        self.acceptance = pair.generate(row, stops, draft.length, show)
        return new

    @in_turn
    def score(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> list[Tensor]:
        """Teacher forcing, every token through the decoding step: -log p of all tokens of a row but its first.

        Args:
            rows: token ids, each of 2 to `context` tokens. Any number of rows, taken `batch` at a time.
            sparse_from: first sparse position. Earlier ones select everything.
        Returns:
            One fp32 tensor (n - 1,) per row, on the CPU.
        """
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) < 2:
            least = min(lengths, default=0)
            raise UserError(f"scoring needs rows of at least 2 tokens, of which the first is given; got one of {least}")
        scored, result = rows_of(rows, sparse_from), list[Tensor]()
        for first in range(0, len(rows), self.batch):
            n = lengths[first : first + self.batch]
            self.begin(scored[first : first + self.batch], score=True)
            left = max(n) - 1
            while left > 0:
                left -= self.steps(left, "greedy", score=True)
                self.look(len(n))
            nll = torch.as_tensor(self.state.nll).cpu()
            result += [nll[b, 1:length].clone() for b, length in enumerate(n)]
        return result

    def perplexity(self, rows: Sequence[Sequence[int]], sparse_from: int | Sequence[int] = 0) -> dict[str, float]:
        """exp of the mean of `score` over all rows. {"perplexity", "nats", "tokens"}."""
        nll = torch.cat(self.score(rows, sparse_from)).double()
        return {"perplexity": math.exp(nll.mean().item()), "nats": nll.sum().item(), "tokens": float(nll.numel())}
