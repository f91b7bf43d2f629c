"""Ways to draft over one engine, of a GPU or of a CPU: sparse, weights of fewer bits, copies. A GPU's may be forced.

A pair is the library's own. Where acceptance is forced, a table of coins replaces the dense model's choices on the
device, which costs some launches more.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.cpu.lossless import CpuPair
from dejavu_train.engine.cpu.selectors import make_selectors
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.draft_weights import draft_weights
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.lossless import Acceptance, Pace, Verified
from dejavu_train.engine.plan import plan_step, with_screen
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.verification import EnginePair
from dejavu_train.engine.weights import DecodeWeights

COINS, SIZE = 4096, 3  # SIZE: tokens that must have stood before, where text is copied
FIXED = {"draft_length=0": 0, "prompt lookup": MOST_DRAFTED}  # lengths of drafts that are not chosen
Written = tuple[list[int], Acceptance]


def followed(text: list[int]) -> list[int]:
    """Tokens that followed the last tokens where they stood before, or nothing."""
    for at in range(len(text) - SIZE - 1, -1, -1):
        if text[at : at + SIZE] == text[-SIZE:]:
            return text[at + SIZE :]
    return []


class Lookup(CpuPair):
    """Drafts what stood behind the last tokens where they stood before, for nothing."""

    def cycle(self, drafted: int, mode: str) -> Verified:
        """Verify what followed the last occurrence, or nothing."""
        state = self.draft_state
        return self.verify(followed(state.tokens[0, : int(state.position[0]) + 1].tolist())[:drafted], mode)


class CpuWays:
    """Ways of a CPU's engines, by name."""

    def __init__(self, dense: CpuEngine, sparse: CpuEngine) -> None:
        self.dense, weights = dense, sparse.weights

        def pair(kind: type[CpuPair], draft: Any, selectors: Any, copies: bool = False) -> CpuPair:
            made = kind(weights, draft, selectors, sparse.state, sparse.scratch, sparse.threads)
            if not copies:
                made.copied = None
            return made

        own, rounded = pair(CpuPair, weights, sparse.selectors), weights.rounded("int8")
        self.pairs = {
            "draft_length=0": own, "sparse": own,
            "sparse, 8 bits": pair(CpuPair, rounded, sparse.selectors),
            "dense, 8 bits": pair(CpuPair, rounded, make_selectors(weights, [])),
            "sparse, 8 bits, and copies": pair(CpuPair, rounded, sparse.selectors, copies=True),
            "prompt lookup": pair(Lookup, weights, sparse.selectors),
        }  # fmt: skip

    def write(self, way: str, prompt: list[int], new: int, sampling: Sampling, length: int | None = None) -> Written:
        """The text of one way. The time of the prompt is not counted."""
        pair, text = self.pairs[way], []

        def show(start: int, stop: int, _: Sequence[int]) -> None:
            text.extend(pair.draft_state.tokens[0, start:stop].tolist())

        row = Row.of_prompt(prompt, len(prompt) + new, sampling)
        return text, pair.generate(row, (), FIXED.get(way, length), show)

    def write_densely(self, prompt: list[int], new: int, sampling: Sampling) -> Written:
        engine, n = self.dense, len(prompt)
        engine.begin([Row.of_prompt(prompt, n + new, sampling)])
        left, began = new - 1, CpuPair.clock()
        while left > 0:
            left -= engine.steps(left, sampling.mode)
        taken = CpuPair.clock() - began
        return engine.state.tokens[0, n : n + new].tolist(), Acceptance(new - 1, new - 1, seconds=taken)


