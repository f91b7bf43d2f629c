"""Answers of one model to packed questions, dense and sparse, in fp16 and in 4 bits: a row for each task.

    python -m benchmarks.one_model_tasks --model M --bundle B --int4 Q --file tasks.jsonl.xz --csv ROWS.csv

`benchmarks/one_model_data.py` packs the questions. An answer is the choice of the highest log-likelihood, as lm-eval's
``acc`` is. Of LAMBADA it is right where every token of the last word is the likeliest. `changed` is the share of the
answers that are not those of the dense fp16 model. Predictors are those of the fp16 model for both.
"""

import argparse
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.rows import append_row, command_line, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import Predicted
from dejavu_train.families import dims_of
from dejavu_train.models.opt import load_opt, resolve_device
from dejavu_train.sparse.masked import masking

PAD = 1


@dataclass(frozen=True)
class Choice:
    """One possible answer. ids: context and answer, less the last token. targets: the answer's tokens."""

    ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class Question:
    """A document of a task. gold: the number of the right choice, None where there is one choice."""

    task: str
    gold: int | None
    choices: tuple[Choice, ...]


def read_questions(path: Path, tasks: Sequence[str], limit: int, positions: int) -> list[Question]:
    """The first ``limit`` questions of each task. Contexts that are too long lose their beginning."""
    found: dict[str, list[Question]] = {name: [] for name in tasks}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            mine = found.get(row["task"])
            if mine is not None and len(mine) < limit:
                choices = tuple(
                    Choice((context + answer)[:-1][-positions:], answer) for context, answer in row["choices"]
                )
                mine.append(Question(row["task"], row["gold"], choices))
    return [question for name in tasks for question in found[name]]


def batches_of(choices: Sequence[Choice], positions: int) -> Iterator[list[int]]:
    """Numbers of choices, longest first, so many at once that they fill ``positions``."""
    order = sorted(range(len(choices)), key=lambda number: -len(choices[number].ids))
    start = 0
    while start < len(order):
        rows = max(1, positions // len(choices[order[start]].ids))
        yield order[start : start + rows]
        start += rows


@torch.no_grad()
def likelihoods(model: Any, choices: Sequence[Choice], positions: int) -> tuple[list[float], list[bool]]:
    """Of each choice its log-likelihood in nats, and whether each of its tokens is the likeliest."""
    nats, greedy = [0.0] * len(choices), [False] * len(choices)
    device = next(model.parameters()).device
    for numbers in batches_of(choices, positions):
        width = len(choices[numbers[0]].ids)
        ids = torch.full((len(numbers), width), PAD)
        for row, number in enumerate(numbers):
            ids[row, : len(choices[number].ids)] = torch.tensor(choices[number].ids)
        hidden = model.model.decoder(input_ids=ids.to(device), use_cache=False).last_hidden_state
        ends = [(len(choices[n].ids) - len(choices[n].targets), len(choices[n].ids)) for n in numbers]
        rows = torch.cat([hidden[row, begin:end] for row, (begin, end) in enumerate(ends)])
        targets = torch.tensor([token for n in numbers for token in choices[n].targets], device=device)
        logs = F.log_softmax(model.lm_head(rows).float(), dim=-1)
        found = logs.gather(1, targets[:, None])[:, 0].double()
        likeliest = logs.argmax(-1) == targets
        sizes = [end - begin for begin, end in ends]
        for n, own, best in zip(numbers, found.split(sizes), likeliest.split(sizes), strict=True):
            nats[n], greedy[n] = float(own.sum()), bool(best.all())
    return nats, greedy


def answers_of(questions: Sequence[Question], nats: Sequence[float], greedy: Sequence[bool]) -> list[int]:
    """The number of the likeliest choice of each question. Of one choice: 0 where it is greedy, else -1."""
    answers, start = [], 0
    for question in questions:
        own = nats[start : start + len(question.choices)]
        answers.append(own.index(max(own)) if question.gold is not None else 0 if greedy[start] else -1)
        start += len(own)
    return answers


def is_right(question: Question, answer: int) -> bool:
    return answer == (question.gold or 0)


def ask(model: Any, bundle: Bundle | None, questions: Sequence[Question], positions: int) -> list[int]:
    """The answers of the model, its weights as they are and, with a bundle, only what that selects."""
    choices = [choice for question in questions for choice in question.choices]
    if bundle is None:
        return answers_of(questions, *likelihoods(model, choices, positions))
    with masking(model, Predicted(bundle, model.device), means=bundle.head_means()):
        return answers_of(questions, *likelihoods(model, choices, positions))


def rows_of(
    questions: Sequence[Question], answers: Sequence[int], dense: Sequence[int]
) -> Iterator[dict[str, float | str]]:
    """Of each task its questions, the accuracy, and the share of the answers that changed."""
    for task in dict.fromkeys(question.task for question in questions):
        mine = [i for i, question in enumerate(questions) if question.task == task]
        right = sum(is_right(questions[i], answers[i]) for i in mine)
        changed = sum(answers[i] != dense[i] for i in mine)
        yield {
            "task": task, "examples": len(mine), "accuracy": right / len(mine), "changed": changed / len(mine)
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--int4", help="the same model in 4 bits")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--densities", nargs="+", required=True, help="NEURONS/HEADS")
    parser.add_argument("--positions", type=int, default=8192, help="at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(argv)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Ask both weights, dense and at each of the densities, and write rows as they come."""
    torch.set_float32_matmul_precision("high")  # weights in 4 bits are multiplied in fp32
    device, bundle = resolve_device(options.device), Bundle.from_pretrained(options.bundle)
    dtype = "float16" if device.type == "cuda" else "float32"
    pairs = [(float(pair.split("/")[0]), float(pair.split("/")[1])) for pair in options.densities]
    about = {"model": Path(options.model).name, "device": device_name(device), "torch": torch.__version__}
    about |= made_now("dejavu_train")
    reference: list[int] = []
    for weights, folder in (("fp16", options.model), ("4 bits", options.int4)):
        if folder is None:
            continue
        model: Any = load_opt(folder, dtype, device)
        questions = read_questions(options.file, options.tasks, options.limit, dims_of(model.config).max_positions)
        for pair in [(1.0, 1.0), *pairs]:
            used = None if pair == (1.0, 1.0) else bundle.at(*pair)
            answers = ask(model, used, questions, options.positions)
            reference = reference or answers
            for row in rows_of(questions, answers, reference):
                asked = {"weights": weights, "mlp_density": pair[0], "head_density": pair[1]}
                append_row(options.csv, five_digits({**asked, **row}) | about)
                print(asked, row, flush=True)
        del model


if __name__ == "__main__":
    main()
