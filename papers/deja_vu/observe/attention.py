"""What heads look at: entropy of the attention, "uniform" against "heavy hitter" heads (Fig. 4 of the paper).

Letters: B windows, T positions, S queries, h heads, e head width.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dejavu_train.models.hooks import decoder_layers, head_contribution, output_gram
from papers.deja_vu.observe.statistics import spearman


@dataclasses.dataclass(frozen=True)
class HeadRow:
    """One head, mean over queries.

    ``uniformity``: entropy of the attention over log(number of positions it may see), 1 is uniform, 0 a single one.
    ``heaviest``: largest weight. ``first``: weight of position 0. ``output``: ‖W_h o_h‖.
    """

    layer: int
    head: int
    uniformity: float
    heaviest: float
    first: float
    output: float
    queries: int


@dataclasses.dataclass(frozen=True)
class UniformityRow:
    """Rank correlation (Spearman) of uniformity with the output's norm, over the heads of a layer.

    ``per_token``: computed for each token, mean. ``spread``: standard deviation. ``of_means``: of the heads' means.
    The paper has it that uniform heads matter less: negative values.
    """

    layer: int
    per_token: float
    spread: float
    of_means: float


def attention_weights(attention: Any, inputs: Tensor, queries: Tensor) -> Tensor:
    """Weights of all heads for some queries of one window.

    softmax(q k' / sqrt(e)) over the positions up to the query, with q, k from the block's own projections.

    Args:
        attention: an OPT's self_attn. inputs: (T, d), what it reads. queries: (S,) positions.
    Returns: (h, S, T) fp32, rows summing to 1.
    """
    q = attention.q_proj(inputs[queries]).float().unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
    k = attention.k_proj(inputs).float().unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.arange(len(inputs), device=inputs.device) > queries[:, None]
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def uniformity(weights: Tensor, queries: Tensor) -> Tensor:
    """Entropy over that of uniform attention, - sum w log w / log(query + 1): (h, S, T), (S,) above 0 -> (h, S)."""
    return torch.special.entr(weights).sum(-1) / torch.log(queries.float() + 1)


class Attention:
    """Sums over heads, at ``queries`` positions of each window, evenly spread from the 8th on."""

    places = frozenset({"attn_in", "head_out"})

    def __init__(self, model: Any, queries: int) -> None:
        self.blocks, self.queries = decoder_layers(model), queries
        self.grams = [output_gram(b.self_attn.out_proj.weight, b.self_attn.num_heads) for b in self.blocks]
        n_heads = self.blocks[0].self_attn.num_heads
        self.sums = torch.zeros(len(self.blocks), n_heads, 4, dtype=torch.float64)
        self.correlations: list[list[Tensor]] = [[] for _ in self.blocks]
        self.counts = [0] * len(self.blocks)

    def layer(self, layer: int, got: Mapping[str, Tensor], real: Tensor) -> None:
        """Add one layer of one batch."""
        block = self.blocks[layer]
        for inputs, head_out, length in zip(got["attn_in"], got["head_out"], real.sum(-1).tolist(), strict=True):
            if length < 2:
                continue
            first = min(7, length - 1)
            queries = torch.linspace(first, length - 1, min(self.queries, length - first), device=inputs.device).long()
            weights = attention_weights(block.self_attn, inputs[:length], queries)
            even = uniformity(weights, queries)
            output = head_contribution(head_out[None, queries], block.self_attn.out_proj.weight, self.grams[layer])[0].T
            values = torch.stack([even, weights.amax(-1), weights[..., 0], output], -1)  # (h, S, 4)
            self.sums[layer] += values.double().sum(1).cpu()
            self.counts[layer] += len(queries)
            if len(even) > 1:
                self.correlations[layer].append(spearman(even.T, output.T).cpu())

    def _means(self) -> Tensor:
        return self.sums / torch.tensor(self.counts, dtype=torch.float64)[:, None, None]

    def head_rows(self) -> list[HeadRow]:
        means = self._means().tolist()
        layers = range(len(self.blocks))
        return [
            HeadRow(layer, head, even, heaviest, first, output, self.counts[layer])
            for layer in layers
            for head, (even, heaviest, first, output) in enumerate(means[layer])
        ]

    def uniformity_rows(self) -> list[UniformityRow]:
        means, rows = self._means(), []
        for layer, parts in enumerate(self.correlations):
            if parts:
                stacked = torch.cat(parts)
                of_means = float(spearman(means[layer, :, 0], means[layer, :, 3]))
                rows.append(UniformityRow(layer, float(stacked.mean()), float(stacked.std()), of_means))
        return rows
