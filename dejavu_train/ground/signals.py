"""SIGINT, SIGTERM and SIGHUP end a command in one way: what is written is finished or taken back, exit 128 + number.

By default a signal raises :class:`Interrupted` where it arrives. What must end at a place of its own choosing, such as
a training loop between two steps, defers it and asks ``pending``. A second signal is never deferred.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

HEARD = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
_deferring = 0
_pending: int | None = None
_raised: int | None = None


class Interrupted(BaseException):
    """A signal asked us to end, not an error, so ``except Exception`` lets it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


def _arrived(number: int, _frame: FrameType | None) -> None:
    global _pending, _raised
    if not _deferring or _pending is not None:
        _raised = number
        raise Interrupted(number)
    _pending = number


_other_hook = sys.unraisablehook


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    """An exception in a callback of the interpreter, as a weak reference's, is dropped: such a signal comes again."""
    if isinstance(lost.exc_value, Interrupted):
        again = threading.Timer(0.05, os.kill, (os.getpid(), lost.exc_value.number))
        again.daemon = True
        again.start()
    else:
        _other_hook(lost)


def hear() -> dict[int, object]:
    """Take the signals, also back from a library that took them. Returns who had them."""
    global _other_hook
    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        if sys.unraisablehook is not _unraisable:
            _other_hook, sys.unraisablehook = sys.unraisablehook, _unraisable
        for number in HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, _arrived)
    return before


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Within the context signals raise :class:`Interrupted`.

    A signal can arrive inside a library that answers any exception with one of its own: a compiled module that is being
    imported says ImportError. So an exception that leaves the context after a signal was raised is the signal's.
    """
    global _raised
    before = hear()
    _raised = None
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        if _raised is not None:
            raise Interrupted(_raised) from error
        raise
    finally:
        if sys.unraisablehook is _unraisable:
            sys.unraisablehook = _other_hook
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within the context the first signal waits: until ``stop_if_pending`` is called, or until the context ends.

    An exception that leaves the context meanwhile is the signal's. Lightning ends a fit by SystemExit with no code.
    """
    global _deferring, _pending
    _deferring += 1
    ended = False
    try:
        yield
    except Interrupted:  # by this signal at its place, or by a second one
        ended = True
        raise
    finally:
        _deferring -= 1
        waiting = _pending
        if not _deferring:
            _pending = None
            if waiting is not None and not ended:
                raise Interrupted(waiting)


def pending() -> bool:
    """Whether a signal waits."""
    return _pending is not None


def stop_if_pending() -> None:
    """Raise :class:`Interrupted` if a signal waits."""
    if _pending is not None:
        raise Interrupted(_pending)
