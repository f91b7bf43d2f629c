"""Sums over ranks in one kernel that waits for numbers, not for ranks: `dejavu_train.kernels.stages.rank_sum`.

The kernel is a link of a step's chain of dependent launches. What follows has read weights before a sum is there.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dejavu_train.engine.ranks.sums import NVLinkSums
from dejavu_train.kernels.stages.rank_sum import Inbox, rank_sum


class PushedSums(NVLinkSums):
    """Each rank pushes its part into the others' memory."""

    how = "pushed"

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._inboxes: dict[int, Inbox] = {}
        super().__init__(device, group)

    def buffer(self, *sizes: int) -> Tensor:
        """As `Sums.buffer`, on all ranks together: none may push before all inboxes are empty."""
        part = super().buffer(*sizes)
        entries, handle = self.shared(2, dist.get_world_size(self.group), part.numel(), dtype=torch.int64)
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        self._inboxes[part.data_ptr()] = Inbox.of(handle.rank, pointers, entries)
        return part

    def add(self, part: Tensor, out: Tensor, pdl: bool = False) -> None:
        rank_sum(part, out, self._inboxes[part.data_ptr()], pdl)
