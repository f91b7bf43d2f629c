"""Where workers run: on this host, as tasks of Ray, or as jobs of SLURM. One small protocol, three implementations.

A worker is ``python -m MODULE`` with some arguments. All see one output folder, so on several hosts it lies on a file
system that they share. Ray and submitit are imported where they are asked for.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dejavu_train.children import stop_child
from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError, first_line
from dejavu_train.tasks import Resumed, Task, run_worker, start_task
from dejavu_train.training.trainer import start_device

LOST = -1  # the code of a worker of which nobody knows how it ended
STATE_SECONDS = 30.0  # between two questions to SLURM for the state of a job
MINUTES = 1440  # of a job of SLURM, unless resources.time says otherwise


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


class Ray:
    """As tasks of Ray, on the cluster that RAY_ADDRESS names, else on one that is started here."""

    def __init__(self, resources: dict[str, Any]) -> None:
        import ray

        self._ray = ray
        found = ray.cluster_resources()
        self._gpus, self._cpus = int(found.get("GPU", 0)), int(found.get("CPU", 1))
        options = {"num_cpus": 1, "num_gpus": 1 if self._gpus else 0, "max_retries": 0} | resources
        with _refused("resources", "Ray"):
            self._run = ray.remote(**options)(run_worker)

    def slots(self) -> int:
        return self._gpus or self._cpus

    def start(self, tasks: Sequence[Task]) -> "list[_RayTask]":
        return [_RayTask(self._ray, self._run.remote(task, os.getcwd())) for task in tasks]


class _RayTask:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:
            return LOST  # its host or its process is gone

    def stop(self) -> None:
        self._ray.cancel(self._reference, force=True)


class Slurm:
    """As jobs of SLURM, several at once as one array, by submitit."""

    def __init__(self, resources: dict[str, Any], folder: Path) -> None:
        from submitit import SlurmExecutor

        self._executor = SlurmExecutor(folder)
        parameters = {"job_name": "dejavu-train", "time": MINUTES, "gpus_per_node": 1} | resources
        with _refused("resources", "submitit"):
            self._executor.update_parameters(**parameters)

    def slots(self) -> int:
        raise NotImplementedError("the configuration refuses --jobs auto")

    def start(self, tasks: Sequence[Task]) -> "list[_SlurmJob]":
        try:
            folder = [os.getcwd()] * len(tasks)
            return [_SlurmJob(job) for job in self._executor.map_array(Resumed(), tasks, folder)]
        except subprocess.CalledProcessError as error:
            raise UserError(f"sbatch refused the jobs: {first_line(error)}") from None


class _SlurmJob:
    def __init__(self, job: Any) -> None:
        self._job, self._asked = job, time.monotonic()

    def poll(self) -> int | None:
        if not self._job.paths.result_pickle.exists():
            if time.monotonic() - self._asked < STATE_SECONDS:
                return None
            self._asked = time.monotonic()
            return LOST if self._job.done(force_check=True) and not self._job.paths.result_pickle.exists() else None
        error = self._job.exception()
        return int(self._job.result()) if error is None else LOST

    def stop(self) -> None:
        self._job.cancel(check=False)


@contextlib.contextmanager
def _refused(key: str, engine: str) -> Iterator[None]:
    """A wrong name or value among resources is the user's mistake."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}: {engine} does not take them ({first_line(error)})") from None


@contextlib.contextmanager
def opened(config: RunConfig, folder: Path) -> Iterator[Scheduler]:
    """The scheduler that a configuration names, for as long as the context lasts.

    Args:
        folder: for what workers say, and for SLURM's own files.

    Raises:
        UserError: there is no SLURM here, or resources that the scheduler does not take.
    """
    if config.scheduler == "local":
        yield Local(config)
    elif config.scheduler == "slurm":
        for command in ("sbatch", "srun"):
            if shutil.which(command) is None:
                raise UserError(f"--scheduler slurm: there is no {command} on this machine; run it where SLURM is")
        yield Slurm(config.resources, folder / "slurm")
    else:
        with _ray_session():
            yield Ray(config.resources)


@contextlib.contextmanager
def _ray_session() -> Iterator[None]:
    """Ray without its reports of usage. Signals stay ours."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS")
        raise UserError(f"--scheduler ray: no cluster answers at RAY_ADDRESS {address} ({first_line(error)})") from None
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()
