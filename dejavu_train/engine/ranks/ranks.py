"""Place of an engine that is one of several ranks."""

import contextlib
from dataclasses import dataclass
from typing import Any

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


def waiting(ranks: Ranks | None) -> contextlib.AbstractContextManager[Any]:
    """Context for waiting for other ranks, where there are any."""
    return contextlib.nullcontext() if ranks is None else ranks.hosts.waiting()
