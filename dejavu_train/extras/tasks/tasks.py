"""Asks models the tasks of lm-eval and compares two of them, example by example: rows.

The paper's tasks are known by short names. With a folder they, and whatever else configs/tasks holds, are read from
local files. Without one they come from the hub, as do all of lm-eval's own.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api import model as api_model
from lm_eval.api import task as api_task
from lm_eval.api.model import CachingLM
from lm_eval.models import huggingface
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from dejavu_train.evaluation.perplexity import increase
from dejavu_train.extras.tasks.config import LOCAL, TASKS, TEXTS, AskedOptions
from dejavu_train.extras.tasks.model import DejavuLM
from dejavu_train.extras.tasks.paired import flip_rate, mcnemar
from dejavu_train.ground.errors import UserError

# lm-eval's names of tasks that are called otherwise.
HUB_NAMES = {"lambada": "lambada_openai", "rte": "sglue_rte"}
ACCURACIES = ("acc", "acc_norm")


@dataclasses.dataclass(frozen=True)
class TaskRow:
    """One metric of one task, beside the dense model's on the same examples.

    ``value``: an accuracy (a fraction) or a perplexity. ``change``: of an accuracy the difference to dense, of a
    perplexity the increase as a fraction. ``error``: of ``change``, McNemar's or a paired bootstrap over documents.
    ``flips``: share of the examples whose answer changed. ``cut``: share of the requests whose beginning did not fit.
    """

    task: str
    shots: int
    metric: str
    examples: int
    value: float
    dense: float
    change: float
    error: float | None
    flips: float | None
    cut: float
    seconds: float


@dataclasses.dataclass
class TaskRun:
    """Answers of a model: by task the samples that lm-eval logged, in the order of the documents."""

    shots: int
    samples: dict[str, list[dict[str, Any]]]
    tokens: dict[str, list[int]]
    cut: dict[str, float]
    seconds: float


def find_tasks(names: Sequence[str], options: AskedOptions) -> tuple[TaskManager, dict[str, str]]:
    """lm-eval's manager of tasks, and for each of our names its own.

    Raises:
        UserError: an unknown task, or no such folder.
    """
    if options.folder is not None and not Path(options.folder).is_dir():
        raise UserError(f"there is no folder {options.folder}; give the folder of the task files")
    ours = options.folder is not None
    chosen = {n: f"local_{n}" if ours and n in (*TASKS, *TEXTS) else HUB_NAMES.get(n, n) for n in names}
    metadata: dict[str, Any] = {"folder": options.folder}
    # Reading lm-eval's own index of some ten thousand files takes longer than a small run.
    manager = TaskManager(include_path=str(LOCAL) if ours else None, include_defaults=not ours, metadata=metadata)
    for name, own in chosen.items():
        if own not in manager.all_tasks:
            others = LOCAL if ours else "lm-eval"
            raise UserError(f"there is no task {name}; known are {', '.join((*TASKS, *TEXTS))} and those of {others}")
    return manager, chosen


@dataclasses.dataclass(frozen=True)
class Questions:
    """Tasks whose requests are built: by our names, at one number of shots. May be asked of any number of models.

    ``fitting``: share of the requests for texts that leave the model room for an answer.
    """

    shots: int
    tasks: dict[str, Any]
    fitting: float = 1.0

    def by_task(self) -> list["Questions"]:
        return [Questions(self.shots, {name: task}) for name, task in self.tasks.items()]


def fetched(load: Callable[[], Any]) -> Any:
    """The task that ``load`` gives. Raises UserError for a set that datasets cannot reach."""
    try:
        return load()
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"cannot fetch a task from the hub ({' '.join(str(error).split())[:160]}); give folder for local files"
        ) from None


def build_questions(names: Sequence[str], options: AskedOptions, shots: int) -> Questions:
    """The requests of the tasks' examples, the first ``limit`` of each.

    Raises:
        UserError: an unknown task, a missing file, or a line that is no record. A set that cannot be fetched, or has
            too few records for the examples.
    """
    manager, chosen = find_tasks(names, options)
    found = fetched(lambda: {name: manager.load([own])["tasks"] for name, own in chosen.items()})
    # A group is its tasks, each by lm-eval's name.
    loaded = {
        k: v for n, own in chosen.items() for k, v in ({n: found[n][own]} if own in found[n] else found[n]).items()
    }
    for name, task in loaded.items():
        known = len(list(task.fewshot_docs())) if shots else 0
        if shots and known <= shots:  # the question itself is none of its examples
            raise UserError(f"--shots {shots}: {name} takes its examples from {known} records; ask for fewer")
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=options.seed)
        task.build_all_requests(limit=options.limit, rank=0, world_size=1)
    return Questions(shots, loaded)


def ask(lm: Any, questions: Questions, use_cache: str | None = None) -> TaskRun:
    """A model's answers.

    Args:
        lm: a :class:`DejavuLM`. Where only texts are asked for, whatever has ``generate_until``.
        use_cache: lm-eval's cache of answers, the path of an SQLite file less its ending. It does not know the model:
            give one path a model.
    """
    asked = lm if use_cache is None else CachingLM(lm, f"{use_cache}.db")
    began = time.perf_counter()
    by_kind: dict[str, list[Any]] = {}
    for task in questions.tasks.values():
        for instance in task.instances:
            by_kind.setdefault(instance.request_type, []).append(instance)
    for kind, instances in by_kind.items():
        for instance, answer in zip(instances, getattr(asked, kind)(instances), strict=True):
            instance.resps = [answer]
            nats = answer[0] if isinstance(answer, tuple) else answer
            if isinstance(nats, float) and not math.isfinite(nats):  # kept by an earlier version
                raise UserError(f"the cache of answers {use_cache}.db holds one that is not a number; delete it")
    seconds = time.perf_counter() - began
    logged = {name: _samples(task) for name, task in questions.tasks.items()}
    texts = {n: [sample["arguments"][0][0] for sample in logged[n]] for n in logged if n in TEXTS}
    tokens = {name: [lm.count_tokens(text) for text in own] for name, own in texts.items()}
    cut = {n: _cut(lm, samples) if n not in TEXTS else 0.0 for n, samples in logged.items()}
    return TaskRun(questions.shots, logged, tokens, cut, seconds)


def _samples(task: Any) -> list[dict[str, Any]]:
    """Samples that lm-eval logs of a task, through the first of its filters."""
    task.apply_filters()
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    samples = []
    for number, found in sorted(by_document.items()):
        found.sort(key=lambda instance: instance.idx)
        kept = [next(iter(instance.filtered_resps.values())) for instance in found]
        sample = {"doc_id": number, "doc": found[0].doc, "target": task.doc_to_target(found[0].doc)}
        sample |= {"arguments": [instance.args for instance in found], "filtered_resps": kept}
        samples.append(sample | task.process_results(found[0].doc, kept))
    return samples


def compare(run: TaskRun, dense: TaskRun) -> list[TaskRow]:
    """Rows of a run beside the dense one.

    A perplexity is per token of the model (``wikitext``, ``c4``, ``prose``), or per answer (``lambada``).
    """
    rows = []
    for name, samples in run.samples.items():
        other = dense.samples[name]
        if [s["doc"] for s in samples] != [s["doc"] for s in other]:
            raise UserError(f"the two runs of {name} have other examples; ask both with the same limit and files")

        def row(
            metric: str, values: Sequence[float], paired: tuple[float, float | None], flips: float | None
        ) -> TaskRow:
            value, before = values
            about = (name, run.shots, metric, len(samples))  # noqa: B023  called within the round
            return TaskRow(*about, value, before, *paired, flips, run.cut[name], run.seconds)  # noqa: B023

        for metric in ACCURACIES:
            if metric in samples[0]:
                mine, theirs = ([float(s[metric]) for s in part] for part in (samples, other))
                flips = flip_rate(samples, other) if metric == "acc" else None
                rows.append(row(metric, [float(np.mean(mine)), float(np.mean(theirs))], mcnemar(mine, theirs), flips))
        if name in run.tokens or "perplexity" in samples[0]:
            weights = run.tokens.get(name, [1] * len(samples))
            nats, before = (np.array([-_log_likelihood(s) for s in part]) for part in (samples, other))
            values = [math.exp(part.sum() / sum(weights)) for part in (nats, before)]
            rows.append(row("perplexity", values, increase(nats, before, weights), None))
    return rows


def mean_rows(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """The mean accuracy over the tasks of ``rows``, all of one number of shots. Nothing where it is one task."""
    accuracies = [row for row in rows if row.metric == "acc"]
    n = len(accuracies)
    if n < 2:
        return []
    means = {name: sum(getattr(row, name) for row in accuracies) / n for name in ("value", "dense", "change", "cut")}
    totals = {name: sum(getattr(row, name) for row in accuracies) for name in ("examples", "seconds")}
    error = math.sqrt(sum((row.error or 0.0) ** 2 for row in accuracies)) / n
    flips = sum(row.flips or 0.0 for row in accuracies) / n
    return [dataclasses.replace(accuracies[0], task="mean", error=error, flips=flips, **means, **totals)]


def _log_likelihood(sample: dict[str, Any]) -> float:
    """Nats of a continuation, or of a whole text."""
    answer = sample["filtered_resps"][0]
    return float(answer if isinstance(answer, float) else answer[0])


def _cut(lm: DejavuLM, samples: Sequence[dict[str, Any]]) -> float:
    """Share of the requests for a continuation that are longer than the model's context."""
    asked = [pair for sample in samples for pair in sample["arguments"] if len(pair) == 2 and isinstance(pair[1], str)]
    # A token is at least a character, so short requests need no tokenizing.
    long = [pair for pair in asked if sum(map(len, pair)) > lm.max_length]
    return sum(sum(map(len, lm._encode_pair(*pair))) > lm.max_length + 1 for pair in long) / max(1, len(asked))


