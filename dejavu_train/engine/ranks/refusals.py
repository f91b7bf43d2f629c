"""Refusals of several GPUs together."""

from collections.abc import Mapping

from dejavu_train.engine.facts import PredictorFacts
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError


def check_ranks(predictors: Mapping[UnitKey, PredictorFacts | None], options: EngineOptions) -> None:
    """Raise UserError for what several GPUs do not do together."""
    for (layer, target), facts in predictors.items():
        if facts is not None and facts.top_k is not None:
            raise UserError(
                f"the {target} predictor of layer {layer} takes the k largest logits of all units, and each of several"
                " GPUs knows its own; calibrate thresholds, or run one GPU"
            )
    if options.guarded:
        raise UserError("a guard measures all units, and each of several GPUs has its own; pass guard=None")
