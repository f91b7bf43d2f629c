"""Processes that train.py starts: they know nothing of a launcher's ranks, and end with the process that started them.

A job starts its own ranks, so the ranks that torchrun, srun or mpirun gave to train.py itself mean nothing in it. Left
in the environment they would make one process group of the jobs of two layers.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from dejavu_train.ground import signals

END_SECONDS = 60.0  # a child has so long to save and end
LOOK_SECONDS = 1.0
PARENT = "DEJAVU_TRAIN_PARENT"  # the process that starts this one
_PR_SET_PDEATHSIG = 1
_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(NODE|LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|LOCAL_SIZE"
    r"|(TORCHELASTIC|SLURM|PMI|PMIX|OMPI|MPI|LSB|JSM|HOROVOD)_\w+"
)


def forget_launcher() -> None:
    """Take the variables of torchrun, srun, mpirun and jsrun out of this process's environment.

    Every process of a launcher is then an invocation of its own. Those of one output share the work.
    """
    for name in [name for name in os.environ if _LAUNCHERS.fullmatch(name)]:
        del os.environ[name]


def start_child(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process that ends with us. output: of what it says, None shares ours."""
    known = {**environment, PARENT: str(os.getpid())}
    return subprocess.Popen(command, env=known, start_new_session=True, stdout=output, stderr=output)


def stop_child(child: "subprocess.Popen[bytes]") -> None:
    """End a process and its own children, which have a minute to save."""
    grouped = hasattr(os, "killpg")  # Windows has no groups of processes: what the child started ends by itself there
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGTERM) if grouped else child.terminate()
        child.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL) if grouped else child.kill()
    child.wait()


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a process and its own children to their end. They end with us.

    Raises:
        SystemExit: with its code, where that is not 0.
        Interrupted: it was ended by a signal.
    """
    child = start_child(command, environment)
    try:
        code = child.wait()
    except BaseException:
        stop_child(child)
        raise
    number = -code if code < 0 else code - 128
    if number in signals.HEARD:
        raise signals.Interrupted(number)
    if code:
        raise SystemExit(code)


def end_with_parent() -> None:
    """From now on this process gets SIGTERM when the process that started it ends, and SIGKILL a minute later.

    Linux sends the first by itself. Elsewhere, or where that process has ended before, a thread does.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))
    os.environ[PARENT] = str(os.getpid())  # of the ranks that this one starts
    comes_by_itself = False
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            comes_by_itself = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0
    comes_by_itself = comes_by_itself and os.getppid() == parent

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        if not comes_by_itself:  # a second one would not wait for a checkpoint
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_SECONDS)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=look, name="parent", daemon=True).start()
