"""Scores of texts that a model is not pretrained on: bits per byte at the end, and when to stop before it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import Document, TextSource, load_documents, split_of
from dejavu_train.data.tokens import START_TOKEN
from dejavu_train.evaluation.perplexity import EvalSetting, evaluate, hold_out
from dejavu_train.extras.pretrain.ranks import Ranks
from dejavu_train.families import Target, dims_of
from dejavu_train.ground.errors import UserError

HELDOUT_ROWS = 64
WINDOWS_AT_ONCE = 16


def bits_per_byte(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], window: int) -> dict[str, Any]:
    """Score whole texts with the model as it is: bits per byte, perplexity, tokens, density of each layer's neurons."""
    held = hold_out([Document(str(i), text) for i, text in enumerate(texts)], tokenizer, window, None)
    bundle = Bundle.exact("pretrained", dims_of(model.config))
    (found,) = evaluate(model, bundle, held, [EvalSetting("dense")], WINDOWS_AT_ONCE * window)
    nats = float(found.nats.sum())
    return {
        "bits_per_byte": nats / math.log(2) / held.bytes,
        "perplexity": math.exp(nats / held.tokens),
        "tokens": held.tokens,
        "bytes": held.bytes,
        "density": [round(found.sums[key].active_density, 5) for key in sorted(found.sums) if key.target == Target.MLP],
    }


def heldout_texts(name: str) -> list[str]:
    documents, _ = load_documents(TextSource(source=name))
    if Path(name).name.startswith("installed-docs"):
        documents = [document for document in documents if split_of("installed-docs", document.name) == "test"]
    return [document.text for document in documents]


class Heldout:
    """Decides when a text that is not trained on stops getting better. Every process scores its share of the rows.

    Args:
        stream: (N,) int, token ids of the text, of which at most HELDOUT_ROWS sequences are scored.
        context: tokens of a sequence. micro_rows: sequences of one pass. patience: scores without a better one.

    Raises:
        UserError: the text has no sequence for each process.
    """

    def __init__(self, stream: Tensor, context: int, micro_rows: int, patience: int, ranks: Ranks) -> None:
        count = min(HELDOUT_ROWS, len(stream) // context) // ranks.count * ranks.count
        if count == 0:
            raise UserError(
                f"the first heldout text has {len(stream)} tokens, too few to stop by; name a longer one first"
            )
        rows = F.pad(stream[: count * context].view(count, -1).long(), (1, 0), value=START_TOKEN)
        self._parts = ranks.own(rows).split(micro_rows)
        self._ranks, self._count, self._patience = ranks, count, patience
        self.nats: list[float] = []

    @torch.no_grad()
    def score(self, loss_of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> float:
        """Nats a token of the model as it is."""
        total = torch.zeros(1, device=self._ranks.device, dtype=torch.float32)
        for part in self._parts:
            total += loss_of(part)[1] * len(part) / self._count
        self._ranks.sum([total])
        self.nats.append(total.item())
        return self.nats[-1]

    @property
    def exhausted(self) -> bool:
        """Whether the last ``patience`` scores were all worse than an earlier one."""
        best = self.nats.index(min(self.nats))
        return len(self.nats) - 1 - best >= self._patience
