"""Threads that run compiled code together, on the command of the thread that calls."""

import os
import threading
import weakref
from typing import Any

import numpy as np

from dejavu_train.engine.cpu import arrays
from dejavu_train.engine.cpu.entry_point import prepare
from dejavu_train.engine.cpu.step import MODE, N_STEPS, SCORE, TAIL_ONLY
from dejavu_train.engine.cpu.threads import new_control
from dejavu_train.ground.errors import UserError


class Team:
    """The caller's thread and ``n_threads`` - 1 others, which wait for it.

    Args:
        entry: of `entry_point`. Compiled here, or read from the cache.
        groups: its arguments before control and command.
    Attributes:
        command: words for the compiled code, and from it.
    """

    def __init__(self, entry: Any, groups: tuple[Any, ...], n_threads: int) -> None:
        self._entry, self.n_threads = entry, n_threads
        self.command = np.zeros(8, np.int64)
        self._arguments = (*groups, new_control(), self.command)
        prepare(entry, (*self._arguments, 0, n_threads))
        for thread in range(1, n_threads):
            threading.Thread(
                target=entry, args=(*self._arguments, thread, n_threads), name=f"cpu-engine-{thread}", daemon=True
            ).start()
        self._owner = os.getpid()
        self._running = threading.Lock()  # held while the threads run compiled code
        self._close = weakref.finalize(self, _send_home, entry, self._arguments, n_threads, self._owner, self._running)

    def close(self) -> None:
        """Send the threads home. Done by itself when the team is forgotten."""
        self._close()

    def check_alive(self) -> None:
        """Raise :class:`UserError` where the threads are not in this process, or were sent home."""
        if os.getpid() != self._owner:
            raise UserError("a forked process has no threads of this engine; build a new one there")
        if not self._close.alive:
            raise UserError("this engine was closed; build a new one")

    def call(self, n_steps: int, mode: str, score: bool = False, tail_only: bool = False) -> None:
        """Run what the command says, and return when all threads are done."""
        self.check_alive()
        with self._running:
            self.check_alive()  # closed by another thread while this one waited
            command = self.command
            command[MODE] = arrays.GREEDY if mode == "greedy" else arrays.SAMPLED
            command[N_STEPS], command[SCORE], command[TAIL_ONLY] = n_steps, score, tail_only
            self._entry(*self._arguments, 0, self.n_threads)


def _send_home(entry: Any, arguments: tuple[Any, ...], n_threads: int, owner: int, running: threading.Lock) -> None:
    if os.getpid() != owner or not running.acquire(timeout=1.0):
        return  # after a fork there are no threads; while another thread decodes, they end with the process
    arguments[-1][N_STEPS] = -1
    if n_threads > 1:
        entry(*arguments, 0, n_threads)
