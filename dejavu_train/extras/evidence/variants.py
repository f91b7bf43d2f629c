"""The ways to run a model that evidence compares: dense, by predictors, in 4 bits, and both together."""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.sparse.masked import masking

DENSE, SPARSE, FOUR_BITS, BOTH = "dense", "sparse", "4 bits", "sparse, 4 bits"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model, and the context in which its forward passes are those of the variant."""

    model: Any
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def names(subject: Subject) -> list[str]:
    """Variants beside the dense model that a subject has."""
    return [FOUR_BITS] if subject.bundle is None else [SPARSE, FOUR_BITS, BOTH]


def build(subject: Subject, name: str) -> Variant:
    """A variant by its name. Raises UserError where the twin in 4 bits cannot be made, or takes no predictors."""
    model = subject.four_bits if name in (FOUR_BITS, BOTH) else subject.dense
    if name in (DENSE, FOUR_BITS):
        return Variant(model)
    bundle = subject.bundle
    assert bundle is not None, "a variant with predictors has a bundle"
    selector, means = PredictorSelector(bundle, model.device, model), bundle.head_means(model.device)
    return Variant(model, lambda: masking(model, selector, means=means))
