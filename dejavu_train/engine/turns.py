"""One caller at a time, in the order in which they came."""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from dejavu_train.ground.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class Turns:
    """A lock that is given to callers in the order in which they asked, as a context manager.

    Raises:
        UserError: the caller has the turn already, for instance in a streamer that generates by itself. ``error`` in
            its place.
    """

    def __init__(self, error: type[UserError] = UserError) -> None:
        self._error = error
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None

    def __enter__(self) -> "Turns":
        caller, place = threading.get_ident(), object()
        if self._process != os.getpid():  # whoever had the turn is not in a forked process
            self._begin_anew()
        with self._condition:
            if self._owner == caller:
                raise self._error(
                    "this engine is in the middle of a call of the same thread, so a streamer or callback cannot call"
                    " it; wait for the call to end, or build another engine or model"
                )
            self._waiting.append(place)
            try:
                self._condition.wait_for(lambda: self._owner is None and self._waiting[0] is place)
                self._owner = caller
            finally:  # after Ctrl-C as well: those behind must not wait for this place
                self._waiting.remove(place)
                self._condition.notify_all()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._condition:
            self._owner = None
            self._condition.notify_all()


def in_turn(method: F) -> F:
    """A method that is run while its object's ``turns`` is held."""

    @functools.wraps(method)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turns:
            return method(self, *args, **kwargs)

    return waits  # type: ignore[return-value]
