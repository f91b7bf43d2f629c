"""Loads what a rank holds of a model, for a bundle, and remembers in the model that it is a part."""

from typing import Any

import torch

from dejavu_train.engine.ranks.group import Group, agree
from dejavu_train.engine.ranks.part import RANKS
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.engine.ranks.reading import load_shard
from dejavu_train.engine.ranks.sharing import rates_of, shards_of
from dejavu_train.models.config_values import read_dims


def load_rank(
    name: str, bundle: Any, dtype: str | torch.dtype | None, group: Group, revision: str | None = None
) -> Any:
    """This rank's part of a model, on the rank's device. Units are shared out by the frequencies of a bundle.

    Raises:
        UserError: as `load_shard` and `shards_of`. Ranks whose models, bundles or dtypes differ.
    """
    dims = read_dims(name, revision)
    files = None if bundle is None else (bundle.weight_hash, bundle.digest())
    agree(group, dims, files, str(dtype), same="model, bundle and dtype")
    rates = None if bundle is None else rates_of(bundle)
    shard = shards_of(dims, group.world, rates)[group.rank]
    model, nbytes = load_shard(name, shard, dtype, group.device, revision)
    setattr(model, RANKS, Ranks(shard, group.sums, group, nbytes))
    return model
