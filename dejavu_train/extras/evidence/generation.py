"""Part 5: long answers, judged by lm-eval: accuracy, tokens an answer, right answers a second."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dejavu_train.extras.evidence import writer
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import FOUR_BITS, SPARSE
from dejavu_train.extras.evidence.writer import Answer, Writer
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_text

OPTIONS = ("sets", "contexts", "run_code", "local", "limit", "set_shots", "answer_tokens", "four_bits", "seed")
_FACTORS = {SPARSE: 0.7, writer.LOSSLESS: 0.9, FOUR_BITS: 0.3}  # of a dense step, about


def work(subject: Subject) -> Work:
    """A cell for each set and variant. Sets that are nowhere are named with the reason."""
    made, rates, config = Work(), subject.rates, subject.config
    for name in subject.set_names:
        try:
            count = len(subject.questions(name))
        except UserError as error:
            made.missing.append((f"answers to {name}", str(error)))
            continue
        for variant in writer.names(subject):
            step = rates.step * _FACTORS.get(variant, 1.0) * config.answer_tokens
            seconds = rates.load + count * (step + 700 * rates.token)
            made.cells.append(Cell(f"{name}, {variant}", seconds, partial(measure, subject, name, variant)))
    return made


def measure(subject: Subject, name: str, variant: str) -> list[Row]:
    """One row. The answers are written beside the page."""
    from dejavu_train.extras.tasks.sets import SETS, build_set  # imports lm-eval
    from dejavu_train.extras.tasks.tasks import ask

    config, known = subject.config, name.split()[0]
    made = Writer(subject, variant, SETS[known].plain)
    asked = build_set(
        known, subject.set(name), config.limit, config.set_shots, subject.tokenizer,
        lambda text: made.room(text) >= config.answer_tokens,
    )  # fmt: skip
    samples = ask(made, asked).samples[known]
    right = [float(each[SETS[known].metric]) for each in samples]
    found = list(zip(made.answers, right, strict=True))
    lines = [json.dumps({"record": i, "right": good, "answer": a.text}) for i, (a, good) in enumerate(found) if a]
    stem = f"{name}-{variant}".replace(", ", "-").replace(" ", "-")
    write_text(Path(config.output) / "answers" / f"{stem}.jsonl", "\n".join([*lines, ""]))
    return [row_of(name, variant, found, asked.shots)]


def row_of(name: str, variant: str, found: Sequence[tuple[Answer | None, float]], shots: int) -> Row:
    """The row of answers (None: the question did not fit) and whether each is right, behind worked examples.

    Raises:
        UserError: none was judged.
    """
    judged = [(answer, good) for answer, good in found if answer is not None]
    if not judged:
        raise UserError(f"no answer to {name} could be judged: no question fits the model")
    n, hits = len(judged), sum(good for _, good in judged)
    tokens, seconds = sum(a.tokens for a, _ in judged), sum(a.seconds for a, _ in judged)
    return {
        "set": name, "variant": variant, "examples": n, "accuracy": hits / n,
        "error": math.sqrt(hits * (n - hits) / n**3),
        "tokens_per_answer": tokens / n, "tokens_per_second": tokens / seconds, "right_per_second": hits / seconds,
        "seconds": seconds, "cut": sum(not a.ended for a, _ in judged) / n, "unjudged": len(found) - n, "shots": shots,
    }  # fmt: skip
