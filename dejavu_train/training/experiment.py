"""Logs a run as one experiment: its settings, the course of every job, and what its bundle selects.

Jobs write CSV alone, in whatever process. This process hands the rows of a finished job to the loggers, whose run goes
on from job to job. So there is one run for each experiment, and it can be watched while later jobs are training.
An invocation that trains a part of the layers leaves that to the one that writes the bundle.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.families import TARGETS, UnitKey
from dejavu_train.ground.experiments import FOLDER, SETTINGS, Number, Record, flattened, offline_folder, say_offline
from dejavu_train.training.config import RunConfig
from dejavu_train.training.job import job_folder, summary_rows
from dejavu_train.training.loggers import build_loggers, experiment_id
from dejavu_train.training.stages import calibrate_stage
from dejavu_train.training.trainer import quiet

# Of what training measured, with the heading of summary.csv. The rest is the bundle's.
_TRAINED = {"recall_at_active_density": "recall at active", "precision": "precision"}


class Experiment:
    """The experiment of one bundle of a run, on disk and in the loggers of its configuration.

    Args:
        config: the run's.
    """

    def __init__(self, config: RunConfig) -> None:
        path = Path(config.output) / FOLDER / f"{experiment_id(config)}.json"
        stage = calibrate_stage(config).identity
        self.config = config
        self.record = Record.read(path) or Record(path, config.bundle, stage)
        self.record.bundle = config.bundle
        self._loggers: list[Any] | None = None

    def log_job(self, job: UnitKey) -> None:
        """Hand the course of a finished job to the loggers, once."""
        name = _name(job)
        if name in self.record.logged:
            return
        for each in self._opened():
            for step, metrics in _course(job_folder(self.config.output, job) / "csv"):
                each.log_metrics({f"{name}/{key}": value for key, value in metrics.items()}, step)
        if self._loggers:
            self.record.logged.append(name)
            self.record.write()

    def close(self, bundle: Bundle, jobs: Sequence[UnitKey]) -> None:
        """Add what is missing: jobs that were trained elsewhere or before, and what the bundle selects."""
        for job in jobs:
            self.log_job(job)
        columns, rows = summary_rows(self.config.output, jobs)
        numbers = list(_numbers(bundle, [dict(zip(columns, row, strict=True)) for row in rows]))
        loggers = self._opened()
        settings: list[Number] = [(SETTINGS + key, None, v) for key, v in flattened(self.config.to_json()).items()]
        self.record.add(settings + numbers)
        by_step: dict[int | None, dict[str, float]] = {}
        for name, step, value in numbers:
            by_step.setdefault(step, {})[name] = value
        offline: list[Path] = []
        with quiet():
            for each in loggers:
                for step, metrics in by_step.items():
                    each.log_metrics(metrics, step)
                if callable(getattr(each, "log_table", None)):
                    each.log_table("predictors", columns, rows)
                each.finalize("success")
                if callable(finish := getattr(each.experiment, "finish", None)):  # a run of wandb ends
                    folder = offline_folder(each.experiment)
                    finish()
                    if folder is not None:
                        offline.append(folder)
        for folder in offline:
            say_offline(folder)
        self._loggers, self.record.done = None, True
        self.record.write()

    @property
    def interrupted(self) -> bool:
        """Whether an invocation that wrote the bundle ended before it had closed the experiment."""
        return self.record.path.is_file() and not self.record.done

    def _opened(self) -> list[Any]:
        """The loggers, which have the settings first."""
        if self._loggers is None:
            with quiet():
                self._loggers = build_loggers(self.config)
                for each in self._loggers:
                    each.log_hyperparams(self.config.to_json())
            self.record.loggers = [found for each in self._loggers if (found := _where(each)) is not None]
            self.record.write()
        return self._loggers


def _name(job: UnitKey) -> str:
    return f"layer_{job.layer:02d}/{job.target}"


def _where(logger: Any) -> dict[str, Any] | None:
    """Facts that find a logger's run again, of the kinds to which ``infer.py`` adds."""
    kind = type(logger).__name__
    if kind == "WandbLogger":
        run = logger._wandb_init
        return {"kind": "wandb", **{key: run.get(key) for key in ("id", "project", "entity", "group", "name", "mode")}}
    return {"kind": "tensorboard", "folder": str(logger.log_dir)} if kind == "TensorBoardLogger" else None


def _course(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and metrics of a job, of all its attempts. A later attempt goes on from a step that an earlier one had."""
    steps: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found = {key: float(value) for key, value in row.items() if value and key not in ("step", "epoch")}
                steps.setdefault(int(row["step"]), {}).update(found)
    yield from sorted(steps.items())


def _numbers(bundle: Bundle, trained: Sequence[dict[str, Any]]) -> Iterator[Number]:
    """By layer and in the mean: recall at the active density as trained, density, recall and mass of the bundle."""
    for target in TARGETS:
        rows = [row for row in trained if row["target"] == target]
        specs = [spec for _, spec in sorted(bundle.specs.items()) if spec.target == target]
        found: dict[str, list[tuple[int, float]]] = {
            name: [(row["layer"], row[heading]) for row in rows] for name, heading in _TRAINED.items()
        }
        for name in ("density", "recall", "retained_mass"):
            found[name] = [(spec.layer, getattr(spec, name)) for spec in specs]
        for name, values in found.items():
            yield from ((f"by_layer/{target}/{name}", layer, value) for layer, value in values)
            if values:  # the means that a sweep compares
                yield f"{target}/{name}", None, sum(value for _, value in values) / len(values)
