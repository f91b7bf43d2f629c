"""Reads a dense model and a variant of it, writes how far their predictions lie apart on a text."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.evaluation.perplexity import SCORED_AT_ONCE, EvalBatch, EvalCorpus, eval_batches, increase
from dejavu_train.extras.evidence.variants import Variant
from dejavu_train.families.base import logits_of
from dejavu_train.models.finite import check_logits


@dataclasses.dataclass(frozen=True)
class Score:
    """How far a variant lies from the dense model.

    ``increase`` of the perplexity is a share, ``increase_error`` its paired bootstrap over documents. ``kl_mean`` and
    ``kl_p99`` are of the tokens' KL from the dense model's distribution, in nats. ``top1`` is the share of positions
    where both have the same most likely token.
    """

    perplexity: float
    dense_perplexity: float
    increase: float
    increase_error: float | None
    kl_mean: float
    kl_p99: float
    top1: float


@torch.no_grad()
def score(
    reference: Variant,
    other: Variant,
    held: EvalCorpus,
    batch_tokens: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Score:
    """Score two variants on the same tokens.

    Args:
        reference, other: of models with one vocabulary. progress: is told tokens.
    Raises:
        UserError: logits that are not finite.
    """
    nats = np.zeros((2, len(held.document_tokens)))
    kl: list[Tensor] = []
    same = 0
    for batch in eval_batches(held, batch_tokens, reference.model.device):
        own, theirs = (_hidden(each, batch) for each in (reference, other))
        targets = batch.targets.flatten()[batch.real.flatten()]
        document = torch.from_numpy(batch.document).repeat_interleave(batch.real.sum(1).cpu()).numpy()
        lost: tuple[list[Tensor], list[Tensor]] = ([], [])
        pieces = zip(own.split(SCORED_AT_ONCE), theirs.split(SCORED_AT_ONCE), strict=True)
        for (a, b), wanted in zip(pieces, targets.split(SCORED_AT_ONCE), strict=True):
            both = [logits_of(each.model, states).float() for each, states in ((reference, a), (other, b))]
            for each, logits in zip((reference, other), both, strict=True):
                check_logits(logits.sum(-1), each.model, batch.ids)
            dense, found = (each.log_softmax(-1) for each in both)
            kl.append((dense.exp() * (dense - found)).sum(-1).clamp_min(0).cpu())
            same += int((dense.argmax(-1) == found.argmax(-1)).sum())
            for part, logs in zip(lost, (dense, found), strict=True):
                part.append(F.nll_loss(logs, wanted, reduction="none").double().cpu())
        for row, part in enumerate(lost):
            np.add.at(nats[row], document, torch.cat(part).numpy())
        progress(int(batch.real.sum()))
    apart = torch.cat(kl).double()
    change, error = increase(nats[1], nats[0], held.document_tokens)
    dense_perplexity, perplexity = (math.exp(row.sum() / held.tokens) for row in nats)
    return Score(
        perplexity, dense_perplexity, change, error,
        float(apart.mean()), float(np.percentile(apart.numpy(), 99)), same / held.tokens,
    )  # fmt: skip


def _hidden(variant: Variant, batch: EvalBatch) -> Tensor:
    """States (N, d) behind the last layer, of the real positions."""
    with variant.context():
        states: Tensor = variant.model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return states.flatten(0, 1)[batch.real.flatten().to(states.device)]
