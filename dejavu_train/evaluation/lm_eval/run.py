"""python -m dejavu_train.evaluation.lm_eval --config configs/eval/opt-mini.yaml: dense and sparse on the same examples.

Writes results.json (settings, rows) into the output folder, with ``log_samples`` also what was asked and answered.
"""

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import require_model
from dejavu_train.errors import UserError
from dejavu_train.evaluation.calibrated import described
from dejavu_train.evaluation.lm_eval.model import DENSE, Asked, DejavuLM
from dejavu_train.evaluation.lm_eval.tasks import (
    TASKS,
    Questions,
    TaskRow,
    TaskRun,
    Where,
    ask,
    build_questions,
    compare,
    mean_rows,
    quiet,
    table,
)
from dejavu_train.evaluation.shared_config import ModelConfig
from dejavu_train.files import write_json, write_text
from dejavu_train.models.opt import load_tokenizer, resolve_device
from dejavu_train.parser import parse

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AskedConfig(ModelConfig):
    """What is asked."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Accuracies, at every number of shots: the paper's by their short names, or any of lm-eval's."""
    texts: tuple[str, ...] = ("wikitext",)
    """Perplexities: wikitext, c4, prose."""
    folder: str | None = None
    """Of local files (configs/tasks names them); null: the hub."""
    include_path: str = "configs/tasks"
    """Folder of task YAMLs."""
    shots: tuple[int, ...] = (0, 5)
    """Numbers of examples before the question."""
    limit: int | None = None
    """Examples of each task, the first ones; null: all."""
    batch_size: int | str = "auto"
    """Rows, or auto."""
    seed: int = 1234
    """Of the few-shot examples."""

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit must be at least 1, got {self.limit}")
        if not self.shots or min(self.shots) < 0:
            raise UserError("--shots must be numbers of examples, such as [0, 5]")
        if not self.tasks and not self.texts:
            raise UserError("--tasks and --texts are both empty; name one")
        if self.batch_size != "auto" and not (isinstance(self.batch_size, int) and self.batch_size > 0):
            raise UserError(f"--batch_size must be auto or a number, got {self.batch_size}")

    @property
    def where(self) -> Where:
        return Where(self.folder, self.include_path)


@dataclasses.dataclass(frozen=True)
class TasksConfig(AskedConfig):
    """What is asked of which model; densities are means over the layers."""

    RESULTS = "tasks"

    backend: str = "mask"
    """Of the sparse model: mask, gather, triton or auto."""
    mlp_density: float | None = None
    """Null: as the bundle was calibrated."""
    head_density: float | None = None
    """Null: as the bundle was calibrated."""
    sparse_from: int | str = 0
    """Prompt (contexts dense, continuations sparse) or a position (0: everything sparse)."""
    use_cache: str | None = None
    """File of answers that a next run takes up, less its ending."""
    log_samples: bool = False
    """Write samples_<task>_<shots>_<model>.jsonl."""

    @property
    def asked(self) -> Asked:
        """The sparse model."""
        names = ("backend", "mlp_density", "head_density", "sparse_from", "dtype", "device", "batch_size")
        return Asked(self.model, self.bundle, **{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""
        super().check()
        position = self.sparse_from
        if position != "prompt" and (isinstance(position, str) or position < 0):
            raise UserError(f"--sparse_from must be prompt or a position, got {self.sparse_from}")


def read_config(kind: type[T], argv: Sequence[str] | None, description: str) -> T:
    """Flags (None: those of the process) and YAML files as a checked config; raises as :func:`parse`."""
    config: Any = parse(kind, argv, "python -m dejavu_train.evaluation.lm_eval", description)
    config.check()
    return config


def tasks(config: TasksConfig) -> Iterator[list[TaskRow]]:
    """Ask the dense and the sparse model; rows task by task, shots by shots, then their mean.

    Raises:
        UserError: what :func:`build_questions` raises, a device that is not there, and a bundle of another model.
    """
    resolve_device(config.device)  # lm-eval's way with a device that is not there is to take another one
    bundle = Bundle.from_pretrained(config.bundle)
    bundle.check_model(config.model)
    logger.info("%s: %s", config.bundle, described(bundle.at(config.mlp_density, config.head_density)))
    questions = all_questions(config)
    dense = DejavuLM.load(dataclasses.replace(config.asked, backend=DENSE))
    sparse = DejavuLM.load(config.asked)
    sparse.encoded = dense.encoded
    models = {DENSE: dense, "sparse": sparse}
    caches = {n: config.use_cache and f"{config.use_cache}-{_digest(lm.identity, config)}" for n, lm in models.items()}
    for part in questions:
        rows: list[TaskRow] = []
        for one in part.by_task():
            runs = {name: ask(lm, one, caches[name]) for name, lm in models.items()}
            if config.log_samples:
                for name, run in runs.items():
                    _write_samples(Path(config.output), run, name)
            found = compare(runs["sparse"], runs[DENSE])
            rows += found
            yield found
        if mean := mean_rows(rows):
            yield mean


def all_questions(config: AskedConfig) -> list[Questions]:
    """The tasks at every number of shots, then the texts.

    Raises:
        UserError: what :func:`build_questions` raises.
    """
    asked = [(config.tasks, shots) for shots in config.shots if config.tasks]
    asked += [(config.texts, 0)] if config.texts else []
    return [build_questions(names, config.where, shots, config.limit, config.seed) for names, shots in asked]


def _digest(identity: dict[str, Any], config: TasksConfig) -> str:
    described = json.dumps([identity, config.dtype], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _write_samples(folder: Path, run: TaskRun, model: str) -> None:
    for task, samples in run.samples.items():
        lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
        write_text(folder / f"samples_{task}_{run.shots}_{model}.jsonl", "\n".join(lines) + "\n")


def versions() -> dict[str, str]:
    """Of what the rows depend on."""
    import importlib.metadata

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"lm_eval": importlib.metadata.version("lm_eval")}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, ask, write."""
    config: TasksConfig = read_config(TasksConfig, argv, "Ask a dense and a sparse OPT the same tasks.")
    require_model(config.model, config.bundle)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    load_tokenizer(config.model)  # a wrong model is refused before any work
    write_tasks(config)


def write_tasks(config: TasksConfig) -> None:
    """Ask and print the table; results.json grows task by task. Raises as :func:`tasks`."""
    quiet()
    rows: list[TaskRow] = []
    about = {"config": dataclasses.asdict(config), "versions": versions()}
    for found in tasks(config):
        rows += found
        logger.info("%s, %d shot", found[0].task, found[0].shots)
        write_json(Path(config.output) / "results.json", about | {"rows": [dataclasses.asdict(row) for row in rows]})
    print(table(rows))
