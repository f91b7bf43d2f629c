"""Rows that join and leave an engine between two steps, so that callers share its steps.

A row has its own prompt, sampling, seed and end. What it writes does not depend on the others (see
docs/guides/many-callers.md for where this holds). Who uses this has the engine to himself.
"""

import dataclasses
from collections.abc import Sequence

from dejavu_train.engine.inputs import Row
from dejavu_train.engine.session import Session
from dejavu_train.errors import UserError


@dataclasses.dataclass(frozen=True)
class News:
    """What steps have given a row: new tokens, whether it is done, and what was not finite, if anything was."""

    row: int
    tokens: list[int]
    done: bool
    error: UserError | None = None


class Rows:
    """The rows of an engine, each its own.

    Args:
        stops: at most 8 ids that end any row.
    """

    def __init__(self, engine: Session, stops: Sequence[int]) -> None:
        self.engine = engine
        self._taken: dict[int, Row] = {}
        self._shown = [0] * engine.batch
        engine.open(stops)

    @property
    def free(self) -> int:
        """Rows that may join."""
        return self.engine.batch - len(self._taken)

    @property
    def taken(self) -> int:
        """Rows that are not done."""
        return len(self._taken)

    def join(self, row: Row) -> int:
        """Begin a row. Its prompt is run now, while the others wait. Returns its number until it is done.

        Raises:
            UserError: no free row, one that does not fit, or numbers that are not finite.
        """
        if not self.free:
            raise UserError(f"this engine holds {self.engine.batch} rows, all taken; wait until one is done")
        b = next(b for b in range(self.engine.batch) if b not in self._taken)
        self.engine.place(b, row)
        self._taken[b], self._shown[b] = row, len(row.tokens)
        return b

    def leave(self, b: int) -> None:
        """Row b is wanted no longer."""
        self.engine.end(b)
        del self._taken[b]

    def step(self, n: int = 1) -> list[News]:
        """At most n tokens more for every row. A row that is done is free again."""
        if not self._taken:
            return []
        modes = {row.sampling.mode for row in self._taken.values()}
        self.engine.steps(n, modes.pop() if len(modes) == 1 else "mixed")
        held, done, faults = self.engine.read(self.engine.batch)
        news = []
        for b in sorted(self._taken):
            tokens = self.engine.state.tokens[b, self._shown[b] : held[b]].tolist()
            self._shown[b] = max(self._shown[b], held[b])
            news.append(News(b, tokens, done[b], faults.get(b)))
            if done[b]:
                del self._taken[b]
        return news
