"""Ends all ranks when one ends: over a connection of each to the first, which the system closes when a process dies.

A kernel that waits for a dead GPU waits for ever, and so does the host that waits for the kernel. So a thread watches.
One rank says why in one line, and all leave with ``RANK_LOST``.
"""

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from dejavu_train.ground.errors import UserError

RANK_LOST = 3  # exit code
STUCK_SECONDS = 300.0  # in one look at the device: longer than kernels are compiled for
LOOK_SECONDS = 1.0
_BYE = b"bye"


def say_and_leave(line: str | None) -> NoReturn:
    """Print a line, where there is one, and end this process at once, whatever its threads wait for."""
    if line is not None:
        print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(RANK_LOST)


class Watch:
    """Watch of a rank.

    Args:
        connections: of the first rank by rank those to all others, of another one that to rank 0.
        stuck_seconds: after which a rank that still waits for others ends them all.
        leave: what ends this process, with the line to print or None.
    """

    def __init__(
        self, rank: int, world: int, connections: dict[int, socket.socket],
        leave: Callable[[str | None], object] = say_and_leave, stuck_seconds: float = STUCK_SECONDS,
    ) -> None:  # fmt: skip
        self.rank, self.world, self._leave, self.stuck_seconds = rank, world, leave, stuck_seconds
        self._peers, self._held = dict(connections), {peer: b"" for peer in connections}
        self._selector = selectors.DefaultSelector()
        for peer, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._once, self._entered = threading.Lock(), 0.0
        self._over = False
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this rank waits for others, not for ever."""
        before = self._entered
        self._entered = before or time.monotonic()
        try:
            yield
        finally:
            self._entered = before

    def bye(self) -> None:
        """This rank has done all that it was asked for."""
        if not self._over:
            self._over = True
            self._tell(_BYE)

    def fail(self, reason: str) -> None:
        """This rank ends because of an error that it prints itself, or that the first rank prints."""
        self._over = True
        self._tell(b"end " + " ".join(reason.split()).encode())

    def lost(self) -> NoReturn:
        """A sum has failed: wait for the news of whoever is gone, and end."""
        time.sleep(2 * LOOK_SECONDS)
        self._end(f"a rank of {self.world} does not answer; all ranks end", True)
        raise UserError("a rank does not answer")

    def _run(self) -> None:
        while self._selector.get_map() and not self._over:
            for key, _ in self._selector.select(LOOK_SECONDS):
                self._hear(key.data)
            if self._entered and time.monotonic() - self._entered > self.stuck_seconds:
                waited = f"rank {self.rank} of {self.world} has waited {self.stuck_seconds:.0f} s for the others"
                self._end(f"{waited}; all ranks end", True)

    def _hear(self, peer: int) -> None:
        try:
            data = self._peers[peer].recv(4096)
        except OSError:
            data = b""
        self._held[peer] += data
        *lines, self._held[peer] = self._held[peer].split(b"\n")
        for line in lines:
            if line == _BYE:
                self._forget(peer)
                return
            self._end(self._told(peer, line.removeprefix(b"end ").decode(errors="replace")), self.rank == 0)
        if not data:
            self._end(self._told(peer, "it was killed, or has crashed"), self.rank == min({0, 1} - {peer}))

    def _told(self, peer: int, reason: str) -> str:
        return f"rank {peer} of {self.world} has ended ({reason}); all ranks end"

    def _forget(self, peer: int) -> None:
        self._selector.unregister(self._peers[peer])

    def _end(self, line: str, aloud: bool) -> None:
        if not self._over and self._once.acquire(blocking=False):
            self._tell(b"end " + line.encode())
            self._leave(line if aloud else None)

    def _tell(self, line: bytes) -> None:
        for connection in self._peers.values():
            try:
                connection.sendall(line + b"\n")
            except OSError:  # whoever is gone
                pass


def connect(
    rank: int, world: int, address: str, port: int, secret: int, server: socket.socket | None
) -> dict[int, socket.socket]:
    """The connections of a watch. server: of rank 0, which listens at the port.

    Raises:
        OSError: a rank does not come within a minute.
    """
    word = secret.to_bytes(8, "little")
    if server is None:
        connection = socket.create_connection((address, port), timeout=60)
        connection.sendall(word + rank.to_bytes(4, "little"))
        connection.settimeout(None)
        return {0: connection}
    found: dict[int, socket.socket] = {}
    server.settimeout(60)
    while len(found) < world - 1:
        connection, _ = server.accept()
        connection.settimeout(60)
        given = connection.recv(12, socket.MSG_WAITALL)
        if given[:8] != word:
            connection.close()
            continue
        connection.settimeout(None)
        found[int.from_bytes(given[8:], "little")] = connection
    server.close()
    return found
