"""How a format multiplies the listed neurons of one token (`stages.mlp`)."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton.language as tl

from dejavu_train.kernels.common.checks import INTERPRET

Kind = TypeVar("Kind", bound=type)


def _key(constants: tuple[Any, ...]) -> str:
    return " ".join(str(getattr(each, "cache_key", each)) for each in constants)


def keyed(kind: Kind) -> Kind:
    """A named tuple of constants. Triton keeps compiled kernels by its functions' sources, not by their names."""
    kind.cache_key = property(_key)  # type: ignore[attr-defined]
    return kind


def constants(how: Any) -> Any:
    """The tuple as a kernel takes it. Its numbers are constants to triton 3.9 in any case, to 3.6 only as these.

    Triton's interpreter takes numbers.
    """

    def constant(member: Any) -> Any:
        if isinstance(member, tuple):
            member = constants(member)
        return tl.constexpr(member) if isinstance(member, int | float | tuple) else member

    return how if INTERPRET else type(how)(*map(constant, how))


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
