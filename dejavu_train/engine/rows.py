"""Rows that join and leave an engine between two steps, so that callers share its steps.

A row has its own prompt, sampling, seed and end. What it writes does not depend on the others (see
docs/guides/many-callers.md for where this holds). Who uses this has the engine to himself.

An engine whose steps run beside the caller gets its next steps before the caller looks at the last ones. A row that has
left meanwhile took steps too many. Nobody hears of them, and who joins in its place writes over them.
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence

from dejavu_train.engine.inputs import Row
from dejavu_train.engine.scores import Score
from dejavu_train.engine.session import Session, Sight
from dejavu_train.ground.errors import UserError


@dataclasses.dataclass(frozen=True)
class News:
    """News of a row after steps: new tokens, whether it is done, and what was not finite, if anything was.

    scores: of a row that keeps them, those of the new tokens. The first news have those of the prompt in front.
    """

    row: int
    tokens: list[int]
    done: bool
    error: Exception | None = None
    scores: list[Score] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Seat:
    """A row in its place. shown: tokens that the caller knows. reach: that it has at most, by the steps asked for.

    scores: that the caller does not know.
    """

    row: Row
    shown: int
    reach: int
    scores: list[Score] = dataclasses.field(default_factory=list)

    def score(self, engine: Session, b: int) -> None:
        """Keep the score of the token that the last step gave, where it is wanted."""
        if self.row.scored_from is not None and self.reach > self.row.scored_from:
            self.scores.append(engine.score_last(b, self.row.top))


@dataclasses.dataclass(frozen=True)
class StepsAhead:
    """Steps that were asked for: who had which place, and the call that waits for what they gave."""

    seats: Mapping[int, Seat]
    wait: Callable[[], Sight]


class Rows:
    """The rows of an engine, each its own.

    Args:
        stops: at most 8 ids that end any row.
    Attributes:
        reused: positions of the last row that joined whose K and V were there already.
    """

    def __init__(self, engine: Session, stops: Sequence[int]) -> None:
        self.engine = engine
        self._seats: dict[int, Seat] = {}
        self._arriving: dict[int, tuple[Row, Generator[None, None, list[Score]]]] = {}
        self.reused = 0
        self._ahead: StepsAhead | None = None
        engine.open(stops)

    @property
    def free(self) -> int:
        """Rows that may join."""
        return self.engine.batch - self.taken

    @property
    def taken(self) -> int:
        """Rows that are not done."""
        return len(self._seats) + len(self._arriving)

    def join(self, row: Row) -> int:
        """Begin a row. A chunk of its prompt is run now, while the others wait. Returns its number until it is done.

        It takes the place whose last prompt began as its own does, whose K and V it then has.

        Raises:
            UserError: no free row, one that does not fit, or numbers that are not finite.
        """
        if not self.free:
            raise UserError(f"this engine holds {self.engine.batch} rows, all taken; wait until one is done")
        free = [b for b in range(self.engine.batch) if b not in self._seats and b not in self._arriving]
        found = {b: self.engine.reusable(b, row) for b in free}
        b = max(free, key=found.__getitem__)
        self.reused = found[b]
        self._arriving[b] = row, self.engine.placing(b, row, self.reused)
        self._advance(b)
        return b

    def _advance(self, b: int) -> None:
        """Run the next chunk of a row's prompt. Behind the last one it has its seat."""
        row, placing = self._arriving[b]
        try:
            next(placing)
        except StopIteration as ended:
            del self._arriving[b]
            seat = Seat(row, len(row.tokens), row.prefilled + 1, ended.value)
            seat.score(self.engine, b)
            self._seats[b] = seat
        except BaseException:
            del self._arriving[b]
            raise

    def leave(self, b: int) -> None:
        """Row b is wanted no longer."""
        if b in self._arriving:
            self._arriving.pop(b)[1].close()
        else:
            self.engine.end(b)
            del self._seats[b]

    def step(self, n: int = 1) -> list[News]:
        """At most n tokens more for every row. A row that is done is free again.

        While a prompt is unfinished it is one chunk of it, and one token for the others.
        Where steps run beside the caller, news are of the call before. The first call has none.
        """
        refused: list[News] = []
        if self._arriving:
            n, b = 1, next(iter(self._arriving))
            try:
                self._advance(b)
            except Exception as error:  # of this row alone, whatever it is
                refused.append(News(b, [], True, error))
        ahead, taken = self._ahead, self._take(n)
        if self.engine.beside and not self.engine.scoring:
            self._ahead, taken = taken, None
        else:  # logits are looked at behind every step
            self._ahead = None
        return refused + [news for each in (ahead, taken) if each is not None for news in self._tell(each)]

    def _take(self, n: int) -> StepsAhead | None:
        """Ask for as many steps as some row may need. None where the steps ahead are the last of all rows."""
        known = {} if self._ahead is None else self._ahead.seats
        scored = [(b, seat) for b, seat in self._seats.items() if seat.row.scored_from is not None]
        self.engine.scoring = bool(scored)
        if scored:
            done = self.engine.read(self.engine.batch)[1]
            scored = [(b, seat) for b, seat in scored if not done[b]]
        n = min(1 if scored else n, max((seat.row.total - seat.reach for seat in self._seats.values()), default=0))
        if n > 0:
            modes = {seat.row.sampling.mode for seat in self._seats.values()}
            n = self.engine.steps(n, modes.pop() if len(modes) == 1 else "mixed")
            for seat in self._seats.values():
                seat.reach = min(seat.row.total, seat.reach + n)
            for b, seat in scored:
                seat.score(self.engine, b)
        elif all(known.get(b) is seat for b, seat in self._seats.items()):
            return None
        return StepsAhead(dict(self._seats), self.engine.sight())

    def _tell(self, taken: StepsAhead) -> list[News]:
        present = [b for b, seat in sorted(taken.seats.items()) if self._seats.get(b) is seat]
        if not present:
            return []
        sight, news = taken.wait(), []
        for b in present:
            seat, held = self._seats[b], sight.held[b]
            tokens = sight.tokens[b, seat.shown : held].tolist()
            seat.shown = max(seat.shown, held)
            news.append(News(b, tokens, sight.done[b], sight.faults.get(b), seat.scores))
            seat.scores = []
            if sight.done[b]:
                del self._seats[b]
        return news
