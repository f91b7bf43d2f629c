"""Heads and neurons: how many a token needs (Fig. 3 of the paper), how often each is needed, and by which tokens both.

Letters: B windows, T positions, N measured positions, h heads, e head width, f neurons, d model width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu_train.families import Target
from dejavu_train.models.hooks import neuron_contribution
from papers.deja_vu.observe.statistics import Distribution

AT_ONCE = 1 << 24  # fp32 numbers of an intermediate that are held at a time
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)


@dataclasses.dataclass(frozen=True)
class SparsityRow:
    """How many units of one layer a token can do without (Fig. 3).

    ``loss``: ‖what the silenced units add‖ / ‖what all add‖ at most. 0: neurons that ReLU silences anyway.
    ``silenced``: mean share. ``needed``: mean count per token, with its 10th, 50th and 90th percentile.
    """

    layer: int
    target: str
    loss: float
    silenced: float
    needed: float
    needed_p10: float
    needed_p50: float
    needed_p90: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class FrequencyRow:
    """The ``rank``-th most often active neuron of a layer is active at this share of the tokens (section 5.2)."""

    layer: int
    rank: int
    frequency: float


@dataclasses.dataclass(frozen=True)
class ConcentrationRow:
    """How uneven a layer's neurons are: the share of all activations that the most active ones make.

    ``exponent`` and ``r2``: of the straight line of log frequency against log rank over the upper half of the ranks
    (neurons active at least once). A power law has an r2 near 1. ``never``: share of neurons never active.
    """

    layer: int
    top_1: float
    top_5: float
    top_10: float
    top_20: float
    top_50: float
    never: float
    exponent: float
    r2: float


@dataclasses.dataclass(frozen=True)
class OverlapRow:
    """Mean |A and B| / |A or B| of the sets of two tokens ``distance`` positions apart. 0: of different windows."""

    layer: int
    target: str
    distance: int
    jaccard: float
    pairs: int


def needed_heads(head_out: Tensor, out_proj_weight: Tensor, losses: Sequence[float]) -> Tensor:
    """Which heads a token needs: all but the longest list of least-contributing ones that it can lose.

    Heads are silenced by rising ‖W_h o_h‖, as many as keep ‖sum of the silenced W_h o_h‖ <= loss x ‖sum of all‖.

    Args:
        head_out: (N, h, e). out_proj_weight: (d, h * e), as stored. Its bias is never silenced.
        losses: each in (0, 1).
    Returns: (len(losses), N, h) bool.
    """
    n_heads = head_out.shape[1]
    slices = out_proj_weight.float().unflatten(1, (n_heads, -1))  # (d, h, e)
    kept = torch.zeros(len(losses), *head_out.shape[:2], dtype=torch.bool, device=head_out.device)
    step = max(1, AT_ONCE // (n_heads * len(slices)))
    for start in range(0, len(head_out), step):
        parts = torch.einsum("nhe,dhe->nhd", head_out[start : start + step].float(), slices)
        order = torch.linalg.vector_norm(parts, dim=-1).argsort(dim=-1)
        summed = parts.gather(1, order[..., None].expand_as(parts)).cumsum(1)
        lost = torch.linalg.vector_norm(summed, dim=-1)  # (N, h): with the first 1..h silenced
        place = torch.arange(1, n_heads + 1, device=lost.device)
        for row, loss in enumerate(losses):
            count = torch.where(lost <= loss * lost[:, -1:], place, 0).amax(-1)
            kept[row, start : start + step].scatter_(1, order, place > count[:, None])
    return kept


def needed_neurons(activation: Tensor, fc2_weight: Tensor, loss: float) -> Tensor:
    """How many neurons a token needs, the least-contributing silenced as in :func:`needed_heads`.

    The count comes by bisection between none and all, as if the loss rose with every neuron. It takes one product with
    fc2 for each bit of the number of neurons.

    Args: ``activation`` (N, f), post-ReLU. ``fc2_weight`` (d, f), as stored.
    Returns: (N,) int64.
    """
    weight, values = fc2_weight.float(), activation.float()
    n = values.shape[1]
    place = neuron_contribution(activation, fc2_weight).argsort(-1, descending=True).argsort(-1)
    limit = loss * torch.linalg.vector_norm(values @ weight.T, dim=-1)
    low = torch.zeros(len(values), dtype=torch.long, device=values.device)
    high = low + n
    while bool((low < high).any()):
        middle = (low + high) // 2
        silenced = torch.where(place >= middle[:, None], values, 0.0)
        enough = torch.linalg.vector_norm(silenced @ weight.T, dim=-1) <= limit
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return low


def jaccard(sets: Tensor, others: Tensor) -> Tensor:
    """|A and B| / |A or B| of pairs of sets: (..., n) bool twice -> (...) fp32. NaN where both are empty."""
    return (sets & others).sum(-1).float() / (sets | others).sum(-1).float()


class Units:
    """Counts what heads and neurons do, batch by batch.

    Args:
        blocks: the model's decoder layers.
        losses: of the output norm, for which silenced units are counted. Which heads a token needs at the first of
            them is the set whose overlap is measured.
        share: of the positions at which neurons are silenced by bisection, drawn at random.
    """

    places = frozenset({"activation", "head_out"})

    def __init__(self, blocks: Any, losses: Sequence[float], share: float, generator: torch.Generator) -> None:
        self.blocks, self.losses, self.share, self.generator = blocks, losses, share, generator
        self.counts = [np.zeros(block.fc2.in_features, dtype=np.int64) for block in blocks]
        self.tokens = 0
        self.needed: dict[tuple[int, str, float], Distribution] = {}
        self.overlap: dict[tuple[int, str, int], list[float]] = {}

    def layer(self, layer: int, got: Mapping[str, Tensor], real: Tensor) -> dict[Target, Tensor]:
        """Add one layer of one batch. Returns the sets: ``mlp`` (B, T, f) and ``heads`` (B, T, h) bool."""
        block = self.blocks[layer]
        active = got["activation"] > 0
        measured = real.flatten().nonzero()[:, 0]
        heads = needed_heads(got["head_out"].flatten(0, 1), block.self_attn.out_proj.weight, self.losses)
        for loss, kept in zip(self.losses, heads, strict=True):
            self._needed(layer, Target.HEADS, loss, kept[measured].sum(-1), kept.shape[-1])
        neurons = active.shape[-1]
        self._needed(layer, Target.MLP, 0.0, active[real].sum(-1), neurons)
        self.counts[layer] += active[real].sum(0).cpu().numpy()
        self.tokens += len(measured) if layer == 0 else 0
        draw = torch.rand(len(measured), generator=self.generator) < self.share
        values = got["activation"].flatten(0, 1)[measured[draw.to(measured.device)]]
        for loss in self.losses:
            self._needed(layer, Target.MLP, loss, needed_neurons(values, block.fc2.weight, loss), neurons)
        sets = {Target.MLP: active, Target.HEADS: heads[0].view(*real.shape, -1)}
        for target, own in sets.items():
            self._overlap(layer, target, own, real)
        return sets

    def _needed(self, layer: int, target: Target, loss: float, counts: Tensor, n: int) -> None:
        # A bin for each count, whose middle is the count itself.
        seen = self.needed.setdefault((layer, target, loss), Distribution(-0.5, n + 0.5, n + 1))
        seen.add(counts)

    def _overlap(self, layer: int, target: Target, sets: Tensor, real: Tensor) -> None:
        pairs = [(n, sets[:, n:], sets[:, :-n], real[:, n:] & real[:, :-n]) for n in DISTANCES if n < real.shape[1]]
        pairs.append((0, sets, sets.roll(1, 0), real & real.roll(1, 0) & torch.tensor(len(real) > 1)))
        for distance, first, second, both in pairs:
            overlaps = jaccard(first[both], second[both])
            overlaps = overlaps[~overlaps.isnan()]
            kept = self.overlap.setdefault((layer, target, distance), [0.0, 0.0])
            kept[0] += float(overlaps.double().sum())
            kept[1] += len(overlaps)

    def sparsity_rows(self) -> list[SparsityRow]:
        rows = []
        for (layer, target, loss), seen in sorted(self.needed.items()):
            p10, p50, p90 = (seen.quantile(q) for q in (0.1, 0.5, 0.9))
            rows.append(
                SparsityRow(layer, target, loss, 1 - seen.mean / (seen.bins - 1), seen.mean, p10, p50, p90, seen.count)
            )
        return rows

    def frequency_rows(self, points: int = 60) -> list[FrequencyRow]:
        """At most ``points`` ranks a layer, evenly on a log scale."""
        rows = []
        for layer, counts in enumerate(self.counts):
            falling = np.sort(counts)[::-1] / self.tokens
            ranks = np.unique(np.geomspace(1, len(counts), points).round().astype(int))
            rows += [FrequencyRow(layer, int(rank), float(falling[rank - 1])) for rank in ranks]
        return rows

    def concentration_rows(self) -> list[ConcentrationRow]:
        return [concentration(layer, counts) for layer, counts in enumerate(self.counts)]

    def overlap_rows(self) -> list[OverlapRow]:
        return [OverlapRow(*key, mean / pairs, int(pairs)) for key, (mean, pairs) in self.overlap.items() if pairs]


def concentration(layer: int, counts: np.ndarray) -> ConcentrationRow:
    """The row of one layer from how often each of its neurons was active, (f,) integers."""
    falling = np.sort(counts)[::-1].astype(np.float64)
    whole = falling.sum() or 1.0
    one, five, ten, twenty, half = (float(falling[: max(1, round(s * len(falling)))].sum() / whole) for s in SHARES)
    upper = falling[: len(falling) // 2]
    upper = upper[upper > 0]
    exponent = r2 = float("nan")
    if len(upper) > 2:
        x, y = np.log(np.arange(1, len(upper) + 1)), np.log(upper)
        exponent = float(np.polyfit(x, y, 1)[0])
        r2 = float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() > 0 else float("nan")
    never = float((counts == 0).mean())
    return ConcentrationRow(layer, one, five, ten, twenty, half, never, exponent, r2)
