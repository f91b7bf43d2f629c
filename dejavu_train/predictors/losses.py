"""Losses of a predictor: ``loss(logits, batch) -> scalar``, one plain function each, chosen by name or class_path.

Letters: B rows, d input width, n units (neurons or heads).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.ground.class_path import bound_arguments, import_named
from dejavu_train.ground.errors import UserError


@dataclasses.dataclass(frozen=True)
class Batch:
    """Batch that a loss may look at.

    ``inputs`` (B, d) float. ``active`` (B, n) bool, the units that a selection should keep. ``contribution`` (B, n)
    float or None, what each unit adds to the residual stream.
    """

    inputs: Tensor
    active: Tensor
    contribution: Tensor | None = None


Loss = Callable[[Tensor, Batch], Tensor]


def paper(logits: Tensor, batch: Batch, least_weight: float = 0.005) -> Tensor:
    """The original's: binary cross entropy, positives weigh 1, negatives the batch's share of positives.

    least_weight: added to the share.
    """
    positive = batch.active.to(logits.dtype)
    share = positive.mean() + least_weight
    return F.binary_cross_entropy_with_logits(logits, positive, weight=positive * (1 - share) + share)


def pos_weight(logits: Tensor, batch: Batch, most_weight: float = 100.0) -> Tensor:
    """Binary cross entropy with positives weighed by negatives / positives: both sides weigh alike.

    most_weight: of a positive. The least is 1.
    """
    positive = batch.active.to(logits.dtype)
    count = positive.sum()
    weight = ((positive.numel() - count) / count.clamp_min(1)).clamp(1, most_weight)
    return F.binary_cross_entropy_with_logits(logits, positive, pos_weight=weight)


def contribution(logits: Tensor, batch: Batch, negative_weight: float = 0.1) -> Tensor:
    """A missed unit costs its contribution (in units of the batch's mean over active ones), a surplus one less.

    negative_weight: w, what a surplus unit costs. Less of it raises recall and lowers precision.
    For active z: c * softplus(-z). For the rest: w * softplus(z). Summed over units, averaged over rows, divided
    by the number of active units, so that the scale does not depend on how many there are.
    """
    assert batch.contribution is not None, "the contribution loss needs contributions"
    cost = batch.contribution.to(logits.dtype) * batch.active
    count = batch.active.sum().clamp_min(1)
    # softplus(-z) = softplus(z) - z: one softplus over (B, n) serves both sides, the active part is a thin correction.
    cost = cost * (count / cost.sum().clamp_min(1e-12))
    weight = torch.where(batch.active, cost, negative_weight)
    # dot products: nothing of size (B, n) is written for the sums, and their gradient is a product by a number
    total = torch.dot(weight.flatten(), F.softplus(logits).flatten()) - torch.dot(cost.flatten(), logits.flatten())
    return total / count


def listwise(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy between softmax of the logits and each unit's share of the row's summed contribution.

    A listwise loss that asks for the order of the units of a row. It leaves the rows' offsets free.
    """
    assert batch.contribution is not None, "the listwise loss needs contributions"
    target = batch.contribution.to(logits.dtype)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-12)
    return -(target * F.log_softmax(logits, dim=-1)).sum(-1).mean()


def regression(logits: Tensor, batch: Batch) -> Tensor:
    """Squared error of the logits against the contribution, in units of the batch's mean contribution of that unit."""
    assert batch.contribution is not None, "the regression loss needs contributions"
    target = batch.contribution.to(logits.dtype)
    return F.mse_loss(logits, target / target.mean().clamp_min(1e-12))


def log_contribution(logits: Tensor, batch: Batch, least_share: float = 1e-4) -> Tensor:
    """Squared error of the logits against the logarithm of the contribution.

    least_share: of the batch's mean, where contributions are cut off.
    For heads, which all contribute something: what is learnt is by what factor one matters more than another.
    """
    assert batch.contribution is not None, "the log_contribution loss needs contributions"
    target = batch.contribution.to(logits.dtype)
    floor = target.mean() * least_share + 1e-12  # a tensor: reading it would make every step wait for the device
    return F.mse_loss(logits, torch.maximum(target, floor).log())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "paper": paper,
    "pos_weight": pos_weight,
    "contribution": contribution,
    "listwise": listwise,
    "regression": regression,
    "log_contribution": log_contribution,
}
NEEDS_CONTRIBUTION = frozenset({"contribution", "listwise", "regression", "log_contribution"})


def get_loss(named: str | dict[str, Any], key: str = "loss") -> Loss:
    """The loss called ``named``, or the function or instance of the class that its ``class_path`` names.

    Args:
        named: a name, or ``{"class_path": ..., "init_args": {...}}`` with a name or a loss of your own.
        key: of the configuration, for messages.

    Raises:
        UserError: there is none, or it does not take the arguments.
    """
    if isinstance(named, str):
        if named not in LOSSES:
            raise UserError(f"unknown loss {named}; the losses are {', '.join(LOSSES)}, or give {key}.class_path")
        return LOSSES[named]
    kind = LOSSES[named["class_path"]] if _is_ours(named) else import_named(named, key)
    if isinstance(kind, type):
        return kind(**bound_arguments(kind, named, key))
    if _is_ours(named):
        bound_arguments(kind, named, key, logits=None, batch=None)
        for name, value in (named.get("init_args") or {}).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise UserError(f"{key}.init_args.{name} must be a number from 0 on, got {value}")
    return functools.partial(kind, **(named.get("init_args") or {}))


def _is_ours(named: dict[str, Any]) -> bool:
    return set(named) <= {"class_path", "init_args"} and named.get("class_path") in LOSSES


def needs_contribution(named: str | dict[str, Any]) -> bool:
    """Whether the loss called ``named`` reads ``contribution``, which costs time for neurons. One's own may."""
    name = named if isinstance(named, str) else named.get("class_path")
    return name in NEEDS_CONTRIBUTION or name not in LOSSES
