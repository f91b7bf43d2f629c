"""Sums over ranks in one kernel that waits for numbers, not for ranks: `dejavu_train.kernels.stages.rank_sum`.

The kernel is a link of a step's chain of dependent launches. What follows has read weights before a sum is there.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dejavu_train.engine.ranks.sums import GroupSums, Sums
from dejavu_train.kernels.stages.rank_sum import Inbox, rank_sum


class PushedSums(GroupSums):
    """Each rank pushes its part into the others' memory, without multicast.

    Of long prompts sums are NCCL's, which sends each number once.

    Raises:
        RuntimeError: GPUs that cannot reach each other's memory.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        super().__init__(device, group)
        from torch.distributed import _symmetric_memory

        self.name = "pushed over NVLink"
        self._inboxes: dict[int, Inbox] = {}
        self._memory = _symmetric_memory
        whole: Any = dist.group.WORLD
        self._group = (group or whole).group_name
        trial = self.buffer(16)
        out = torch.empty_like(trial)
        self.add(trial.fill_(1), out)
        if out[0].item() != dist.get_world_size(group):
            raise RuntimeError("a sum over NVLink is wrong here")

    def by_rank(self) -> Sums:
        """See `Sums.by_rank`. The kernel adds a number of each rank in the order of the ranks."""
        return self

    def buffer(self, *sizes: int) -> Tensor:
        """As `Sums.buffer`, on all ranks together: none may push before all inboxes are empty."""
        part = super().buffer(*sizes)
        entries = self._memory.empty(
            2, dist.get_world_size(self.group), part.numel(), dtype=torch.int64, device=self.device
        )
        handle = self._memory.rendezvous(entries, self._group)
        entries.zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        self._inboxes[part.data_ptr()] = Inbox.of(handle.rank, pointers, entries)
        return part

    def add(self, part: Tensor, out: Tensor, pdl: bool = False) -> None:
        rank_sum(part, out, self._inboxes[part.data_ptr()], pdl)
