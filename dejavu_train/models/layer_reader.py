"""Reads the weights of one layer after the other from a model's files, the next one while the present one runs.

A model on the CPU has its weights mapped from their files, and what was touched once stays in the process. So a layer
is read into memory of its own, which is free again when the layer is done. Two layers at most are there at a time.
Several threads read parts of a tensor: the system clears fresh memory page by page, which one thread waits for.

For a GPU the memory is two pinned blocks in turn, from which a copy is several times as fast. A layer has left its
block when it is on the GPU, and so before the next one is asked for.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.ground.errors import UserError
from dejavu_train.ground.machine import cores
from dejavu_train.models.load import DTYPE_SPELLED, SPELLED
from dejavu_train.models.stored import TensorEntry, own_name, read_header, stored_files

READERS, PART = 8, 1 << 25  # threads, and bytes that one reads at a time
ALIGNMENT = 64


@dataclass
class Reading:
    """Reads so far: bytes, and the seconds for which they took."""

    nbytes: int = 0
    seconds: float = 0.0


class LayerReader:
    """The stored tensors of each layer, by their names within it.

    Args:
        name: folder or hub id of ``model``.
        model: on the CPU.
        layers: of ``model``, in order.
        coded: its matrices are codes. What it has in another dtype than the files is not read then.
        pinned: what is taken is copied at once, to a GPU. It is valid until the next call.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        layers: Sequence[nn.Module],
        revision: str | None = None,
        coded: bool = False,
        pinned: bool = False,
    ) -> None:
        self._coded, self._pinned = coded, pinned
        self._blocks: list[Tensor] = []
        self._stored: dict[str, tuple[Path, TensorEntry]] = {}
        for file in stored_files(name, revision=revision):
            if file.suffix == ".safetensors":
                self._stored |= {own_name(key): (file, entry) for key, entry in read_header(file).items()}
        self._layers = layers
        names = {id(module): own_name(path) for path, module in model.named_modules()}
        self._names = [names[id(layer)] for layer in layers]
        self._pool = ThreadPoolExecutor(1, "layer-reader")
        self._readers = ThreadPoolExecutor(min(READERS, cores()), "layer-part-reader")
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self.reading = Reading()

    def take(self, number: int, then: int) -> dict[str, Tensor]:
        """The tensors of a layer as they are stored, while those of the layer ``then`` begin to be read.

        What lies in no safetensors file, or in another form, is not among them: it stays as the model has it.
        """
        ahead, self._ahead = self._ahead, None
        made = ahead[1].result() if ahead is not None and ahead[0] == number else self._read(number)
        if 0 <= then < len(self._layers):
            self._ahead = then, self._pool.submit(self._read, then)
        return made

    def _read(self, number: int) -> dict[str, Tensor]:
        began, layer, prefix = time.monotonic(), self._layers[number], self._names[number]
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        places = {name: self._find(f"{prefix}.{name}", tensor) for name, tensor in tensors}
        found = {name: place for name, place in places.items() if place is not None}
        made = self._room({name: entry for name, (_, entry) in found.items()})
        for name, tensor in made.items():
            self._fill(tensor, *found[name])
            self.reading.nbytes += tensor.nbytes
        self.reading.seconds += time.monotonic() - began
        return made

    def _room(self, entries: dict[str, TensorEntry]) -> dict[str, Tensor]:
        """Tensors to read into: of their own, or in the block that was not used last."""
        if not self._pinned:
            return {name: _empty(entry) for name, entry in entries.items()}
        ends = list(accumulate(_aligned(entry.nbytes) for entry in entries.values()))
        size = ends[-1] if ends else 0
        block = self._blocks.pop(0) if len(self._blocks) == 2 else None
        if block is None or len(block) < size:
            block = _block(size)
        self._blocks.append(block)
        made = {}
        for (name, entry), end in zip(entries.items(), ends, strict=True):
            begin = end - _aligned(entry.nbytes)
            own = block[begin : begin + entry.nbytes].view(DTYPE_SPELLED[entry.dtype])
            made[name] = own.view(entry.shape)
        return made

    def exact(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter outside of the layers as it is stored, where the model has rounded it. name: in the model."""
        found = self._find(own_name(name), tensor)
        rounded = found is not None and found[1].dtype != SPELLED.get(tensor.dtype)
        return self._fill(_empty(found[1]), *found) if found is not None and rounded else tensor

    def _find(self, name: str, tensor: Tensor) -> tuple[Path, TensorEntry] | None:
        """Where a tensor of the model lies. None: nowhere, or in a form that cannot take its place."""
        found = self._stored.get(name)
        if found is None or found[1].shape != tuple(tensor.shape):
            return None
        numbers = not self._coded and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        dtype = DTYPE_SPELLED.get(found[1].dtype)
        return found if dtype == tensor.dtype or (numbers and dtype is not None and dtype.is_floating_point) else None

    def _fill(self, made: Tensor, file: Path, entry: TensorEntry) -> Tensor:
        view: Any = made.view(-1).view(torch.uint8).numpy().data if made.numel() else b""
        parts = [(file, entry.begin + at, view[at : at + PART]) for at in range(0, len(view), PART)]
        for _ in self._readers.map(_read_part, *zip(*parts, strict=True)):
            pass  # an error of a thread is raised here
        return made


def _empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPE_SPELLED[entry.dtype])


def _block(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # a host that lets no more memory be pinned: copies are slower, and right
        return torch.empty(size, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _read_part(file: Path, begin: int, view: Any) -> None:
    with open(file, "rb", buffering=0) as stored:
        stored.seek(begin)
        done = 0
        while done < len(view):
            count = stored.readinto(view[done:])
            if not count:
                raise UserError(f"the weights file {file} ended early; fetch or save it again")
            done += count