def table(rows: Sequence[TaskRow]) -> str:
    """Rows as Markdown."""
    lines = ["| task | shots | metric | examples | value | dense | change | flips |", "| --- |" + " --- |" * 7]
    for row in rows:
        scale = 100 if row.metric in ACCURACIES else 1
        flips = "" if row.flips is None else f"{100 * row.flips:.1f} %"
        lines.append(
            f"| {row.task} | {row.shots} | {row.metric} | {row.examples} | {scale * row.value:.2f} |"
            f" {scale * row.dense:.2f} | {change_of(row)} | {flips} |"
        )
    return "\n".join(lines)


def change_of(row: TaskRow) -> str:
    """The change with its error: points of an accuracy, per cent of a perplexity, from tenfold on how many times."""
    if row.metric not in ACCURACIES and row.change >= 9:
        return f"x {1 + row.change:,.0f}"
    error = "" if row.error is None else f" ± {100 * row.error:.2f}"
    return f"{100 * row.change:+.2f}{error} {'points' if row.metric in ACCURACIES else '%'}"


def quiet() -> None:
    """Keep only errors of lm-eval and datasets, and bars of lm-eval only on a terminal: elsewhere each fills a log."""
    for name in ("lm_eval", "datasets", "evaluate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    modules: tuple[Any, ...] = (api_task, api_model, huggingface)
    for module in modules:
        module.tqdm = _bar


def _bar(items: Any = None, disable: bool | None = False, **options: Any) -> Any:
    return tqdm(items, disable=disable or None, **options)
