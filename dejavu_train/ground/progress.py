"""Messages of commands on stderr. Progress and remaining time: a bar on a terminal, else a line every half minute."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)
SECONDS = 30.0  # between two lines
T = TypeVar("T")


def set_up_logging() -> None:
    """Our lines on stderr, without those of the libraries below."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)


class Progress:
    """Counts ``done`` of ``total`` units. A context manager.

    Without a terminal a thread writes the lines, so that one comes even where a single update takes minutes.

    Args:
        what: in a word or two, for instance ``collecting``.
        total: units in all. None where nobody knows.
        unit: its name in the singular, for instance ``token``.
        done: units that were done before.
        clock: seconds that never go back.
        seconds: between two lines.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = SECONDS,
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self._first, self._clock, self._seconds = done, clock, seconds
        self._began = clock()
        self._values = ""
        self._ended = threading.Event()
        self._bar: Any = None
        if sys.stderr.isatty():
            scale = total is None or total >= 10_000
            self._bar = tqdm(
                total=total, initial=done, desc=what, unit=unit, unit_scale=scale, leave=False, dynamic_ncols=True
            )
        else:
            threading.Thread(target=self._write_lines, name="progress", daemon=True).start()

    def update(self, units: int = 1) -> None:
        self.done += units
        if self._bar is not None:
            self._bar.update(units)

    def describe(self, what: str, values: str = "") -> None:
        """Say what is done now, and the latest values beside it."""
        self.what, self._values = what, values
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.set_postfix_str(values)

    def close(self) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()

    def line(self) -> str:
        """Where the work stands: units, and how long the rest takes at the rate so far."""
        text = f"{self.what}: {self.done:,} {self.unit}s"
        if self.total is not None:
            text = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}s"
            finished, left = self.done - self._first, self.total - self.done
            if finished > 0 and left > 0:
                text += f", {_duration((self._clock() - self._began) * left / finished)} left"
        return f"{text}, {self._values}" if self._values else text

    def _write_lines(self) -> None:
        while not self._ended.wait(self._seconds):
            logger.info("%s", self.line())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def progress(items: Iterable[T], what: str, total: int | None, unit: str) -> Iterator[T]:
    """``items`` one by one, each a unit of progress."""
    with Progress(what, total, unit) as shown:
        for item in items:
            yield item
            shown.update()


def _duration(seconds: float) -> str:
    """Seconds in words.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
