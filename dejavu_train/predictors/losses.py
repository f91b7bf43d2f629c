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

from dejavu_train.class_path import bound_arguments, import_named
from dejavu_train.errors import UserError

NEGATIVE_WEIGHT = 0.1


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a loss may look at.

    ``inputs`` (B, d) float. ``active`` (B, n) bool, the units that a selection should keep. ``contribution`` (B, n)
    float or None, what each unit adds to the residual stream.
    """

    inputs: Tensor
    active: Tensor
    contribution: Tensor | None = None


Loss = Callable[[Tensor, Batch], Tensor]


def paper(logits: Tensor, batch: Batch) -> Tensor:
    """The original's: binary cross entropy, positives weigh 1, negatives the batch's share of positives (+ 0.005)."""
    positive = batch.active.to(logits.dtype)
    share = positive.mean() + 0.005
    return F.binary_cross_entropy_with_logits(logits, positive, weight=positive * (1 - share) + share)


def pos_weight(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy with positives weighed by negatives / positives (1 to 100): both sides weigh alike."""
    positive = batch.active.to(logits.dtype)
    count = positive.sum()
    weight = ((positive.numel() - count) / count.clamp_min(1)).clamp(1, 100)
    return F.binary_cross_entropy_with_logits(logits, positive, pos_weight=weight)


def contribution(logits: Tensor, batch: Batch) -> Tensor:
    """A missed unit costs its contribution (in units of the batch's mean over active ones), a surplus one 0.1.

    For active z: c * softplus(-z). For the rest: 0.1 * softplus(z). Summed over units, averaged over rows, divided
    by the number of active units, so that the scale does not depend on how many there are.
    """
    assert batch.contribution is not None, "the contribution loss needs contributions"
    cost = batch.contribution.to(logits.dtype) * batch.active
    count = batch.active.sum().clamp_min(1)
    # softplus(-z) = softplus(z) - z: one softplus over (B, n) serves both sides, the active part is a thin correction.
    cost = cost * (count / cost.sum().clamp_min(1e-12))
    weight = torch.where(batch.active, cost, NEGATIVE_WEIGHT)
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


def log_contribution(logits: Tensor, batch: Batch) -> Tensor:
    """Squared error of the logits against the logarithm of the contribution, cut off at 1e-4 of the batch's mean.

    For heads, which all contribute something: what is learnt is by what factor one matters more than another.
    """
    assert batch.contribution is not None, "the log_contribution loss needs contributions"
    target = batch.contribution.to(logits.dtype)
    floor = target.mean() * 1e-4 + 1e-12  # a tensor: reading it would make every step wait for the device
    return F.mse_loss(logits, torch.maximum(target, floor).log())


LOSSES: dict[str, Loss] = {
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
        named: of a loss of your own ``{"class_path": ..., "init_args": {...}}``.
        key: of the configuration, for messages.

    Raises:
        UserError: there is none.
    """
    if isinstance(named, str):
        if named not in LOSSES:
            raise UserError(f"unknown loss {named}; the losses are {', '.join(LOSSES)}, or give {key}.class_path")
        return LOSSES[named]
    kind = import_named(named, key)
    if isinstance(kind, type):
        return kind(**bound_arguments(kind, named, key))
    return functools.partial(kind, **(named.get("init_args") or {}))


def needs_contribution(named: str | dict[str, Any]) -> bool:
    """Whether the loss called ``named`` reads ``contribution``, which costs time for neurons. One's own may."""
    return not isinstance(named, str) or named in NEEDS_CONTRIBUTION
