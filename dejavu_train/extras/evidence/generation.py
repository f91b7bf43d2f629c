"""Part 5: long answers to gsm8k and math500: accuracy, tokens an answer, right answers a second."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.texts import behind_start
from dejavu_train.extras.evidence import writer
from dejavu_train.extras.evidence.answers import gsm8k_right, math_right
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.records import SOURCES
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import FOUR_BITS, SPARSE
from dejavu_train.extras.evidence.writer import Answer, Writer
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_text
from dejavu_train.ground.progress import progress

OPTIONS = ("sets", "local", "limit", "set_shots", "answer_tokens", "four_bits")
LEAST = 16  # tokens that an answer must have room for
STOPS = {"gsm8k": ("Question:",), "math500": ("Problem:",)}
SCORERS = {"gsm8k": gsm8k_right, "math500": math_right}
ASKS = {"gsm8k": "Give the final number behind ####.", "math500": "Put the final answer into \\boxed{}."}
_FACTORS = {SPARSE: 0.7, writer.LOSSLESS: 0.9, FOUR_BITS: 0.3}  # of a dense step, about


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    """A variant on a set. ``error``: the standard error of the accuracy. ``cut``: share that ended at the limit.

    ``unjudged`` questions did not fit the model, and are not among ``examples``.
    """

    set: str
    variant: str
    examples: int
    accuracy: float
    error: float
    tokens_per_answer: float
    tokens_per_second: float
    seconds: float
    right_per_second: float
    cut: float
    unjudged: int
    shots: float


def work(subject: Subject) -> Work:
    """A cell for each set and variant. Sets that are nowhere are named with the reason."""
    made, rates, config = Work(), subject.rates, subject.config
    for name in config.sets:
        try:
            records = subject.records.get(name)
        except UserError as error:
            made.missing.append((f"answers to {name}", str(error)))
            continue
        for variant in writer.names(subject):
            step = rates.step * _FACTORS.get(variant, 1.0) * config.answer_tokens
            seconds = rates.load + len(records) * (step + 700 * rates.token)
            made.cells.append(Cell(f"{name}, {variant}", seconds, partial(measure, subject, name, variant)))
    return made


def measure(subject: Subject, name: str, variant: str) -> list[Row]:
    """One row. The answers are written beside the page."""
    records = subject.records.get(name)
    examples = subject.records.examples(name, subject.config.set_shots)
    made, found = Writer(subject, variant), list[tuple[Answer, bool | None, int]]()
    lines = []
    for number, record in enumerate(progress(records, f"{name}, {variant}", len(records), "answer")):
        ids, shots = prompt_ids(subject, name, record, examples)
        room = min(subject.config.answer_tokens, subject.dims.max_positions - len(ids))
        if room < LEAST:
            found.append((Answer("", 0, 0.0, False), None, 0))
            continue
        answer = made.write(ids, room, STOPS[name])
        found.append((answer, SCORERS[name](answer.text, record["answer"]), shots))
        lines.append(json.dumps({"record": number, "right": found[-1][1], "answer": answer.text}))
    folder = Path(subject.config.output) / "answers"
    write_text(folder / f"{name}-{variant.replace(' ', '-')}.jsonl", "\n".join([*lines, ""]))
    return [dataclasses.asdict(row_of(name, variant, found))]


def row_of(name: str, variant: str, found: Sequence[tuple[Answer, bool | None, int]]) -> AnswerRow:
    """The row of answers, whether each is right (None: its question did not fit), and examples before each.

    Raises:
        UserError: none was judged.
    """
    judged = [(answer, bool(good), shots) for answer, good, shots in found if good is not None]
    if not judged:
        raise UserError(f"no answer to {name} could be judged: no question fits the model")
    n, hits = len(judged), sum(good for _, good, _ in judged)
    tokens, seconds = sum(a.tokens for a, _, _ in judged), sum(a.seconds for a, _, _ in judged)
    share = hits / n
    return AnswerRow(
        name, variant, n, share, math.sqrt(share * (1 - share) / n), tokens / n, tokens / seconds, seconds,
        hits / seconds, sum(not a.ended for a, _, _ in judged) / n, len(found) - n, sum(s for _, _, s in judged) / n,
    )  # fmt: skip


def prompt_ids(
    subject: Subject, name: str, record: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]
) -> tuple[list[int], int]:
    """Token ids of a question, and how many worked examples stand before it: as many as leave room for an answer."""
    tokenizer, room = subject.tokenizer, subject.dims.max_positions - subject.config.answer_tokens
    if getattr(tokenizer, "chat_template", None):
        asked = f"{record[SOURCES[name].needs[0]]}\n{ASKS[name]}"
        message = [{"role": "user", "content": asked}]
        given = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        return list(given), 0
    for shots in range(len(examples), -1, -1):
        ids = behind_start(tokenizer, plain_prompt(name, record, examples[:shots]), f"the prompt of {name}")
        if len(ids) <= room or not shots:
            return ids, shots
    raise AssertionError("a prompt without examples is always taken")


def plain_prompt(name: str, record: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """The text of a question behind worked examples, for a model without a chat template."""
    if name == "gsm8k":
        worked = "".join(f"Question: {each['question']}\nAnswer: {each['answer']}\n\n" for each in examples)
        return f"{worked}Question: {record['question']}\nAnswer:"
    worked = "".join(f"Problem:\n{each['problem']}\n\nSolution:\n{each['solution']}\n\n" for each in examples)
    return f"{worked}Problem:\n{record['problem']}\n{ASKS[name]}\n\nSolution:"
