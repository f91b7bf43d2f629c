"""Heads and neurons: how many a token needs (Fig. 3 of the paper).

Letters: B windows, T positions, N measured positions, h heads, e head width, f neurons, d model width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.families import Target
from dejavu_train.models.hooks import neuron_contribution
from papers.deja_vu.observe.statistics import Distribution

AT_ONCE = 1 << 24  # fp32 numbers of an intermediate that are held at a time


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


class Units:
    """Counts what heads and neurons do, batch by batch.

    Args:
        blocks: the model's decoder layers.
        losses: of the output norm, for which silenced units are counted. Which heads a token needs at the first of
            them is the set whose union is measured.
        share: of the positions at which neurons are silenced by bisection, drawn at random.
    """

    places = frozenset({"activation", "head_out"})

    def __init__(self, blocks: Any, losses: Sequence[float], share: float, generator: torch.Generator) -> None:
        self.blocks, self.losses, self.share, self.generator = blocks, losses, share, generator
        self.needed: dict[tuple[int, str, float], Distribution] = {}

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
        draw = torch.rand(len(measured), generator=self.generator) < self.share
        values = got["activation"].flatten(0, 1)[measured[draw.to(measured.device)]]
        for loss in self.losses:
            self._needed(layer, Target.MLP, loss, needed_neurons(values, block.fc2.weight, loss), neurons)
        return {Target.MLP: active, Target.HEADS: heads[0].view(*real.shape, -1)}

    def _needed(self, layer: int, target: Target, loss: float, counts: Tensor, n: int) -> None:
        # A bin for each count, whose middle is the count itself.
        seen = self.needed.setdefault((layer, target, loss), Distribution(-0.5, n + 0.5, n + 1))
        seen.add(counts)

    def sparsity_rows(self) -> list[SparsityRow]:
        rows = []
        for (layer, target, loss), seen in sorted(self.needed.items()):
            p10, p50, p90 = (seen.quantile(q) for q in (0.1, 0.5, 0.9))
            rows.append(
                SparsityRow(layer, target, loss, 1 - seen.mean / (seen.bins - 1), seen.mean, p10, p50, p90, seen.count)
            )
        return rows
