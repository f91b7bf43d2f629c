"""Measures of continuations, from token ids alone, and of how likely the dense model finds them.

Letters: P prompts, T tokens of a prompt, N new tokens.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dejavu_train.models.finite import check_logits

NGRAM = 4


def agreement(tokens: Tensor, reference: Tensor) -> Tensor:
    """(N,) share of the prompts whose token at a position is the reference's at that position. Both (P, N).

    >>> agreement(torch.tensor([[1, 2, 3], [1, 5, 3]]), torch.tensor([[1, 2, 4], [1, 2, 3]])).tolist()
    [1.0, 0.5, 0.5]
    """
    return (tokens == reference).double().mean(0)


def divergence(tokens: Tensor, reference: Tensor) -> Tensor:
    """(P,) position of the first token that differs, from 0 on. N where none does. Both (P, N).

    >>> divergence(torch.tensor([[1, 2, 3], [1, 5, 3]]), torch.tensor([[1, 2, 3], [1, 2, 3]])).tolist()
    [3, 1]
    """
    return (tokens == reference).long().cumprod(1).sum(1)


def same_so_far(tokens: Tensor, reference: Tensor) -> Tensor:
    """(N,) share of the prompts that have not diverged up to and with a position. Both (P, N).

    >>> same_so_far(torch.tensor([[1, 2, 3], [1, 5, 3]]), torch.tensor([[1, 2, 4], [1, 2, 3]])).tolist()
    [1.0, 0.5, 0.0]
    """
    return (tokens == reference).long().cumprod(1).double().mean(0)


def repetition(tokens: Tensor, n: int = NGRAM) -> Tensor:
    """(P,) share of a continuation's n-grams that stood in it before, of tokens (P, N): 1 - distinct / all.

    >>> repetition(torch.tensor([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]]), 2).tolist()
    [0.6, 0.0]
    >>> repetition(torch.ones(1, 5)).tolist()  # a text of two n-grams
    [0.5]
    """
    grams = tokens.unfold(1, n, 1)
    distinct = [len(row.unique(dim=0)) for row in grams]
    return 1 - torch.tensor(distinct, dtype=torch.float64) / grams.shape[1]


@torch.no_grad()
def score(model: PreTrainedModel, prompts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """How a dense model continues the same past, teacher-forced.

    Args:
        prompts: (P, T) ids. tokens: (P, N) ids that were generated behind them.
    Returns: (P, N) fp64 nats of each token, and (P, N) bool, whether it is the model's greedy choice. On the CPU.

    Raises:
        UserError: logits that are not finite.
    """
    ids, width = torch.cat([prompts, tokens], 1), prompts.shape[1]
    nats, greedy = [], []
    for row in ids:  # a row at a time: logits are as wide as the vocabulary
        given = row[None, :-1].to(model.device)
        logits = model(given, use_cache=False).logits[0, width - 1 :]
        check_logits(logits, model, given)
        wanted = row[width:].to(logits.device)
        nats.append(-logits.double().log_softmax(-1).gather(1, wanted[:, None])[:, 0].cpu())
        greedy.append((logits.argmax(-1) == wanted).cpu())
    return torch.stack(nats), torch.stack(greedy)
