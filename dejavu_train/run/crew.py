"""Runs the stages of a run in workers: ``train.py --jobs 4``, or ``--scheduler ray`` on many hosts.

On one host workers train, and collect and calibrate by layers. The process that started them does the rest. On many
hosts this process only watches: one worker collects, then several train, then one tunes, calibrates and bundles.

Every worker that trains goes through all open predictors and takes what nobody holds, so none waits while there is
work. What a worker (worker.py) says goes to ``workers/NAME.log`` in the run's folder. A worker that ends early is
started again, and goes on from its last checkpoint.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import Progress
from dejavu_train.run.folder import saved_config
from dejavu_train.run.task import Task
from dejavu_train.run.workers import Scheduler, opened
from dejavu_train.training.config import RunConfig
from dejavu_train.training.job import is_finished
from dejavu_train.training.stages import Stage

logger = logging.getLogger(__name__)
FOLDER = "workers"  # of what they say, in the run's folder
LOOK_SECONDS = 0.5
RETRIES = 3  # of a worker that ends early
MISTAKE = 2  # the exit code of a user's mistake, which would come again
COLLECT, TRAIN, REST = "collect", "train", "rest"  # what a worker does


def train_together(
    config: RunConfig, jobs: Sequence[UnitKey], stages: Mapping[str, Stage], on_finished: Callable[[UnitKey], None]
) -> None:
    """Train in several processes of this host where several are asked for, and watch until all have ended.

    Args:
        config: of a run whose folder is claimed and whose activations are there.
        jobs: to train.
        on_finished: called for each job that is done, soon after.
    """
    if config.jobs != 1:
        with opened(config) as scheduler:
            _train(config, jobs, stages, scheduler, 2, on_finished)


def collect_together(config: RunConfig, activations: Path) -> None:
    """Collect by layers in several processes of this host, each a range of the shards. What is missing then is for the
    caller."""
    _share(config, "collecting", str(activations))


def calibrate_together(config: RunConfig, states: Path, what: str) -> None:
    """Calibrate by layers in several processes of this host, each a range of the windows. What is missing then is for
    the caller.

    Args:
        what: is shared of the stage whose states lie in this folder.
    """
    _share(config, "calibrating", str(states), what)


def _share(config: RunConfig, doing: str, *given: str) -> None:
    """Run workers that are told the same, and which of how many they are."""
    with opened(config) as scheduler:
        count = scheduler.slots() if config.jobs == "auto" else int(config.jobs)
        if count < 2:
            return
        logger.info("%s in %d processes, which write to %s", doing, count, _folder(config))
        tasks = []
        for number in range(count):
            arguments = ("dejavu_train.run.worker", *given, str(number), str(count))
            tasks.append(Task(str(number), number, count, arguments, _folder(config) / f"{number}.log"))
        run_tasks(scheduler, tasks, lambda: None)


def run_elsewhere(config: RunConfig, jobs: Sequence[UnitKey], stages: Mapping[str, Stage]) -> str:
    """Have workers of a scheduler do all that is missing. Returns the last line of the worker that ended the run.

    Args:
        config: of a run whose folder is claimed.

    Raises:
        UserError: a worker could not collect, or could not finish.
    """
    with opened(config) as scheduler:
        _alone(config, scheduler, COLLECT)
        _train(config, jobs, stages, scheduler, 1, lambda job: None)
        return _alone(config, scheduler, REST)


def _train(
    config: RunConfig,
    jobs: Sequence[UnitKey],
    stages: Mapping[str, Stage],
    scheduler: Scheduler,
    least: int,
    on_finished: Callable[[UnitKey], None],
) -> None:
    """Train open jobs in workers, unless they would be fewer than ``least``."""
    waiting = [job for job in jobs if not is_finished(config.output, job, stages[job.target])]
    count = min(scheduler.slots() if config.jobs == "auto" else int(config.jobs), len(waiting))
    if count < least:
        return
    logger.info("training %d predictors in %d processes, which write to %s", len(waiting), count, _folder(config))
    with Progress("training", len(waiting), "predictor") as progress:

        def look() -> None:
            done = [job for job in waiting if is_finished(config.output, job, stages[job.target])]
            for job in done:
                waiting.remove(job)
                on_finished(job)
            progress.update(len(done))

        run_tasks(scheduler, [_task(config, TRAIN, str(number), number, count) for number in range(count)], look)


def _alone(config: RunConfig, scheduler: Scheduler, part: str) -> str:
    """One worker does a part. Returns its last line."""
    task = _task(config, part, part, 0, 1)
    logger.info("%s: one worker, which writes to %s", part, task.log)
    if run_tasks(scheduler, [task], lambda: None):
        raise UserError(f"the worker that had to {part} ended early: {last_line(task)}; {task.log} has the rest")
    return last_line(task)


def run_tasks(scheduler: Scheduler, tasks: Sequence[Task], look: Callable[[], None]) -> list[Task]:
    """Run tasks to their end. One that ends early is started again.

    Args:
        look: called every moment, and after the last one has ended.

    Returns:
        those that ended early for good.
    """
    for task in tasks:
        task.log.unlink(missing_ok=True)
    running = dict(zip(tasks, scheduler.start(tasks), strict=True))
    left = dict.fromkeys(tasks, RETRIES)
    failed = []
    try:
        while running:
            time.sleep(LOOK_SECONDS)
            for task, worker in list(running.items()):
                code = worker.poll()
                if code is None:
                    continue
                del running[task]
                if not code:
                    continue
                again = code != MISTAKE and left[task] > 0
                what = "it is started again" if again else "it is left alone"
                logger.warning("worker %s ended early (%d), %s: %s", task.name, code, what, last_line(task))
                if again:
                    left[task] -= 1
                    (running[task],) = scheduler.start([task])
                else:
                    failed.append(task)
            look()
    finally:
        for worker in running.values():
            worker.stop()
    return failed


def last_line(task: Task) -> str:
    """Last line of a task's worker."""
    text = task.log.read_text(encoding="utf-8", errors="replace") if task.log.is_file() else ""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _folder(config: RunConfig) -> Path:
    folder = Path(config.output) / FOLDER
    folder.mkdir(exist_ok=True)
    return folder.resolve()  # Ray may begin elsewhere


def _task(config: RunConfig, part: str, name: str, number: int, count: int) -> Task:
    path = saved_config(config.output)
    assert path is not None, "the run's folder is claimed, so it has its configuration"
    layers = "" if config.layers is None else str(config.layers)
    arguments = ("dejavu_train.run.worker", part, str(path), config.output, layers, config.targets)
    return Task(name, number, count, arguments, _folder(config) / f"{name}.log")
