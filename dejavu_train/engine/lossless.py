"""Lossless decoding: a sparse draft of a few tokens, and the dense model of the same weights that verifies them.

A *cycle* drafts g tokens by sparse steps. One pass of the dense model then runs the last token and all drafted ones
together. Behind each it says which token it chooses itself: the argmax of its logits, plus noise where
it samples. The noise follows from seed, position and token alone. Drafted tokens stay while they are its choices, and
its first choice that differs is written in their place. So the text is the dense model's own, whatever was drafted.

An engine says how its `Pair` of draft and verification runs. What is the same for all engines stands here.
"""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dejavu_train.engine.inputs import Row

FORGET = 0.95  # of what was seen, with each cycle
PROBE = 16, 256  # cycles without a draft before one is tried again, at first and at most
FIRST = 0, 1, 3, 5, 7  # measured before others: with the token before them an even number, which fills tiles
SAME = 3  # tokens that must have stood before, for what followed them to be a draft
EXPLORE = 24  # cycles, after which a neighbouring length is tried


@dataclasses.dataclass(frozen=True)
class Verified:
    """Outcome of one cycle.

    Attributes:
        drafted, accepted: tokens. held: tokens of the sequence, all of them the dense model's. done: it has ended.
        new: the last of them, which this cycle wrote.
    """

    drafted: int
    accepted: int
    held: int
    done: bool
    new: Sequence[int] = ()


@dataclasses.dataclass
class Acceptance:
    """Counts of drafted and accepted tokens, over one call or several.

    Attributes:
        tokens: written. cycles: passes of the dense model. drafting: cycles with a draft. seconds: of all cycles.
        copied: drafted tokens that were copied from the text itself, and not by the sparse model.
    """

    tokens: int = 0
    cycles: int = 0
    drafting: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    copied: int = 0

    def add(self, verified: Verified, tokens: int, seconds: float, copied: int = 0) -> None:
        """Count a cycle that wrote so many tokens."""
        self.copied += copied
        self.tokens, self.cycles, self.seconds = self.tokens + tokens, self.cycles + 1, self.seconds + seconds
        self.drafting += verified.drafted > 0
        self.drafted, self.accepted = self.drafted + verified.drafted, self.accepted + verified.accepted

    @property
    def rate(self) -> float:
        """The share of drafted tokens that were accepted. 0 where none was drafted."""
        return self.accepted / max(self.drafted, 1)

    def report(self) -> dict[str, float]:
        """For results.json. ``mean_length``: accepted tokens of a draft. ``saved``: the share of dense passes."""
        return {
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "copied": self.copied,
            "acceptance": self.rate,
            "mean_length": self.accepted / max(self.drafting, 1),
            "saved": 1 - self.cycles / self.tokens if self.tokens else 0.0,
        }


