"""Servers that benchmarks start, and the environment that they share."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

START_SECONDS = 300.0


def environment(**more: str) -> dict[str, str]:
    """This one, with threads that sleep while they wait, as the commands of dejavu have it."""
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | more


def free_port() -> int:
    """A port at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """The address of `dejavu serve` with these options. Raises RuntimeError where it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu_train", "serve", *command, "--port", "0"],
        stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("serving "):
                yield line.split(" at ")[1].split(",")[0]
                return
        raise RuntimeError(f"the server ended with {process.wait()}")
    finally:
        process.terminate()
        process.communicate()
