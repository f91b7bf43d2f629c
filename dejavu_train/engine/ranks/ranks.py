"""What an engine is told that is one of several ranks."""

from dataclasses import dataclass

from dejavu_train.engine.ranks.group import Hosts
from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.engine.ranks.sums import Sums


@dataclass(frozen=True)
class Ranks:
    """shard: what this rank holds. sums: over the devices of all. hosts: what their hosts tell each other.

    nbytes: read of the model's files.
    """

    shard: Shard
    sums: Sums
    hosts: Hosts
    nbytes: int = 0