class Pace:
    """Chooses how many tokens are drafted, so that tokens a second are most.

    With acceptance a, g drafted tokens give 1 + a + ... + a^g tokens on average. How long a cycle takes is measured for
    each g that was tried, and lies on a line for the others.

    Args:
        most: tokens of a draft at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.accepted, self.rejected = 3.0, 1.0
        self.seconds: dict[int, float] = {}
        self._tried: set[int] = set()
        self._cycles, self._idle, self._patience = 0, 0, PROBE[0]

    def note(self, verified: Verified, seconds: float) -> None:
        """Learn from a cycle."""
        g = verified.drafted
        if g not in self._tried:  # the first cycle of a length may compile, record or fault pages in
            self._tried.add(g)
            return
        known = self.seconds.get(g, seconds)
        self.seconds[g] = known + 0.2 * (min(seconds, 2 * known) - known)  # a busy moment counts little
        if g:
            self.accepted = FORGET * self.accepted + verified.accepted
            self.rejected = FORGET * self.rejected + (verified.accepted < g)

    def expected(self, g: int) -> float:
        """Seconds of a cycle: measured, or on a line through the shortest and the longest draft that were."""
        low, high = min(self.seconds), max(self.seconds)
        if g in self.seconds or low == high:
            return self.seconds.get(g, self.seconds[low])
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (g - low)

    def rate(self, g: int) -> float:
        """Tokens a second with drafts of g tokens, by what is known."""
        a = self.accepted / (self.accepted + self.rejected)
        return sum(a**i for i in range(g + 1)) / self.expected(g)

    def best(self) -> int:
        """The length that pays most by what is known."""
        return max(range(self.most + 1), key=self.rate)

    def next(self) -> int:
        """Tokens to draft now."""
        if self.most == 0:
            return 0
        self._cycles += 1
        for first in FIRST:
            if first <= self.most and first not in self.seconds:
                return first
        best = self.best()
        if best:
            self._idle, self._patience = 0, PROBE[0]
            if self._cycles % EXPLORE == 0:
                return min(best + 1, self.most)
            return max(best - 1, 1) if self._cycles % EXPLORE == EXPLORE // 2 else best
        self._idle += 1
        if self._idle < self._patience:
            return 0
        self._idle, self._patience = 0, min(2 * self._patience, PROBE[1])
        return min(2, self.most)


class Copies:
    """Drafts without a model: what followed the last tokens where they stood before in the text.

    Args:
        text: tokens so far.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # where a token follows these, last
        self.add(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens that come behind."""
        for token in tokens:
            if len(self.text) >= SAME:
                self._behind[tuple(self.text[-SAME:])] = len(self.text)
            self.text.append(token)

    def draft(self, most: int) -> list[int]:
        """Up to so many tokens, none where the last ones are new."""
        at = self._behind.get(tuple(self.text[-SAME:]))
        return [] if at is None else self.text[at : at + most]


class Pair(ABC):
    """A draft and its verification over one sequence.

    Attributes:
        pace: keeps what it has learned between calls. copied: the same of drafts that are copied, or None: none are.
        clock: seconds by which lengths of drafts are judged.
        ahead: whether a cycle is queued before the host looks at the one before it.
    """

    pace: Pace
    copied: Pace | None = None
    ahead = False
    clock = staticmethod(time.perf_counter)
    _asked = 0

    @abstractmethod
    def begin(self, row: Row, stops: Sequence[int]) -> Verified:
        """Run the prompt densely, by the dense model's weights, and choose what follows it. See `Session.begin`."""

    @abstractmethod
    def cycle(self, drafted: int, mode: str) -> Verified:
        """Draft at most so many tokens and verify them.

        Raises:
            UserError: numbers of the dense model that are not finite.
        """

    def queue(self, drafted: int, mode: str) -> Callable[[], Verified]:
        """Begin what `cycle` does. What is returned waits for its end, and may be called behind the next `queue`.

        A cycle behind the end of a text is for nothing, and does no harm within the limit of tokens.
        """
        found = self.cycle(drafted, mode)
        return lambda: found

    @abstractmethod
    def verify(self, given: Sequence[int], mode: str) -> Verified:
        """A cycle whose tokens were drafted elsewhere, 0 to 7 of them. Raises as `cycle`."""

    def agreed(self, seconds: float) -> float:
        """How long a cycle took, the same for all processes that decode together: lengths of drafts follow from it."""
        return seconds

    def _copy(self, copies: Copies, most: int) -> list[int]:
        """A draft from the text, where that is faster than one of the sparse model by what is known."""
        if self.copied is None or not self.pace.seconds:
            return []
        given = copies.draft(min(self.copied.most, most))
        if not given or not self.copied.seconds:
            return given
        self._asked += 1
        pays = self.copied.rate(len(given)) >= self.pace.rate(self.pace.best())
        return given if pays or self._asked % EXPLORE == 0 else []

    def generate(
        self,
        row: Row,
        stops: Sequence[int],
        length: int | None,
        show: Callable[[int, int, Sequence[int]], Any],
    ) -> Acceptance:
        """Continue a prompt to its end.

        Args:
            length: of each draft, None = chosen.
            show: called as (start, stop, tokens) when tokens of these positions are verified. The sequence may hold
                more by then, of a cycle that was queued. True where it wants no more.
        """
        acceptance, shown = Acceptance(), len(row.tokens)
        verified = self.begin(row, stops)
        ended = show(shown, verified.held, verified.new)
        shown = verified.held
        if ended:
            return acceptance
        for cycle in self.cycles(row, verified, length):
            verified = cycle.verified
            acceptance.add(verified, verified.held - shown, cycle.seconds, cycle.copied)
            if show(shown, verified.held, verified.new):
                break
            shown = verified.held
        return acceptance

    def cycles(self, row: Row, verified: Verified, length: int | None = None) -> Iterator["Cycle"]:
        """One cycle after another to the end of a text. How long each took teaches how long drafts should be.

        Args:
            verified: what `begin` returned for the row. length: see `generate`.
        Raises:
            UserError: as `cycle`.
        """
        copies, looked, current = Copies(row.tokens), self.clock(), None
        while not verified.done:
            copies.add(verified.new)
            # The last token is the dense model's own: a draft of it would be for nothing.
            most = row.total - verified.held - 1
            given = self._copy(copies, most) if length is None else []
            if current is None:
                current = self._start(given, length, most, row.sampling.mode)
            left = most - current.drafted - 1  # if all of it is accepted
            # A text that repeats itself is awaited, since it may be copied.
            ahead = self._start([], length, left, row.sampling.mode) if self.ahead and not given and left >= 0 else None
            verified = current.look()
            now = self.clock()
            seconds, looked = self.agreed(now - max(looked, current.started)), now
            current.pace.note(verified, seconds)
            yield Cycle(verified, seconds, current.drafted if current.pace is self.copied else 0)
            current = ahead

    def _start(self, given: Sequence[int], length: int | None, most: int, mode: str) -> "_Begun":
        """Begin a cycle, of tokens that were copied or of at most ``most`` that are drafted."""
        started = self.clock()
        if given and self.copied is not None:
            found = self.verify(given, mode)
            return _Begun(lambda: found, len(given), self.copied, started)
        drafted = min(self.pace.next() if length is None else length, most)
        return _Begun(self.queue(drafted, mode), drafted, self.pace, started)


@dataclasses.dataclass(frozen=True)
class Cycle:
    """A cycle that has ended: its seconds, and how many of its drafted tokens were copied from the text."""

    verified: Verified
    seconds: float
    copied: int


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A cycle that was begun: what waits for it, its tokens at most, who learns from it, and when."""

    look: Callable[[], Verified]
    drafted: int
    pace: Pace
    started: float
