"""Where workers run: on this host, or as tasks of Ray, by one small protocol.

A worker is ``python -m MODULE`` with some arguments. All see one output folder, so on several hosts it lies on a file
system that they share.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dejavu_train.cli.registry import extra
from dejavu_train.ground.children import stop_child
from dejavu_train.run.task import Task, start_task
from dejavu_train.training.config import RunConfig
from dejavu_train.training.trainer import start_device

LOST = -1  # the code of a worker of which nobody knows how it ended


class Worker(Protocol):
    """A worker that was started."""

    def poll(self) -> int | None:
        """Its exit code, ``LOST`` where nobody knows it. None while it runs or waits."""

    def stop(self) -> None:
        """End it."""


class Scheduler(Protocol):
    """Starts workers."""

    def slots(self) -> int:
        """How many workers ``--jobs auto`` asks for."""

    def start(self, tasks: Sequence[Task]) -> Sequence[Worker]:
        """Start them, or let them wait for their turn."""


class Local:
    """On this host, each worker with its GPU and its share of the threads."""

    def __init__(self, config: RunConfig) -> None:
        self._on_gpu = start_device(config.trainer).type == "cuda"

    def slots(self) -> int:
        return torch.cuda.device_count()

    def start(self, tasks: Sequence[Task]) -> "list[_Child]":
        return [_Child(start_task(task, os.environ | self._device(task))) for task in tasks]

    def _device(self, task: Task) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // task.count))}
        if not self._on_gpu:
            return threads
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        names = seen.split(",")
        return threads | {"CUDA_VISIBLE_DEVICES": names[task.number % len(names)]}


class _Child:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        if self.poll() is None:
            stop_child(self._process)


@contextlib.contextmanager
def opened(config: RunConfig) -> Iterator[Scheduler]:
    """The scheduler that a configuration names, for as long as the context lasts.

    Raises:
        UserError: resources that the scheduler does not take, or no cluster where one was named.
    """
    if config.scheduler == "local":
        yield Local(config)
    else:
        with extra("hosts.cluster", "--scheduler ray").opened(config.resources) as scheduler:
            yield scheduler
