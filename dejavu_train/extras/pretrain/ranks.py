"""The processes that train one model together: those that torchrun started, or this one alone.

Each has the whole model and takes its share of a step's rows. What they must agree on goes through here.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dejavu_train.ground.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, and on which device."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """This process's share of rows (B, ...), of which every process has all: (B / count, ...)."""
        return rows[self.rank :: self.count]

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over all processes, in its place."""
        if self.count > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all processes, so that all go on alike."""
        if self.count == 1:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return shared.tolist()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process runs the block before the others do."""
        if not self.first:
            dist.barrier()
        yield
        if self.first and self.count > 1:
            dist.barrier()


def is_first() -> bool:
    """Whether this process is the one that speaks, also where the others are no longer joined."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ["RANK"] == "0"


@contextlib.contextmanager
def joined(device: torch.device, rows: int) -> Iterator[Ranks]:
    """The processes of this run, connected until the context ends.

    Args:
        device: asked for. Each process takes the GPU of its number.
        rows: of a step, which all processes share out.
    Raises:
        UserError: the rows cannot be shared out evenly.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks(device)
        return
    if rows % count:
        raise UserError(f"--batch_rows must be a multiple of the {count} processes, got {rows}")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(device, dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
