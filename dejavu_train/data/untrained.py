"""Says so where a model looks untrained: its predictors would be perfect and of no use."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# Of the loss of drawing any token of the vocabulary. Random weights lose 0.9 of it and more on what they wrote
# themselves, and more than all of it on any other text; a model of 14M parameters loses a third.
NEAR_UNIFORM = 0.75
WINDOWS, TOKENS = 4, 256


@torch.inference_mode()
def warn_if_untrained(model: Any, windows: Sequence[np.ndarray]) -> None:
    """Score the beginnings of some windows of token ids, and warn where they are hardly better than drawn at random."""
    device = model.get_input_embeddings().weight.device
    chosen = [windows[i * len(windows) // WINDOWS][:TOKENS] for i in range(min(WINDOWS, len(windows)))]
    lost, count = 0.0, 0
    for window in chosen:
        ids = torch.from_numpy(window.astype(np.int64)).to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        lost += float(torch.nn.functional.cross_entropy(logits, ids[1:].to(logits.device), reduction="sum"))
        count += len(ids) - 1
    uniform = math.log(model.config.vocab_size)
    if count and lost / count > NEAR_UNIFORM * uniform:
        logger.warning(
            "the model looks untrained: it loses %.2f nats a token on this text, drawing tokens at random %.2f;"
            " predictors for random weights show nothing of a trained model's; check --model",
            lost / count,
            uniform,
        )
