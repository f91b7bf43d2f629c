"""Processes that share their imports: one process imports modules once, and is forked for every script.

    with Forks(["torch"], environment) as forks:
        forks.run(folder, code, "argument")                   its lines
        started = forks.start(folder, code, "argument")       a process that goes on
        inner = forks.fork(["transformers"], environment)     the same, with further modules and another environment

A script has a process, memory and an environment of its own. What a module read of the environment while it was
imported stays.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT = 240.0  # seconds for a process of which nothing is heard


class Started:
    """A script that runs. ``out`` and ``err`` are the files that it prints to."""

    def __init__(self, address: Path, job: dict[str, object]) -> None:
        self.out, self.err = Path(str(job["out"])), Path(str(job["err"]))
        for path in (self.out, self.err):
            path.touch()
        end = time.monotonic() + WAIT
        while True:
            self._connection = socket.socket(socket.AF_UNIX)
            try:
                self._connection.connect(str(address))
                break
            except OSError:  # it imports
                self._connection.close()
                assert time.monotonic() < end, f"no process listens at {address}"
                time.sleep(0.02)
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._hear(WAIT))

    def _hear(self, seconds: float) -> str:
        assert select.select([self._connection], [], [], seconds)[0], f"nothing after {seconds} seconds"
        return self._answers.readline()

    def wait(self, seconds: float = WAIT) -> int:
        """Its exit code, or minus the signal that ended it."""
        with self._connection:
            return os.waitstatus_to_exitcode(int(self._hear(seconds)))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Forks:
    """A process that has imported modules, to be forked. ``environment`` is all that it has of one."""

    def __init__(self, modules, environment, outer: "Forks | None" = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks")
        self._names = itertools.count()
        self._address = Path(self._folder.name) / "socket"
        begun = {"modules": modules, "address": str(self._address), "environment": dict(environment)}
        if outer is None:
            command = [sys.executable, str(Path(__file__).resolve()), json.dumps(begun)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(environment))
        else:
            Started(outer._address, begun | outer._files())

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        """All that listen end: their input, which they share, is closed. Only of the outermost."""
        self._process.communicate()

    def _files(self) -> dict[str, str]:
        stem = f"{self._folder.name}/{next(self._names)}"
        return {"out": f"{stem}.out", "err": f"{stem}.err"}

    def fork(self, modules, environment) -> "Forks":
        """A fork that has imported further modules."""
        return Forks(modules, environment, self)

    def start(self, folder, code: str, *arguments: object, **environment: str) -> Started:
        """A script, in a folder."""
        job = {"code": code, "folder": str(folder), "arguments": list(map(str, arguments)), "environment": environment}
        return Started(self._address, job | self._files())

    def run(self, folder, code: str, *arguments: object, **environment: str) -> list[str]:
        """What a script prints that ends well."""
        started = self.start(folder, code, *arguments, **environment)
        assert started.wait() == 0, started.err.read_text()[-3000:]
        return started.out.read_text().strip().splitlines()


def listen(modules, address: str) -> None:
    """Import, then fork for each job until the input ends. Returns in forks that have run their script."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        while True:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            if sys.stdin in select.select([door, sys.stdin], [], [])[0]:
                os._exit(0)
            connection, _ = door.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
            connection.close()
    with connection:
        job = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid:
            connection.sendall(b"%d\n" % pid)
            ended = os.waitpid(pid, 0)[1]
            with contextlib.suppress(OSError):  # nobody asks any longer
                connection.sendall(b"%d\n" % ended)
            os._exit(0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(job["environment"])
    if "modules" in job:
        listen(job["modules"], job["address"])
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["folder"])
    sys.argv[1:] = job["arguments"]
    exec(compile(job["code"], "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    begun = json.loads(sys.argv[1])
    if sys.path[0] == str(Path(__file__).resolve().parent):  # not so with PYTHONSAFEPATH
        del sys.path[0]
    listen(begun["modules"], begun["address"])
