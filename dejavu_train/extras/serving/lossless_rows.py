"""The one row of a lossless engine, with the methods of `engine.rows.Rows`: a step is a cycle."""

from collections.abc import Sequence

from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Row, check_rows
from dejavu_train.engine.lossless import Acceptance, Verified
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
        self._verified = Verified(0, 0, 0, True)
        self._shown = 0
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
        self._verified = self.pair.begin(row, self.stops)
        self._row, self._shown, self._counts = row, len(row.tokens), Acceptance()
        return 0

    def leave(self, b: int) -> None:
        """See `Rows.leave`."""
        self._row = None

    def step(self, n: int = 1) -> list[News]:
        """One cycle."""
        row, error = self._row, None
        if row is None:
            return []
        held = self._verified.held
        if not self._verified.done:
            try:
                drafted = min(self.pair.pace.next(), row.total - held - 1)
                self._verified = self.pair.cycle(drafted, row.sampling.mode)
                self._counts.add(self._verified, self._verified.held - held, 0.0)
            except UserError as refusal:
                error = refusal
        done = self._verified.done or error is not None
        tokens = self.engine.state.tokens[0, self._shown : self._verified.held].tolist()
        self._shown = self._verified.held
        if done:
            self._row = None
        return [News(0, tokens, done, error)]
