"""Part 3: perplexity, KL and agreement with the dense model on every text, beside the bytes that a step reads."""

import dataclasses
from functools import partial

from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.extras.evidence import variants
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.scoring import score
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.ground.progress import Progress

OPTIONS = ("text", "tokens", "window", "seed", "four_bits", "smaller")


def work(subject: Subject) -> Work:
    """A cell for each text and variant."""
    made, rates = Work(), subject.rates
    for variant in variants.names(subject)[1:]:
        for name, held in subject.texts.items():
            seconds = rates.load / len(subject.texts) + 2.5 * held.tokens * rates.token
            label = f"{variant} on {name}"
            made.cells.append(Cell(label, seconds, partial(measure, subject, variant, name, held)))
    return made


def measure(subject: Subject, variant: str, name: str, held: EvalCorpus) -> list[Row]:
    """One row: the text, the variant, its bytes a step beside the dense model's, and a :class:`Score`."""
    dense, other = (variants.build(subject, each) for each in (variants.DENSE, variant))
    with Progress(f"{variant} on {name}", held.tokens, "token") as bar:
        found = score(dense, other, held, subject.config.batch_tokens, bar.update)
    about = {"text": name, "variant": variant, "tokens": held.tokens, "megabytes": other.step / 1e6}
    return [about | {"dense_megabytes": dense.step / 1e6} | dataclasses.asdict(found)]
