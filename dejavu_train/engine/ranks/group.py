"""The processes that decode together: found by what torchrun says, asked for the same, and ended together."""

import atexit
import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dejavu_train.engine.ranks.sums import GroupSums, Sums
from dejavu_train.engine.ranks.watch import Watch, connect
from dejavu_train.ground.errors import UserError, first_line

RENDEZVOUS_SECONDS = 120


class Hosts(Protocol):
    """Channel between the hosts of all ranks between steps."""

    def gather(self, number: int) -> list[int]:
        """The numbers of all ranks, by rank."""
        ...

    def waiting(self) -> Any:
        """A context in which this rank waits for the others."""
        ...


class Group:
    """All ranks of a launcher, of which this process is one.

    Attributes:
        rank, world: the number among so many. device: of this rank. sums: over the devices.
    """

    def __init__(self, rank: int, world: int, device: torch.device, watch: Watch, hosts: Any) -> None:
        self.rank, self.world, self.device, self.watch, self._hosts = rank, world, device, watch, hosts
        with self.waiting():
            self.sums: Sums = sums_of(device)

    def gather(self, number: int) -> list[int]:
        """See `Hosts.gather`."""
        own = torch.tensor([number], dtype=torch.int64)
        found = [torch.zeros_like(own) for _ in range(self.world)]
        with self.waiting():
            dist.all_gather(found, own, group=self._hosts)
        return [int(each) for each in found]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See `Hosts.waiting`. A sum that fails because a rank is gone ends this one."""
        try:
            with self.watch.waiting():
                yield
        except (dist.DistBackendError, dist.DistNetworkError, ConnectionError):
            self.watch.lost()
        except RuntimeError as error:
            if _is_of_gloo(error):
                self.watch.lost()
            raise

    def describe(self) -> str:
        """Who decodes together, in a line."""
        where = "GPUs" if self.device.type == "cuda" else "processes on a CPU, in plain torch"
        return f"{self.world} {where} decode together, sums by {self.sums.name}"

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        self.watch.fail(first_line(error) if isinstance(error, Exception) else type(error).__name__)


def _is_of_gloo(error: RuntimeError) -> bool:
    """Tell whether gloo raised it. Its errors have no class of their own."""
    return any(word in str(error) for word in ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe"))


def agree(hosts: Hosts, *asked: Any, same: str = "prompts and options") -> None:
    """Make sure that all ranks are asked for the same.

    Args:
        same: what the remedy says of ``asked``.
    Raises:
        UserError: on all of them, where they are not.
    """
    digest = hashlib.sha256(repr(asked).encode()).digest()
    found = hosts.gather(int.from_bytes(digest[:8], "little", signed=True))
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise UserError(
            f"rank {others[0]} was asked for something else than rank 0; give all processes the same {same}"
        )


_found: list[Group] = []


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def group_of_launcher(device: Any = None) -> Group:
    """The ranks of torchrun. They come together once a process.

    Args:
        device: None or "auto" = a GPU each where there are any, else the CPU.
    Raises:
        UserError: fewer GPUs than ranks, or a rank that does not come.
    """
    if not _found:
        _found.append(_come_together(device))
    return _found[0]


def _come_together(device: Any) -> Group:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    chosen = _device_of(local, device)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
        # Sums by gloo wait as long as a step of a slow CPU takes.
        hosts = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        watch = _watch(rank, world, hosts)
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"rank {rank} of {world} did not meet the others within {RENDEZVOUS_SECONDS} s ({first_line(error)}); start"
            " all of them with torchrun --nproc-per-node N"
        ) from None
    atexit.register(_say_bye, watch)
    return Group(rank, world, chosen, watch, hosts)


def _say_bye(watch: Watch) -> None:
    if getattr(sys, "last_value", None) is None:
        watch.bye()


def _watch(rank: int, world: int, hosts: Any) -> Watch:
    address = os.environ.get("MASTER_ADDR", "localhost")
    server = socket.create_server(("", 0)) if rank == 0 else None
    port = 0 if server is None else server.getsockname()[1]
    told = torch.tensor([port, secrets.randbits(62)], dtype=torch.int64)
    dist.broadcast(told, 0, group=hosts)
    port, secret = (int(each) for each in told)
    return Watch(rank, world, connect(rank, world, address, port, secret, server))


def _device_of(local: int, asked: Any) -> torch.device:
    if (asked in (None, "auto") and not torch.cuda.is_available()) or torch.device(asked or "cuda").type == "cpu":
        return torch.device("cpu")
    if asked not in (None, "auto", "cuda"):
        raise UserError(f"under torchrun each process takes a GPU of its own, got the device {asked}; leave it out")
    count = torch.cuda.device_count()
    if local >= count:
        remedy = f"give --nproc-per-node {count}" if count else "leave the device cuda out"
        raise UserError(f"process {local} of this host needs a GPU of its own, and there are {count}; {remedy}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def sums_of(device: torch.device, group: Any = None) -> Sums:
    """The fastest that runs on every rank of the group."""
    made, works = None, 0
    if device.type == "cuda":
        try:
            from dejavu_train.engine.ranks.pushed import PushedSums

            made, works = PushedSums(device, group), 1
        except (ImportError, RuntimeError, AttributeError):  # no NVLink between them, or a build of torch without
            pass
    agreed = torch.tensor([works], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return made if made is not None and agreed.item() else GroupSums(device, group)
