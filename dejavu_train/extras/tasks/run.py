"""``dejavu tasks --config configs/eval/opt-mini.yaml``: dense and sparse on the same examples.

Writes results.json (settings, rows) into the output folder, with ``log_samples`` also what was asked and answered.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import transformers

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import require_model
from dejavu_train.cli.parser import parse
from dejavu_train.evaluation import provenance
from dejavu_train.evaluation.calibrated import described
from dejavu_train.extras.tasks.config import AskedOptions, TasksConfig
from dejavu_train.extras.tasks.model import DENSE, DejavuLM, ModelSpec
from dejavu_train.extras.tasks.tasks import (
    Questions,
    TaskRow,
    TaskRun,
    ask,
    build_questions,
    compare,
    mean_rows,
    quiet,
    table,
)
from dejavu_train.ground.files import write_json, write_text
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.models.load import load_tokenizer, resolve_device

logger = logging.getLogger(__name__)
T = TypeVar("T")


def read_config(kind: type[T], argv: Sequence[str] | None, description: str) -> T:
    """Flags (None: those of the process) and YAML files as a checked config. Raises as :func:`parse`."""
    config: Any = parse(kind, argv, "dejavu tasks", description)
    config.check()
    return config


def tasks(config: TasksConfig) -> Iterator[list[TaskRow]]:
    """Ask the dense and the sparse model. Rows task by task, shots by shots, then their mean.

    Raises:
        UserError: what :func:`build_questions` raises, a device that is not there, and a bundle of another model.
    """
    resolve_device(config.device)  # lm-eval's way with a device that is not there is to take another one
    bundle = Bundle.from_pretrained(config.bundle)
    bundle.check_model(config.model)
    logger.info("%s: %s", config.bundle, described(bundle.at(config.mlp_density, config.head_density)))
    questions = all_questions(config)
    names = ("backend", "mlp_density", "head_density", "sparse_from", "dtype", "device", "batch_size")
    asked = ModelSpec(config.model, config.bundle, **{name: getattr(config, name) for name in names})
    dense, sparse = DejavuLM.load(dataclasses.replace(asked, backend=DENSE)), DejavuLM.load(asked)
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


def all_questions(config: AskedOptions) -> list[Questions]:
    """The tasks at every number of shots, then the texts.

    Raises:
        UserError: what :func:`build_questions` raises.
    """
    asked = [(config.tasks, shots) for shots in config.shots if config.tasks]
    asked += [(config.text, 0)] if config.text else []
    return [build_questions(names, config, shots) for names, shots in asked]


def _digest(identity: dict[str, Any], config: TasksConfig) -> str:
    described = json.dumps([identity, config.dtype], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _write_samples(folder: Path, run: TaskRun, model: str) -> None:
    for task, samples in run.samples.items():
        lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
        write_text(folder / f"samples_{task}_{run.shots}_{model}.jsonl", "\n".join(lines) + "\n")


def versions() -> dict[str, str]:
    """Versions that the rows depend on."""
    return provenance.versions() | {"lm_eval": importlib.metadata.version("lm_eval")}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, ask, write."""
    config: TasksConfig = read_config(TasksConfig, argv, "Ask a dense and a sparse model the same tasks.")
    require_model(config.model, config.bundle)
    set_up_logging()
    transformers.utils.logging.disable_progress_bar()
    load_tokenizer(config.model)  # a wrong model is refused before any work
    write_tasks(config)


def write_tasks(config: TasksConfig) -> None:
    """Ask and print the table. results.json grows task by task. Raises as :func:`tasks`."""
    quiet()
    rows: list[TaskRow] = []
    about = {"config": dataclasses.asdict(config), "versions": versions()}
    for found in tasks(config):
        rows += found
        logger.info("%s, %d shot", found[0].task, found[0].shots)
        write_json(Path(config.output) / "results.json", about | {"rows": [dataclasses.asdict(row) for row in rows]})
    print(table(rows))
