"""Scores of texts that a model is not pretrained on: bits per byte at the end, and when to stop before it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dejavu_train.data.text import TextSource, load_documents, split_of
from dejavu_train.data.tokens import START_TOKEN, windows
from dejavu_train.extras.pretrain.forward import forward_with_activations
from dejavu_train.extras.pretrain.ranks import Ranks
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.base import logits_of
from dejavu_train.families.block import active_neurons
from dejavu_train.ground.errors import UserError

HELDOUT_ROWS = 64


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], window: int) -> dict[str, Any]:
    """Score whole texts with the model as it is (fp32 sums): bits per byte, perplexity, tokens, density per layer."""
    device = next(model.parameters()).device
    nats, tokens, n_bytes = 0.0, 0, 0
    kind, blocks = dims_of(model.config).activation, blocks_of(model)
    norms = [torch.linalg.vector_norm(block.down.weight.float(), dim=0) for block in blocks]
    active = torch.zeros(len(blocks), dtype=torch.float64)
    pad = 1
    for text in texts:
        n_bytes += len(text.encode())
        rows = windows(tokenizer, text, window)
        for start in range(0, len(rows), 16):
            part = rows[start : start + 16]
            width = max(map(len, part))
            ids = torch.tensor([row + [pad] * (width - len(row)) for row in part], device=device)
            hidden, activations = forward_with_activations(model, ids)
            logits = logits_of(model, hidden).float()[:, :-1]
            real = ids[:, 1:] != pad
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            nats += losses[real.flatten()].double().sum().item()
            tokens += int(real.sum())
            for layer, activation in enumerate(activations):
                needed = active_neurons(kind, activation[:, 1:][real], norms[layer])
                active[layer] += needed.float().mean(dim=1).double().sum().cpu()
    return {
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "perplexity": math.exp(nats / tokens),
        "tokens": tokens,
        "bytes": n_bytes,
        "density": [round(value, 5) for value in (active / tokens).tolist()],
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
