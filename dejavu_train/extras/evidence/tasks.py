"""Part 4: tasks of lm-eval, dense and sparse, from local files or the hub. Through the extra ``tasks``."""

import dataclasses
from functools import partial
from typing import Any

from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.tasks.config import AskedOptions
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
        made.cells.append(Cell(task, seconds, partial(measure, subject, task), partial(_questions, subject, task, 1)))
    return made


def _questions(subject: Subject, task: str, limit: int | None) -> Any:
    """The first ``limit`` questions. Raises UserError where its data are neither local nor on the hub."""
    from dejavu_train.extras.tasks.tasks import build_questions, quiet  # imports lm-eval

    def build(folder: str | None) -> Any:
        options = AskedOptions((task,), (), folder, (config.shots,), limit, seed=1234 + config.seed)
        return build_questions((task,), options, config.shots)

    config = subject.config
    quiet()
    return subject.local_or_hub(build)


def measure(subject: Subject, task: str) -> list[Row]:
    """Rows of a task, dense and sparse. Without a bundle both are the dense model.

    Raises:
        UserError: its data are neither local nor on the hub.
    """
    from dejavu_train.extras.tasks import tasks as asked  # imports lm-eval
    from dejavu_train.extras.tasks.model import DejavuLM

    questions = _questions(subject, task, subject.config.limit)
    dense = DejavuLM(subject.dense, subject.tokenizer, 0)
    runs = [asked.ask(dense, questions)]
    if subject.bundle is not None:
        sparse = SparseCausalLM.from_model(subject.dense, subject.bundle, "mask")
        runs.append(asked.ask(DejavuLM(sparse, subject.tokenizer, 0), questions))
    rows = asked.compare(runs[-1], runs[0])
    if task == MMLU:
        rows = [dataclasses.replace(row, task=MMLU) for row in asked.mean_rows(rows)]
    return [dataclasses.asdict(row) for row in rows]
