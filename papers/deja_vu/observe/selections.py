"""Contextual, static and non-contextual sparsity side by side (Fig. 1 and section 5.2 of the paper)."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalSetting, evaluate, increase
from dejavu_train.families import Target
from dejavu_train.predictors.metrics import total

COMPARED = ("predicted", "oracle", "noncontextual", "static")


@dataclasses.dataclass(frozen=True)
class SelectionRow:
    """One selection of neurons at one density, all heads dense.

    ``asked``: density of the candidates. ``sparsity``: 1 - selected / all, the same for all selections of a density.
    ``increase``: of perplexity over the dense model's, a fraction, with a paired bootstrap error over documents.
    """

    selection: str
    asked: float
    sparsity: float
    perplexity: float
    increase: float
    increase_error: float | None
    tokens: int


def selection_rows(
    model: OPTForCausalLM,
    bundle: Bundle,
    held: EvalCorpus,
    densities: Sequence[float],
    batch_tokens: int,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[SelectionRow]:
    """The dense row, then every selection of ``COMPARED`` at every density."""
    asked = [EvalSetting("dense"), *(EvalSetting(name, density) for density in densities for name in COMPARED)]
    scored = evaluate(model, bundle, held, asked, batch_tokens, seed, progress)
    rows = []
    for result in scored:
        neurons = total(sums for (_, target), sums in result.sums.items() if target == Target.MLP)
        sparsity = 0.0 if result.row.selection == "dense" else 1 - neurons.density
        change, error = increase(result.nats, scored[0].nats, held.document_tokens)
        perplexity = math.exp(float(result.nats.sum()) / held.tokens)
        rows.append(
            SelectionRow(result.row.selection, result.asked[0], sparsity, perplexity, change, error, held.tokens)
        )
    return rows
