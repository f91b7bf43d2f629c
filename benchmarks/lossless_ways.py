"""Ways to draft over one engine: sparse, other weights, half of the layers, copies. Acceptance may be forced.

A pair is the library's own, except that a table of coins may replace the dense model's choices on the device. That
costs some launches more.
"""

import dataclasses
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.draft_weights import draft_weights
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.lossless import Acceptance, Pace, Verified
from dejavu_train.engine.plan import plan_step, with_screen
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.verification import EnginePair
from dejavu_train.engine.weights import DecodeWeights

COINS = 4096
COPYING = "sparse, 4 bits, and copies"  # of speed alone: what is copied has no forced acceptance
FIXED = {"draft_length=0": 0, "prompt lookup": MOST_DRAFTED}  # lengths of drafts that are not chosen


class Measured(EnginePair):
    """A pair whose acceptance may be forced, and whose drafts may be copied from the text itself.

    Attributes:
        share: None, or the probability that a drafted token is accepted.
        size: None, or how many tokens must have stood before, of prompt lookup.
    """

    share: float | None = None
    size: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self.step.device
        self.coins, self.turn = (
            torch.zeros(n, dtype=torch.int64, device=device) for n in (COINS, 1)
        )  # accepted tokens of each cycle
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
        if self.size is not None:
            self._give(drafted)
            run, drafted = partial(self._verify, mode), 0
        self.step.replay((self, self.share is None, drafted, mode), run)
        return self._look()

    def _give(self, drafted: int) -> None:
        state, position = self.step.state, int(self.step.state.position)
        text = state.tokens[0, : position + 1].tolist()
        given = text[:drafted] if self.share is not None else self._followed(text)[:drafted]
        self.first.copy_(state.position)
        if given:
            state.tokens[0, position + 1 : position + 1 + len(given)] = torch.tensor(given, dtype=torch.int32)
            state.position.add_(len(given))

    def _followed(self, text: list[int]) -> list[int]:
        size = self.size or 0
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[-size:]:
                return text[at + size :]
        return []

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


class Ways:
    """Pairs over one engine by name, and the dense engine's tokens. A pair is made when it is first asked for.

    Args:
        engine: of one row, with the predictors.
    """

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine = engine
        self._made: dict[str, Measured] = {}

    def __getitem__(self, way: str) -> Measured:
        if way not in self._made:
            self._made[way] = self._make(way)
        return self._made[way]

    def _make(self, way: str) -> Measured:
        engine = self.engine
        if way in ("draft_length=0", "sparse"):
            return self.pair(engine.core)
        if way == "prompt lookup":
            lookup = self.pair(engine.core)
            lookup.size, lookup.ahead = 3, False
            return lookup
        if way == "half the layers":
            return self.pair(self._half())
        coded = draft_weights(engine.weights, "int4")
        pair = self.pair(self.step(coded, engine.predictors if way.startswith("sparse") else {}))
        pair.copied = Pace(MOST_DRAFTED) if way == COPYING else None
        return pair

    def forget(self, way: str) -> None:
        """Give its memory back."""
        pair = self._made.pop(way)
        graphs = pair.step._graphs
        for key in [key for key in graphs if key[0] is pair]:
            del graphs[key]
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def pair(self, step: DecodeStep) -> Measured:
        return Measured(step, self.engine.weights, self.engine.begin)

    def step(self, weights: DecodeWeights, predictors: dict[Any, Any]) -> DecodeStep:
        """Of other weights or predictors over the engine's state."""
        engine, options = self.engine, dataclasses.replace(self.engine.options, context=self.engine.context)
        facts = {key: each.facts(1) for key, each in predictors.items()}
        plan = plan_step(weights.shape, facts, weights.formats, options, engine.plan.engine)
        plan = with_screen(plan, engine.core.screen is not None and weights.lm_head is engine.weights.lm_head, None)
        return DecodeStep(weights, predictors, plan, options, engine.device, None, engine.core)

    def _half(self) -> DecodeStep:
        """The first half of the layers, then the final LayerNorm and the LM head."""
        weights, n = self.engine.weights, self.engine.shape.n_layers // 2
        shape = dataclasses.replace(weights.shape, n_layers=n)
        layers = [layer.arranged(False) for layer in weights.layers[:n]]
        step = self.step(dataclasses.replace(weights, shape=shape, layers=layers, drafts={}), {})
        step.caches = self.engine.core.caches  # verification writes those of all layers
        return step

    def write(
        self, way: str, prompt: list[int], new: int, sampling: Sampling, length: int | None = None
    ) -> tuple[list[int], Acceptance]:
        """The text of one way, and what was accepted. The time of the prompt is not counted."""
        ends, length = [len(prompt)], FIXED.get(way, length)
        row = Row.of_prompt(prompt, len(prompt) + new, sampling)
        found = self[way].generate(row, (), length, lambda _, stop, __: ends.append(stop))
        return self.engine.state.tokens[0, len(prompt) : ends[-1]].tolist(), found

    def write_densely(self, engine: DecodeEngine, prompt: list[int], new: int, sampling: Sampling) -> Acceptance:
        """Of an engine without drafts, step by step, without looks between them."""
        n = len(prompt)
        engine.begin([Row.of_prompt(prompt, n + new, sampling)])
        wait(engine)
        began = time.perf_counter()
        for _ in range(new - 1):
            engine.step(sampling.mode)
        wait(engine)
        return Acceptance(new - 1, new - 1, seconds=time.perf_counter() - began)


def wait(engine: DecodeEngine) -> None:
    """Until the device has done everything."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
