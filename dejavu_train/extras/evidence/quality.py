"""Part 3: perplexity, KL and agreement with the dense model on every text, beside the bytes that a step reads."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu_train.evaluation.perplexity import SCORED_AT_ONCE, EvalBatch, EvalCorpus, eval_batches, increase
from dejavu_train.extras.evidence import variants
from dejavu_train.extras.evidence.cell import Cell, Row, Work
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import Variant
from dejavu_train.families.base import logits_of
from dejavu_train.ground.progress import Progress
from dejavu_train.models.finite import check_logits

OPTIONS = ("text", "tokens", "window", "seed", "four_bits", "smaller")


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
    """One row: the text, the variant, its bytes a step, and what :func:`score` gives."""
    dense, other = (variants.build(subject, each) for each in (variants.DENSE, variant))
    with Progress(f"{variant} on {name}", held.tokens, "token") as bar:
        found = score(dense, other, held, subject.config.batch_tokens, bar.update)
    return [{"text": name, "variant": variant, "tokens": held.tokens, "megabytes": other.step / 1e6} | found]


@torch.no_grad()
def score(
    reference: Variant,
    other: Variant,
    held: EvalCorpus,
    batch_tokens: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Row:
    """How far a variant lies from another on the same tokens.

    ``increase`` of the perplexity is a share, ``increase_error`` its paired bootstrap over documents. ``kl_mean`` and
    ``kl_p99`` are of the tokens' KL, in nats. ``top1`` is the share of positions with the same most likely token.

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
    return {
        "perplexity": math.exp(nats[1].sum() / held.tokens), "increase": change, "increase_error": error,
        "kl_mean": float(apart.mean()), "kl_p99": float(np.percentile(apart.numpy(), 99)), "top1": same / held.tokens,
    }  # fmt: skip


def _hidden(variant: Variant, batch: EvalBatch) -> Tensor:
    """States (N, d) behind the last layer, of the real positions."""
    with variant.context():
        states: Tensor = variant.model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return states.flatten(0, 1)[batch.real.flatten().to(states.device)]