class Measured(EnginePair):
    """A pair whose acceptance may be forced, and whose drafts may be copied from the text itself.

    Attributes:
        share: None, or the probability that a drafted token is accepted.
        copies: whether drafts are what followed the last tokens where they stood before.
    """

    share: float | None = None
    copies = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self.step.device
        # Accepted tokens of each cycle, and the number of the next cycle.
        self.coins, self.turn = (torch.zeros(n, dtype=torch.int64, device=device) for n in (COINS, 1))
        self.pace, self.copied = Pace(MOST_DRAFTED), None

    def force(self, share: float) -> None:
        """Accept each drafted token with this probability."""
        self.share, coin = share, random.Random(0)
        lengths = []
        for _ in range(COINS):
            n = 0
            while n < MOST_DRAFTED and coin.random() < share:
                n += 1
            lengths.append(n)
        self.coins.copy_(torch.tensor(lengths))

    def queue(self, drafted: int, mode: str) -> Callable[[], Verified]:
        """See `Pair.queue`. A draft that is copied is put there by the host. Pairs of one step have graphs apart."""
        run = partial(self._run, drafted, mode)
        if self.copies:
            self._give(drafted)
            run, drafted = partial(self._verify, mode), 0
        self.step.replay((self, self.share is None, drafted, mode), run)
        return self._look()

    def _give(self, drafted: int) -> None:
        state, position = self.step.state, int(self.step.state.position)
        text = state.tokens[0, : position + 1].tolist()
        given = text[:drafted] if self.share is not None else followed(text)[:drafted]
        self.first.copy_(state.position)
        if given:
            state.tokens[0, position + 1 : position + 1 + len(given)] = torch.tensor(given, dtype=torch.int32)
            state.position.add_(len(given))

    @torch.no_grad()
    def _verify(self, mode: str) -> None:
        self._keep(self._choices(mode))

    def _choices(self, mode: str) -> Tensor:
        choices = super()._choices(mode)
        if self.share is None:
            return choices
        tokens = self.step.state.tokens[0]
        drafted = tokens[(self.first + 1 + self.numbers).clamp_max(len(tokens) - 1)]
        accepted = self.coins[self.turn % COINS]
        self.turn += 1
        return torch.where(self.numbers < accepted, drafted, (drafted + 1) % self.weights.shape.vocab_size)


class GpuWays:
    """Ways over a GPU's engine of one row, by name. A pair is made when it is first asked for."""

    def __init__(self, dense: DecodeEngine | None, engine: DecodeEngine) -> None:
        self.dense, self.engine = dense, engine
        self._made: dict[str, Measured] = {}

    def __getitem__(self, way: str) -> Measured:
        if way not in self._made:
            self._made[way] = self._make(way)
        return self._made[way]

    def _make(self, way: str) -> Measured:
        engine = self.engine
        if way in ("draft_length=0", "sparse", "prompt lookup"):
            own = self._pair(engine.core)
            own.copies = way == "prompt lookup"
            own.ahead = own.ahead and not own.copies
            return own
        coded = draft_weights(engine.weights, "int4")
        pair = self._pair(self._step(coded, engine.predictors if way.startswith("sparse") else {}))
        pair.copied = Pace(MOST_DRAFTED) if way.endswith("copies") else None
        return pair

    def _pair(self, step: DecodeStep) -> Measured:
        return Measured(step, self.engine.weights, self.engine.begin)

    def _step(self, weights: DecodeWeights, predictors: dict[Any, Any]) -> DecodeStep:
        """A step of other weights or predictors over the engine's state."""
        engine, options = self.engine, dataclasses.replace(self.engine.options, context=self.engine.context)
        facts = {key: each.facts(1) for key, each in predictors.items()}
        plan = plan_step(weights.shape, facts, weights.formats, options, engine.plan.engine)
        plan = with_screen(plan, engine.core.screen is not None and weights.lm_head is engine.weights.lm_head, None)
        return DecodeStep(weights, predictors, plan, options, engine.device, None, engine.core)

    def forget(self, way: str) -> None:
        """Give its memory back."""
        pair = self._made.pop(way)
        graphs = pair.step._graphs
        for key in [key for key in graphs if key[0] is pair]:
            del graphs[key]
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self, way: str, prompt: list[int], new: int, sampling: Sampling, length: int | None = None) -> Written:
        """The text of one way. The time of the prompt is not counted."""
        ends, row = [len(prompt)], Row.of_prompt(prompt, len(prompt) + new, sampling)
        found = self[way].generate(row, (), FIXED.get(way, length), lambda _, stop, __: ends.append(stop))
        return self.engine.state.tokens[0, len(prompt) : ends[-1]].tolist(), found

    def write_densely(self, prompt: list[int], new: int, sampling: Sampling) -> Written:
        """Step by step, without looks between them."""
        engine, n = self.dense, len(prompt)
        assert engine is not None
        engine.begin([Row.of_prompt(prompt, n + new, sampling)])
        wait(engine)
        began = time.perf_counter()
        for _ in range(new - 1):
            engine.step(sampling.mode)
        wait(engine)
        taken = time.perf_counter() - began
        return engine.state.tokens[0, n : n + new].tolist(), Acceptance(new - 1, new - 1, seconds=taken)


def wait(engine: DecodeEngine) -> None:
    """Until the device has done everything."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
