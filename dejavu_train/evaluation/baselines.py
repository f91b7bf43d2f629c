"""The selections that a predictor is compared with. Each takes as many units per token as the predictor took.

So only the choice differs:

- ``oracle`` takes the largest contributions of this token in the dense pass.
- ``static`` takes what was most often needed on the calibration documents, and ``random`` anything.
- ``noncontextual`` sends the token's embedding through each block alone (Deja Vu, section 5.2).
  It takes the largest contributions there.

Letters: B batch, T positions, n units (neurons or heads).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dejavu_train.bundle.selector import Sites
from dejavu_train.families import Site, Target, UnitKey, family_of
from dejavu_train.families.block import forward_block, join_heads, positions_like, repeat_groups
from dejavu_train.models.hooks import head_contribution, neuron_contribution


class FixedSelections:
    """Selections made beforehand, by (layer, target). Missing keys are dense."""

    sites: frozenset[Site] = frozenset()

    def __init__(self, masks: Mapping[UnitKey, Tensor]) -> None:
        self.masks = masks

    def __call__(self, layer: int, target: Target, sites: Sites) -> Tensor | None:
        return self.masks.get(UnitKey(layer, target))

    def up(self, layer: int) -> None:
        return None


def ranks(scores: Tensor) -> Tensor:
    """Place of each unit when sorted by falling score: 0 for the largest. (..., n) -> (..., n) int16 or int32.

    >>> ranks(torch.tensor([0.1, 0.5, 0.3]))
    tensor([2, 0, 1], dtype=torch.int16)
    """
    order = scores.argsort(dim=-1, descending=True)
    dtype = torch.int16 if scores.shape[-1] < 1 << 15 else torch.int32  # a batch's ranks of all layers are held
    places = torch.arange(scores.shape[-1], dtype=dtype, device=scores.device).expand_as(order)
    return torch.empty_like(order, dtype=dtype).scatter_(-1, order, places)


def keep_top(unit_ranks: Tensor, counts: Tensor) -> Tensor:
    """The ``counts`` (B, T) first units of ``unit_ranks`` (B, T, n) or (n,): bool (B, T, n)."""
    return unit_ranks < counts.to(unit_ranks.dtype).unsqueeze(-1)


def random_ranks(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Uniform random ranks (..., n), drawn on the CPU so that every device compares the same sets.

    Every row is one of up to 512 random orders: sorting numbers for every token took longer than the model.
    """
    *rows, n_units = shape
    n_rows = math.prod(rows)
    pool = ranks(torch.rand(min(n_rows, 512), n_units, generator=generator, dtype=torch.float32))
    picks = torch.randint(len(pool), (n_rows,), generator=generator)
    return pool.index_select(0, picks).view(shape).to(device)


@torch.no_grad()
def noncontextual_contributions(
    model: PreTrainedModel, token_ids: Tensor, layer: int, head_mean: Tensor | None = None
) -> dict[Target, Tensor]:
    """Contributions when the embeddings at the model's input go through one block alone, no token seeing another.

    With one token the attention of every head is its value vector, so nothing of the context enters.

    Args:
        token_ids: (B, T). The columns are the positions.
        head_mean: (n_heads, head_dim) that stands in for skipped heads, see ``hooks.head_contribution``.
    Returns: of the targets that the layer has, ``heads`` (B, T, n_heads) and ``mlp`` (B, T, d_ffn), fp32.
    """
    family = family_of(model)
    block = family.blocks(model)[layer]
    positions = positions_like(token_ids)
    embedded = family.embed(model, token_ids, positions).to(block.device)
    by_head: list[Tensor] = []

    def attend_to_itself(_attn_in: Tensor, q: Tensor, _k: Tensor, v: Tensor) -> Tensor:
        (values,) = repeat_groups(q, v)
        by_head.append(join_heads(values).unflatten(-1, (block.n_groups, -1)))
        return values

    _, activation = forward_block(block, embedded, attend_to_itself, positions.to(embedded.device))
    made = {}
    if block.out is not None:
        made[Target.HEADS] = head_contribution(by_head[0], block.out.weight, mean=head_mean)
    if block.down is not None:
        made[Target.MLP] = neuron_contribution(activation, block.down.weight)
    return made
