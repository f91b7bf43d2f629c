"""Trains predictors in several processes of one host: ``train.py --jobs 4``, or ``auto`` for one on each GPU.

Every worker goes through all open predictors and takes what nobody holds, so none waits while there is work. What a
worker (worker.py) says goes to ``workers/N.log`` in the run's folder. What a worker leaves behind that ended early is
trained by the process that started it.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dejavu_train.children import start_child, stop_child
from dejavu_train.config import RunConfig
from dejavu_train.families import UnitKey
from dejavu_train.progress import Progress
from dejavu_train.run_folder import saved_config
from dejavu_train.stages import Stage
from dejavu_train.training.job import is_finished
from dejavu_train.training.trainer import start_device

logger = logging.getLogger(__name__)
FOLDER = "workers"  # of what they say, in the run's folder
LOOK_SECONDS = 0.5


def count_workers(config: RunConfig, open_jobs: int) -> int:
    """How many processes train. One where there is nothing to share."""
    asked = torch.cuda.device_count() if config.jobs == "auto" else int(config.jobs)
    return max(1, min(asked, open_jobs))


def train_together(
    config: RunConfig,
    jobs: Sequence[UnitKey],
    stages: Mapping[str, Stage],
    count: int,
    on_finished: Callable[[UnitKey], None],
) -> None:
    """Start workers, and watch until all have ended.

    Args:
        config: of a run whose folder is claimed and whose activations are there.
        jobs: to train.
        on_finished: called for each job that is done, soon after.
    """
    folder = Path(config.output) / FOLDER
    folder.mkdir(exist_ok=True)
    waiting = [job for job in jobs if not is_finished(config.output, job, stages[job.target])]
    logger.info("training %d predictors in %d processes, which write to %s", len(waiting), count, folder)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(config, number, count, folder)) for number in range(count)]
        progress = stack.enter_context(Progress("training", len(waiting), "predictor"))
        running = dict(enumerate(workers))
        while running:
            time.sleep(LOOK_SECONDS)
            for number, worker in list(running.items()):
                if (code := worker.poll()) is not None:
                    del running[number]
                    if code:
                        logger.warning("worker %d ended early (%d): %s", number, code, _last_line(folder, number))
            done = [job for job in waiting if is_finished(config.output, job, stages[job.target])]
            for job in done:
                on_finished(job)
            progress.update(len(done))
            waiting = [job for job in waiting if job not in done]


@contextlib.contextmanager
def _worker(config: RunConfig, number: int, count: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    path = saved_config(config.output)
    assert path is not None, "the run's folder is claimed, so it has its configuration"
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | _device(config, number, count) | {"PYTHONPATH": paths}
    command = [
        sys.executable,
        "-m",
        "dejavu_train.worker",
        str(path),
        config.output,
        "" if config.layers is None else str(config.layers),
        config.targets,
    ]
    with (folder / f"{number}.log").open("wb") as log:
        worker = start_child(command, environment, log)
    try:
        yield worker
    finally:
        if worker.poll() is None:
            stop_child(worker)


def _device(config: RunConfig, number: int, count: int) -> dict[str, str]:
    """What gives a worker its GPU, or its share of the threads."""
    if start_device(config.trainer).type != "cuda":
        return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    names = seen.split(",")
    return {"CUDA_VISIBLE_DEVICES": names[number % len(names)]}


def _last_line(folder: Path, number: int) -> str:
    lines = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
