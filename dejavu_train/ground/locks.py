"""Who works on a folder: each holder has a file of its own beside the others', and looks at theirs before it goes on.

No lock of the file system is used, so this holds on network file systems as well. A claim is two steps: write one's own
file, then read the others'. Of two that claim at once at least one sees the other and gives way, so two that exclude
each other never both go on. Files have unique names, so removing that of a holder that is gone takes nobody else's.

A holder on this machine is gone if its process is. On another machine a thread of the holder touches its file every
fifteen seconds: after two minutes without a touch it is gone.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejavu_train.ground.files import write_text
from dejavu_train.ground.signals import Interrupted

HEARTBEAT_SECONDS = 15.0
GONE_SECONDS = 120.0
WAITS_FOR, ACCESS_DENIED = 0x0010_0000, 5  # of Windows: the right SYNCHRONIZE, and an error
_ours: dict[str, str] = {}  # folders that this process holds together with others, and the identity
TRIES = 6  # of two that claimed at once and both gave way, one comes first in the next round


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds a folder."""

    pid: int
    host: str
    machine: str
    started: str
    identity: str | None
    note: Any = None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class LockHeld(Exception):
    """Another process holds the folder and excludes us."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


def _machine() -> str:
    """Identity that tells whether a pid means anything here: the boot of the machine, and the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When the process began, as the system counts. Empty where it does not say, None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # in which the program's name may be of any encoding
        fields = stat.rpartition(b")")[2].decode("ascii").split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if sys.platform == "win32":  # where os.kill would end the process
        return "" if _runs_on_windows(pid) else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def _runs_on_windows(pid: int) -> bool:
    """Whether a process is there, asked of Windows itself."""
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    handle = kernel.OpenProcess(WAITS_FOR, False, pid)
    if not handle:
        return bool(kernel.GetLastError() == ACCESS_DENIED)
    ended = kernel.WaitForSingleObject(handle, 0) == 0
    kernel.CloseHandle(handle)
    return not ended


def _alive(path: Path, holder: Holder, now: float) -> bool:
    if holder.machine == _machine():
        return _started(holder.pid) == holder.started
    return now - path.stat().st_mtime < GONE_SECONDS


def holders(folder: str | Path, own: Path | None = None) -> list[Holder]:
    """The processes that hold ``folder`` now, but for that with the file ``own``. Files of those gone are removed."""
    holders = []
    # What the clock of the file system says: that of another machine may differ.
    now = time.time() if own is None else own.stat().st_mtime
    for path in sorted(Path(folder).glob("*.json")) if Path(folder).is_dir() else []:
        if path == own or path.name.startswith("."):  # what another process is writing: it appears whole under its name
            continue
        try:
            holder = Holder(**json.loads(path.read_text(encoding="utf-8")))
            if _alive(path, holder, now):
                holders.append(holder)
                continue
        except FileNotFoundError:
            continue  # it let go meanwhile
        except (ValueError, TypeError):
            pass  # not written by us: files appear whole
        path.unlink(missing_ok=True)
    return holders


@contextlib.contextmanager
def claim(folder: str | Path, identity: str | None = None, note: Any = None) -> Iterator[None]:
    """Hold ``folder``, a folder of holders' files, together with those of the same ``identity``.

    Args:
        identity: None excludes everybody.
        note: JSON that others read of us.

    Raises:
        LockHeld: somebody of another identity holds it.
    """
    folder = Path(folder)
    holder = Holder(os.getpid(), socket.gethostname(), _machine(), _started(os.getpid()) or "", identity, note)
    path = folder / f"{holder.host}-{holder.pid}-{uuid.uuid4().hex[:8]}.json"
    held = threading.Lock()  # no Event: a signal within its set() would leave the lock that is in it taken
    held.acquire()

    def touch() -> None:
        while not held.acquire(timeout=HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(path)

    def let_go() -> None:
        if held.locked():
            held.release()
        if _ours.get(str(folder)) == identity:
            _ours.pop(str(folder), None)
        path.unlink(missing_ok=True)

    try:  # around the first writing too: a signal may come at any moment
        for left in reversed(range(TRIES)):
            write_text(path, json.dumps(dataclasses.asdict(holder)))
            others = [other for other in holders(folder, path) if identity is None or other.identity != identity]
            if not others:
                break
            path.unlink(missing_ok=True)
            if not left:
                raise LockHeld(others[0])
            time.sleep(random.uniform(0.01, 0.1))
        threading.Thread(target=touch, name="holder", daemon=True).start()
        if identity is not None:
            _ours[str(folder)] = identity
        yield
    finally:
        try:
            let_go()
        except Interrupted:  # in the midst of it
            let_go()
            raise


def ours() -> dict[str, str]:
    """Folders that this process holds, and by which identity: a child that goes on without us claims them too."""
    return dict(_ours)


@contextlib.contextmanager
def tried(folder: str | Path, identity: str | None = None) -> Iterator[LockHeld | None]:
    """:func:`claim`, without waiting for another holder, who is named where there is one. None: it is ours."""
    entered = False
    try:
        with claim(folder, identity):
            entered = True
            yield None
    except LockHeld as held:
        if entered:
            raise
        other = held
    if not entered:
        yield other


@contextlib.contextmanager
def locked(folder: str | Path, waiting_message: str | None = None) -> Iterator[None]:
    """Hold ``folder`` alone, waiting for another holder. The message is printed with who that is."""
    announced = False
    while True:
        with tried(folder) as other:
            if other is None:
                yield
                return
        if waiting_message and not announced:
            print(f"{waiting_message} ({other.holder})", file=sys.stderr)
        announced = True
        time.sleep(random.uniform(0.2, 0.6))
