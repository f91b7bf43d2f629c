"""Part 1: how many neurons a token needs, by layer and text. The survey's counts of the dense model."""

import time
from functools import partial
from pathlib import Path

from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.survey.decoder import find_parts, load_decoder, read_config
from dejavu_train.extras.survey.layerwise import LayerRunner
from dejavu_train.extras.survey.measure import Selection, Survey
from dejavu_train.families import Target

OPTIONS = ("text", "tokens", "window", "seed")
FIFTH = Selection(Target.MLP, 0.2)


def work(subject: Subject) -> Work:
    """A cell a text."""
    rates = subject.rates
    cells = [
        Cell(name, rates.load + 3 * held.tokens * rates.token, partial(measure, subject, name, held))
        for name, held in subject.texts.items()
    ]
    return Work(cells)


def measure(subject: Subject, name: str, held: EvalCorpus) -> list[Row]:
    """Rows of all layers with neurons."""
    config = subject.config
    values = read_config(config.model, config.revision)
    parts = find_parts(config.model, values)
    runner = LayerRunner(
        load_decoder(config.model, config.revision, values, parts.layers), parts.layers, subject.device
    )
    state = Path(config.output) / "parts" / "survey.safetensors"
    identity = f"{subject.hash} {name} {held.tokens} {held.windows[0][:8]} {config.seed}"
    survey = Survey(runner, parts, held, [Selection(), FIFTH], state, identity, time.monotonic)
    return [
        {"text": name, "layer": number, "tokens": held.tokens, "nonzero": each.nonzero, "needed": each.needed,
         "mass_at_20": each.mass[FIFTH.share]}
        for number, each in survey.run().layers.items()
    ]  # fmt: skip
