"""Log-probabilities of tokens where they stand, as the model gives them before anything is drawn."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 64  # positions whose logits are looked at together


@dataclasses.dataclass(frozen=True)
class Score:
    """A token behind those before it.

    Attributes:
        logprob: nats, at temperature 1, without penalties and filters.
        top: the likeliest tokens at this place and their nats, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def scores_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """The scores of n tokens, each by its row of logits (n, V). top: how many others come along, at most V."""
    found = []
    for first in range(0, len(tokens), AT_ONCE):
        nats = logits[first : first + AT_ONCE].double().log_softmax(-1)
        best = nats.topk(min(top, nats.shape[1]), dim=-1)
        part = list(tokens[first : first + AT_ONCE])
        chosen = nats.gather(1, torch.tensor(part, device=nats.device)[:, None])[:, 0].tolist()
        for token, value, values, ids in zip(part, chosen, best.values.tolist(), best.indices.tolist(), strict=True):
            found.append(Score(token, value, tuple(zip(ids, values, strict=True))))
    return found
