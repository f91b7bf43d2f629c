"""Part 3: perplexity, KL and agreement with the dense model, on every text."""

import dataclasses
from functools import partial

from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.extras.evidence import variants
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.scoring import score
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.ground.progress import Progress

OPTIONS = ("text", "tokens", "window", "seed", "four_bits")


def work(subject: Subject) -> Work:
    """A cell for each text and variant."""
    made, rates = Work(), subject.rates
    for variant in variants.names(subject):
        for name, held in subject.texts.items():
            seconds = rates.load / len(subject.texts) + 2.5 * held.tokens * rates.token
            label = f"{variant} on {name}"
            made.cells.append(Cell(label, seconds, partial(measure, subject, variant, name, held)))
    return made


def measure(subject: Subject, variant: str, name: str, held: EvalCorpus) -> list[Row]:
    """One row: the text, the variant, the tokens, and a :class:`Score`."""
    other = variants.build(subject, variant)
    with Progress(f"{variant} on {name}", held.tokens, "token") as bar:
        dense = variants.build(subject, variants.DENSE)
        found = score(dense, other, held, subject.config.batch_tokens, bar.update)
    return [{"text": name, "variant": variant, "tokens": held.tokens} | dataclasses.asdict(found)]
