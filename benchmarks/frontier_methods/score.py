"""Runs an edited model over a set, returns perplexity increase with its error, KL, and what was selected and read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.frontier_methods.plain_opt import PlainOPT, scored_log_probabilities
from benchmarks.frontier_methods.select import Gates
from benchmarks.frontier_methods.sets import Batch


@dataclass(frozen=True)
class Scored:
    """What one edited model did on one set. ``increase`` is perplexity / dense - 1."""

    perplexity: float
    increase: float
    error: float
    kl: float
    tokens: int


class Reference:
    """The dense model's final states over a set, kept so that every method is compared without running it again."""

    def __init__(self, model: PlainOPT, parts: Sequence[Batch]) -> None:
        self.model = model
        self.parts = [part.to(model.device) for part in parts]
        with torch.no_grad():
            self.final = [model.blocks(model.start(part.ids))[part.scored] for part in self.parts]
            self.loss = [
                F.nll_loss(F.log_softmax(model.logits(final), -1), part.targets, reduction="none")
                for final, part in zip(self.final, self.parts, strict=True)
            ]

    @property
    def tokens(self) -> int:
        return sum(len(loss) for loss in self.loss)

    @torch.no_grad()
    def score(self, gates: Gates, from_position: int = 0) -> Scored:
        """Run every batch with ``gates``; positions before ``from_position`` are not scored."""
        documents, dense, sparse, divergence = [], [], [], []
        for part, final, loss in zip(self.parts, self.final, self.loss, strict=True):
            gates.begin(part, final, self.model)
            edited = self.model.blocks(self.model.start(part.ids), gates)
            got = scored_log_probabilities(self.model, edited, part.scored)
            reference = F.log_softmax(self.model.logits(final), -1)
            late = (torch.arange(part.ids.shape[1], device=part.ids.device) >= from_position).expand_as(part.ids)
            late = late[part.scored]
            documents.append(part.document[:, None].expand_as(part.ids)[part.scored][late])
            dense.append(loss[late])
            sparse.append(F.nll_loss(got, part.targets, reduction="none")[late])
            divergence.append((reference.exp() * (reference - got)).sum(-1)[late])
        return summarise(torch.cat(documents), torch.cat(dense), torch.cat(sparse), torch.cat(divergence))


def summarise(documents: Tensor, dense: Tensor, sparse: Tensor, divergence: Tensor) -> Scored:
    """Perplexities and the paired bootstrap error over documents, from losses (N) in nats per token."""
    _, index = documents.unique(return_inverse=True)
    count = int(index.max()) + 1
    zeros = torch.zeros(count, dtype=torch.float64, device=index.device)
    lost = zeros.clone().index_add_(0, index, (sparse - dense).double()).cpu().numpy()
    size = zeros.clone().index_add_(0, index, torch.ones_like(dense).double()).cpu().numpy()
    generator = np.random.default_rng(0)
    draws = generator.integers(0, count, (1000, count))
    samples = np.exp(lost[draws].sum(1) / size[draws].sum(1)) - 1
    mean = float(np.exp(lost.sum() / size.sum()) - 1)
    perplexity = float(sparse.double().mean().exp())
    return Scored(perplexity, mean, float(samples.std()), float(divergence.double().mean()), int(size.sum()))


@torch.no_grad()
def layer_losses(
    model: PlainOPT, parts: Sequence[Batch], gates: Gates, target: str, thresholds: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Sensitivities: KL per token for every layer at each of its thresholds, all other layers dense."""
    totals = [[0.0] * len(thresholds[0]) for _ in range(model.n_layers)]
    tokens = 0
    for part in parts:
        part = part.to(model.device)
        inputs: dict[int, Tensor] = {}
        sites: dict = {}
        final = model.blocks(model.start(part.ids), sites=sites, on_input=inputs.__setitem__)
        reference = F.log_softmax(model.logits(final[part.scored]), -1)
        gates.begin(part, final[part.scored], model)
        for layer in range(model.n_layers):
            for i, threshold in enumerate(thresholds[layer]):
                gates.only(target, layer, threshold)
                edited = model.blocks(inputs[layer], gates, first=layer, sites=dict(sites))
                got = scored_log_probabilities(model, edited, part.scored)
                totals[layer][i] += float((reference.exp() * (reference - got)).sum())
        tokens += int(part.scored.sum())
    return [[total / tokens for total in row] for row in totals]
