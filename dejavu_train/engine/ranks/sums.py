"""The sums over ranks: one protocol, by `torch.distributed` anywhere, or in one kernel over NVLink (pushed.py).

Whatever adds up, all ranks get the same bits. Ranks must call the same methods in the same order.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Sums(Protocol):
    """Adds up what each rank has."""

    name: str

    def buffer(self, *sizes: int) -> Tensor:
        """Zeros, fp32, on this rank's device. What `add` takes."""
        ...

    def add(self, part: Tensor, out: Tensor, pdl: bool = False) -> None:
        """out = the sum of all ranks' parts. part: of `buffer`. Both contiguous and of one size. May be captured.

        pdl: part was written by a kernel of a chain of dependent launches, which a sum in one kernel may go on.
        """
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of any size and dtype, which may be written over."""
        ...

    def by_rank(self) -> "Sums":
        """Sums that add in one order, wherever in a buffer a number lies."""
        ...


class GroupSums:
    """By the collectives of `torch.distributed`: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device, self.group = device, group
        self.name = "NCCL" if device.type == "cuda" else "gloo"

    def buffer(self, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=torch.float32, device=self.device)

    def add(self, part: Tensor, out: Tensor, pdl: bool = False) -> None:
        out.copy_(part)
        dist.all_reduce(out, group=self.group)

    def total(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def by_rank(self) -> "Sums":
        """See `Sums.by_rank`. A ring or a tree has other orders for other parts of a buffer."""
        return RankOrderSums(self.device, self.group)


class RankOrderSums(GroupSums):
    """Each rank gathers all parts, and adds them in the order of the ranks."""

    def add(self, part: Tensor, out: Tensor, pdl: bool = False) -> None:
        gathered = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, part, group=self.group)
        out.copy_(gathered[0])
        for other in gathered[1:]:
            out.add_(other)
