"""Says so where a model looks untrained: its predictors would be perfect and of no use."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Of the loss of drawing any token of the vocabulary. Random weights lose 0.9 of it and more on what they wrote
# themselves, and more than all of it on any other text; a model of 14M parameters loses a third.
NEAR_UNIFORM = 0.75
WINDOWS, TOKENS = 4, 256


def probes_of(windows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The beginnings of some windows of token ids, by which a model is judged."""
    return [windows[i * len(windows) // WINDOWS][:TOKENS] for i in range(min(WINDOWS, len(windows)))]


@torch.inference_mode()
def warn_if_untrained(model: Any, windows: Sequence[np.ndarray]) -> None:
    """Score the beginnings of some windows of token ids, and warn where they are hardly better than drawn at random."""
    device, probes = model.get_input_embeddings().weight.device, probes_of(windows)
    ids = [torch.from_numpy(window.astype(np.int64))[None].to(device) for window in probes]
    warn_of_logits(model.config.vocab_size, probes, (model(input_ids=each, use_cache=False).logits for each in ids))


def warn_of_logits(vocab_size: int, probes: Sequence[np.ndarray], logits: Iterable[Tensor]) -> None:
    """The same where the logits (1, T, V) of each probe are at hand."""
    lost, count = 0.0, 0
    for window, given in zip(probes, logits, strict=True):
        ids = torch.from_numpy(window.astype(np.int64)).to(given.device)
        lost += float(torch.nn.functional.cross_entropy(given[0, :-1].float(), ids[1:], reduction="sum"))
        count += len(ids) - 1
    uniform = math.log(vocab_size)
    if count and lost / count > NEAR_UNIFORM * uniform:
        logger.warning(
            "the model looks untrained: it loses %.2f nats a token on this text, drawing tokens at random %.2f;"
            " predictors for random weights show nothing of a trained model's; check --model, and that its code"
            " computes the activation that its config.json names",
            lost / count,
            uniform,
        )
