"""The line of texts that wait for an engine, and the thread that owns it.

Between two steps texts leave that are done or wanted no longer, and others take their rows.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dejavu_train.engine.inputs import Row
from dejavu_train.engine.rows import News
from dejavu_train.engine.scores import Score
from dejavu_train.extras.serving.metrics import Metrics
from dejavu_train.extras.serving.text import Text
from dejavu_train.ground.errors import UserError

BUG = "the server has a bug; its log has the traceback"
BURST = 8  # steps between two looks at the line, at most. One behind a text that has joined: others often follow it


class Full(Exception):
    """No more texts may wait."""


class LineEnd(Exception):
    """No texts are written any longer."""


@dataclass(frozen=True)
class Event:
    """Progress of a text. finish: stop or length at its end. error: why it ended otherwise, with HTTP's status.

    scores: of tokens, where the row keeps them.
    """

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: str | None = None
    status: int = 500
    acceptance: float | None = None
    scores: Sequence[Score] = ()
    cached: int = 0


@dataclass(eq=False)
class Ticket:
    """A text that is wanted.

    Attributes:
        hear: called with each `Event`, as `Line.deliver` says. streamed: hears more than the end.
        kept, scores: that were not told yet. kept begins with what the answer repeats of the prompt.
        cached: tokens of the prompt whose K and V were there. heard: when it last got tokens.
    """

    row: Row
    text: Text
    hear: Callable[[Event], Any]
    streamed: bool = True
    kept: str = ""
    told: int = 0
    begun: float = field(default_factory=time.perf_counter)
    wanted: bool = True
    scores: list[Score] = field(default_factory=list)
    cached: int = 0
    heard: float | None = None


class Line:
    """Serves tickets with the rows of an engine, in the order in which they came.

    Args:
        rows: `engine.rows.Rows`, or what has its methods. stops: ids that end a text.
        most: tickets that may wait. turn: held while the thread runs.
    Attributes:
        failure: what ended the thread, or None.
        deliver: called with what hands out a round's events, once a round. By itself the thread of the line does.
    """

    def __init__(
        self, rows: Any, stops: Sequence[int], most: int, metrics: Metrics, turn: AbstractContextManager[Any]
    ) -> None:
        self.rows, self.stops, self.most, self.metrics = rows, frozenset(stops), most, metrics
        self._turn, self._changed = turn, threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._served: dict[int, Ticket] = {}
        self._closed, self._burst = False, 1
        self._events: list[tuple[Ticket, Event]] = []
        self.deliver: Callable[[Callable[[], Any]], Any] = lambda hand_out: hand_out()
        self.failure: BaseException | None = None
        self.failed: Callable[[], Any] = lambda: None
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End when the present steps have ended, without waiting for them. Texts that have no end get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        self._thread.join()

    @property
    def reach(self) -> int:
        """Tickets that have a row or a place where no others have."""
        return self.most + self.rows.free + self.rows.taken

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, all or none.

        Raises:
            Full: they would not all have a row or a place. LineEnd: the line is closed.
        """
        with self._changed:
            self.look(len(tickets))
            self._waiting.extend(tickets)
            self._changed.notify()

    def look(self, n: int) -> None:
        """Whether n tickets could be queued now. Raises as `submit`."""
        with self._changed:
            full = n > self.most + self.rows.free - len(self._waiting)
            if self._closed or full:
                self.metrics.add("requests_total", n, 'outcome="refused"')
                raise LineEnd(self._why) if self._closed else Full

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody wants these any longer. Their rows are free before the next step."""
        with self._changed:
            for ticket in tickets:
                ticket.wanted = False
            self._changed.notify()

    def _run(self) -> None:
        try:
            with self._turn:
                while self._next():
                    pass
            self._end()
        except BaseException as error:
            self.failure = error
            self._end()
            self.failed()

    @property
    def _why(self) -> str:
        """Reason for which a line is closed."""
        return f"the server {'is ending' if self.failure is None else 'has failed'}; ask again later"

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            left = [*self._served.values(), *self._waiting]
            self._served.clear()
            self._waiting.clear()
        for ticket in left:
            self._finish(ticket, Event(error=self._why, status=503))
        self._hand_out()

    def _next(self) -> bool:
        """One round: who leaves, who joins, a burst of steps. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._served)
            if self._closed:
                return False
            unwanted = [b for b, ticket in self._served.items() if not ticket.wanted]
            dropped = [ticket for ticket in self._waiting if not ticket.wanted]
            for ticket in dropped:
                self._waiting.remove(ticket)
        for b in unwanted:
            self.rows.leave(b)
            dropped.append(self._served.pop(b))
        self.metrics.add("requests_total", len(dropped), 'outcome="cancelled"')
        self._burst = min(BURST, 2 * self._burst)
        while self.rows.free:
            with self._changed:
                if not self._waiting:
                    break
                ticket = self._waiting.popleft()
            self._join(ticket)
        for news in self.rows.step(self._burst):
            self._tell(news)
        self._hand_out()
        self.metrics.add("steps_total")
        self.metrics.put("rows_active", self.rows.taken)
        self.metrics.put("rows_waiting", len(self._waiting))
        return True

    def _join(self, ticket: Ticket) -> None:
        row = ticket.row
        if row.total == len(row.tokens) and row.scored_from is None:  # nothing is asked of the engine
            self._finish(ticket, Event(ticket.kept, finish="length"))
            return
        try:
            b = self.rows.join(row)
        except Exception as error:  # of this row alone, whatever it is
            self._fail(ticket, error)
            return
        ticket.cached = getattr(self.rows, "reused", 0)
        self.metrics.add("prompt_tokens_total", len(row.tokens))
        self.metrics.add("cached_tokens_total", ticket.cached)
        self._served[b], self._burst = ticket, 1

    def _tell(self, news: News) -> None:
        """Hand on what a row has got. Where that fails it is the end of this text, and of no other."""
        ticket = self._served[news.row]
        try:
            if news.error is not None and not isinstance(news.error, UserError):
                raise news.error
            self._hand_on(ticket, news)
        except Exception as error:
            self._fail(ticket, error)
            if self._served.pop(news.row, None) is not None and not news.done:
                self.rows.leave(news.row)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a text with an error. One of ours leaves its traceback."""
        if not isinstance(error, UserError):
            traceback.print_exception(error)
        self._finish(ticket, Event(error=str(error) if isinstance(error, UserError) else BUG))

    def _hand_on(self, ticket: Ticket, news: News) -> None:
        if news.tokens:
            now = time.perf_counter()
            if ticket.heard is None:
                self.metrics.observe("first_token_seconds", now - ticket.begun)
            else:
                self.metrics.observe("between_tokens_seconds", (now - ticket.heard) / len(news.tokens))
            ticket.heard = now
        before = ticket.text.tokens
        text = ticket.text.add(news.tokens, news.done)
        self.metrics.add("generated_tokens_total", ticket.text.tokens - before)
        unread = len(news.tokens) - (ticket.text.tokens - before)  # behind a stop
        ticket.scores += news.scores[: len(news.scores) - unread]
        finish = None
        if ticket.text.ended or (news.done and news.tokens and news.tokens[-1] in self.stops):
            finish = "stop"
        elif news.done:
            finish = "length"
        if ticket.text.ended and not news.done:
            self.rows.leave(news.row)
        ticket.kept += text
        if finish is None and not ticket.streamed:
            return
        error = None if news.error is None else str(news.error)
        new = ticket.text.tokens - ticket.told
        rate = getattr(self.rows, "acceptance", None)
        scores = tuple(ticket.scores)
        event = Event(ticket.kept, new, finish, error, acceptance=rate, scores=scores, cached=ticket.cached)
        ticket.kept, ticket.told, ticket.scores = "", ticket.text.tokens, []
        if finish is None:
            self._events.append((ticket, event))
        else:
            del self._served[news.row]
            self._finish(ticket, event)

    def _finish(self, ticket: Ticket, event: Event) -> None:
        self.metrics.add("requests_total", 1, f'outcome="{"failed" if event.error else "done"}"')
        self._events.append((ticket, event))

    def _hand_out(self) -> None:
        """One call for all texts, since each wakes the thread that hears them."""
        events, self._events = self._events, []

        def hand_out() -> None:
            for ticket, event in events:
                ticket.hear(event)

        if events:
            self.deliver(hand_out)
