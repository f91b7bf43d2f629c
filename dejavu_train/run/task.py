"""Work of a worker, and how its process begins on whichever host. Without torch: Ray imports this first."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dejavu_train.ground.children import start_child, stop_child


@dataclasses.dataclass(frozen=True)
class Task:
    """Work of a worker.

    Attributes:
        name: in messages.
        number: which it is among the ``count`` that run at once.
        arguments: the module that it runs, and the module's arguments.
        log: a file for all that it says.
    """

    name: str
    number: int
    count: int
    arguments: tuple[str, ...]
    log: Path


def run_worker(task: Task, folder: str) -> int:
    """Run a task in a process of its own, from ``folder``, where relative paths begin. Returns its exit code.

    Ray calls it on the host that it chooses.
    """
    os.chdir(folder)
    child = start_task(task, os.environ)
    try:
        return child.wait()
    except BaseException:
        stop_child(child)
        raise


def start_task(task: Task, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a task's process. What it says is added to its log."""
    root = str(Path(__file__).resolve().parents[2])  # wherever train.py was called from
    paths = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    with task.log.open("ab") as log:
        command = [sys.executable, "-m", *task.arguments]
        return start_child(command, {**environment, "PYTHONPATH": paths}, log)
