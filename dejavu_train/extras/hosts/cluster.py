"""Workers as tasks of Ray: the scheduler of ``train.py --scheduler ray``. Ray is imported where it is asked for."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.run.task import Task, run_worker
from dejavu_train.run.workers import LOST


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


@contextlib.contextmanager
def _refused(key: str, engine: str) -> Iterator[None]:
    """A wrong name or value among resources is the user's mistake."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}: {engine} does not take them ({first_line(error)})") from None


@contextlib.contextmanager
def opened(resources: dict[str, Any]) -> Iterator[Ray]:
    """Ray's workers, for as long as the context lasts.

    Raises:
        UserError: resources that Ray does not take, or no cluster where RAY_ADDRESS names one.
    """
    with _ray_session():
        yield Ray(resources)


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
