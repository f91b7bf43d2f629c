"""How a format multiplies the listed neurons of one token (`stages.mlp`)."""

from dataclasses import dataclass
from typing import Any

import torch


def constants_key(constants: tuple[Any, ...]) -> str:
    """What Triton keeps compiled kernels under: constants that are functions count by their sources, not by name."""
    return " ".join(str(getattr(each, "cache_key", each)) for each in constants)


@dataclass(frozen=True)
class ListedLaunch:
    """how: a format's sizes and functions. registers: of a thread, at most. sums: dtype of the programs' sums.

    pairs: x without a norm is read as int32 pairs.
    """

    how: Any
    programs: int
    warps: int
    registers: int | None = None
    sums: torch.dtype = torch.float32
    pairs: bool = False
