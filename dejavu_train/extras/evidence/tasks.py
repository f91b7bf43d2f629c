"""Part 4: tasks of lm-eval, dense and sparse, from local files or the hub. Through the extra ``tasks``."""

import dataclasses
from functools import cache, partial
from pathlib import Path

import yaml

from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.tasks.config import LOCAL, AskedOptions
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseCausalLM

OPTIONS = ("tasks", "shots", "limit", "local", "seed")
MMLU = "mmlu"
EXAMPLES = 1000  # of a task that no limit cuts, about
TOKENS = 300  # of an example with all its choices, about


def work(subject: Subject) -> Work:
    """A cell a task."""
    made, config = Work(), subject.config
    for task in config.tasks:
        count = (config.limit or EXAMPLES) * (57 if task == MMLU else 1)
        seconds = subject.rates.load + 2.5 * count * TOKENS * (1 + config.shots) * subject.rates.token
        made.cells.append(Cell(task, seconds, partial(measure, subject, task)))
    return made


@cache
def local_file(task: str) -> str | None:
    """File of a task in a folder of local data, by configs/tasks. None: it has none."""
    path = LOCAL / f"local_{task}.yaml"
    if not path.is_file():
        return None
    values = yaml.load(path.read_text(encoding="utf-8"), _Plain)
    return str(values["dataset_kwargs"]["file"])


class _Plain(yaml.SafeLoader):
    """Reads lm-eval's YAML, whose tags name functions."""


_Plain.add_multi_constructor("!", lambda *_: None)


def local(subject: Subject, task: str) -> bool:
    """Tell whether the local folder holds a task."""
    file, folder = local_file(task), subject.config.local
    return file is not None and folder is not None and (Path(folder) / file).is_file()


def measure(subject: Subject, task: str) -> list[Row]:
    """Rows of a task, dense and sparse. Without a bundle both are the dense model.

    Raises:
        UserError: its data are neither local nor on the hub.
    """
    from dejavu_train.extras.tasks import tasks as asked  # imports lm-eval
    from dejavu_train.extras.tasks.model import DejavuLM

    config, here = subject.config, local(subject, task)
    if not here and subject.records.unreachable:
        file = local_file(task)
        beside = f"{config.local} has no {file}, and " if config.local and file else ""
        raise UserError(f"{beside}the hub cannot be reached ({subject.records.unreachable})")
    options = AskedOptions(
        (task,), (), config.local if here else None, (config.shots,), config.limit, seed=1234 + config.seed
    )
    asked.quiet()
    try:
        questions = asked.build_questions((task,), options, config.shots)
    except UserError as error:
        if not here and "cannot fetch" in str(error):
            subject.records.unreachable = str(error)
        raise
    dense = DejavuLM(subject.dense, subject.tokenizer, 0)
    runs = [asked.ask(dense, questions)]
    if subject.bundle is not None:
        sparse = SparseCausalLM.from_model(subject.dense, subject.bundle, "mask")
        runs.append(asked.ask(DejavuLM(sparse, subject.tokenizer, 0), questions))
    rows = asked.compare(runs[-1], runs[0])
    if task == MMLU:
        rows = [dataclasses.replace(row, task=MMLU) for row in asked.mean_rows(rows)]
    return [dataclasses.asdict(row) for row in rows]
