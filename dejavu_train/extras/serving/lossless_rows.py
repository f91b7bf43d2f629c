"""The one row of a lossless engine, with the methods of `engine.rows.Rows`: a step is a cycle."""

from collections.abc import Iterator, Sequence

from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Row, check_rows
from dejavu_train.engine.lossless import Acceptance, Cycle
from dejavu_train.engine.rows import News
from dejavu_train.engine.session import NO_SCORES, Session
from dejavu_train.ground.errors import UserError


class LosslessRows:
    """Drafts sparsely and verifies densely, one text at a time.

    Raises:
        UserError: an engine without verification.
    """

    def __init__(self, engine: Session, stops: Sequence[int], draft: Draft | None = None) -> None:
        self.engine, self.stops, self.pair = engine, stops, engine.pair(draft or Draft())
        self._row: Row | None = None
        self._cycles: Iterator[Cycle] = iter(())
        self._held, self._done = 0, True
        self._tokens: list[int] = []  # written and not told yet
        self._counts = Acceptance()

    @property
    def free(self) -> int:
        """1 where a text may begin."""
        return int(self._row is None)

    @property
    def taken(self) -> int:
        """1 while a text is written."""
        return int(self._row is not None)

    @property
    def acceptance(self) -> float:
        """The share of this text's drafted tokens that were accepted."""
        return self._counts.rate

    def join(self, row: Row) -> int:
        """See `Rows.join`. Raises UserError also for a row that keeps log-probabilities."""
        if row.scored_from is not None:
            raise UserError(NO_SCORES)
        check_rows([row], 1, self.engine.context, self.engine.shape)
        begun = self.pair.begin(row, self.stops)
        self._row, self._cycles, self._counts = row, self.pair.cycles(row, begun), Acceptance()
        self._held, self._done, self._tokens = begun.held, begun.done, list(begun.new)
        return 0

    def leave(self, b: int) -> None:
        """See `Rows.leave`."""
        self._row = None

    def step(self, n: int = 1) -> list[News]:
        """One cycle."""
        if self._row is None:
            return []
        error = None
        if not self._done:
            try:
                cycle = next(self._cycles)
            except UserError as refusal:
                error = refusal
            else:
                found = cycle.verified
                self._counts.add(found, found.held - self._held, cycle.seconds, cycle.copied)
                self._held, self._done = found.held, found.done
                self._tokens += found.new
        done = self._done or error is not None
        tokens, self._tokens = self._tokens, []
        if done:
            self._row = None
        return [News(0, tokens, done, error)]
