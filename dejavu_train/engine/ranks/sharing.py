"""Shares the units of a model out over ranks, so that each rank holds as many and is expected to read as much.

A step is over when the slowest rank is, so what counts is the rank that reads most. Which units a token needs is not
known, how often each was selected on calibration is. Neurons are shared out in blocks: a block of a stored matrix is
read in one piece.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.facts import selected_rates
from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.families.dims import Positions
from dejavu_train.ground.errors import UserError

BLOCK = 64  # neurons at most: 128 bytes of a row of fp16
MOST = 16  # ranks that a refusal names


def shards_of(dims: ModelDims, world: int, rates: Mapping[UnitKey, Tensor] | None = None) -> list[Shard]:
    """The shards of all ranks, in order. Every rank finds the same.

    Args:
        rates: by layer and target how often each unit is read, (n,). Others are cut into even runs.
    Raises:
        UserError: units that so many ranks cannot share evenly.
    """
    for target, name in ((Target.HEADS, "groups of heads"), (Target.MLP, "neurons")):
        if dims.units(target) % world:
            raise UserError(
                f"{dims.units(target)} {name} are not shared out evenly over {world} GPUs; {_even_start(dims)}"
            )
    units: list[dict[UnitKey, Tensor]] = [{} for _ in range(world)]
    for layer in range(dims.n_layers):
        for target in TARGETS:
            key, n = UnitKey(layer, target), dims.units(target)
            given = None if rates is None else rates.get(key)
            if given is None or (target == Target.HEADS and dims.positions is Positions.ALIBI):  # slopes of all layers
                parts: Sequence[Tensor] = torch.arange(n).chunk(world)
            else:
                parts = share_out(given, world, block_of(n, world) if target == Target.MLP else 1)
            for mine, part in zip(units, parts, strict=True):
                mine[key] = part
    return [Shard(rank, world, dims, mine) for rank, mine in enumerate(units)]


def _even_start(dims: ModelDims) -> str:
    """How to start as many processes as can share a model evenly."""
    divided = math.gcd(dims.units(Target.HEADS), dims.units(Target.MLP))
    worlds = [str(n) for n in range(2, min(divided, MOST) + 1) if divided % n == 0]
    return f"take torchrun --nproc-per-node {' or '.join(worlds)}" if worlds else "start one process, without torchrun"


def share_out(rates: Tensor, world: int, block: int = 1) -> list[Tensor]:
    """Ids for each rank, ascending, as many for each, whose rates add up to nearly the same.

    The largest block goes to the rank with the least so far that still has room.

    Args:
        rates: (n,), n a multiple of world times block.

    >>> [part.tolist() for part in share_out(torch.tensor([0.9, 0.8, 0.1, 0.0]), 2)]
    [[0, 3], [1, 2]]
    """
    loads = rates.double().view(-1, block).sum(1)
    room, sums = [len(loads) // world] * world, [0.0] * world
    held: list[list[int]] = [[] for _ in range(world)]
    for index in loads.argsort(descending=True, stable=True).tolist():
        rank = min((rank for rank in range(world) if room[rank]), key=sums.__getitem__)
        held[rank].append(index)
        room[rank] -= 1
        sums[rank] += loads[index].item()
    return [(torch.tensor(sorted(part))[:, None] * block + torch.arange(block)).flatten() for part in held]


def block_of(n: int, world: int) -> int:
    """The largest power of two, at most ``BLOCK``, whose blocks so many ranks share evenly."""
    block = BLOCK
    while n % (block * world):
        block //= 2
    return block


def rates_of(bundle: Any) -> dict[UnitKey, Tensor]:
    """How often each unit is expected to be read, (n,) in 0 to 1, of the halves that a bundle's predictors select."""
    return {
        UnitKey(layer, Target(target)): selected_rates(bundle.frequency(layer, target), spec.density)
        for (layer, target), spec in bundle.specs.items()
        if not spec.dense
    }
