"""The states between two layers, of all rows, in two files. A layer reads one and writes the other.

A small file says which layer is next, so that a killed run goes on with the layer in which it was.

    FOLDER/state.json   what the stream belongs to, and the next layer
    FOLDER/even.bin     (rows, d_model), read by even layers. odd.bin: by odd ones
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu_train.ground.files import json_digest, read_json, write_json

STATE = "state.json"


class Stream:
    """The states of all rows in front of layer ``next``, and behind it as far as it has run.

    Args:
        identity: JSON, of what the states belong to. A stream of another one, or of other sizes, begins anew.
        size: rows and d_model.
    Raises:
        OSError: the disk has no room for both files.
    """

    def __init__(self, folder: Path, identity: Any, size: tuple[int, int], dtype: torch.dtype) -> None:
        self._folder, self._digest = folder, json_digest([identity, list(size), str(dtype)])
        self._nbytes = size[0] * size[1] * dtype.itemsize
        self._folder.mkdir(parents=True, exist_ok=True)
        self.next = self._stored_layer()
        self._tensors: dict[int, Tensor] = {}
        for parity in (0, 1):
            _allocate(self._path(parity), self._nbytes)
            flat = torch.from_file(str(self._path(parity)), shared=True, size=size[0] * size[1], dtype=dtype)
            self._tensors[parity] = flat.view(size)

    def read(self, start: int, rows: int) -> Tensor:
        """(rows, d_model), what layer ``next`` reads."""
        return self._tensors[self.next % 2][start : start + rows]

    def written(self, start: int, rows: int) -> Tensor:
        """(rows, d_model), what was written last in the layer ``next``."""
        return self._tensors[(self.next + 1) % 2][start : start + rows]

    def write(self, start: int, states: Tensor) -> None:
        """Write what layer ``next`` gives for rows from ``start`` on, or needs on the way there."""
        self._tensors[(self.next + 1) % 2][start : start + len(states)] = states

    def advance(self) -> None:
        """Layer ``next`` is done for all rows."""
        self.next += 1
        write_json(self._folder / STATE, {"identity": self._digest, "next": self.next})

    def remove(self) -> None:
        self._tensors.clear()
        shutil.rmtree(self._folder)

    def _path(self, parity: int) -> Path:
        return self._folder / ("odd.bin" if parity else "even.bin")

    def _stored_layer(self) -> int:
        path = self._folder / STATE
        if not path.is_file():
            return 0
        stored = read_json(path, "the state of the stream")
        files = [self._path(parity) for parity in (0, 1)]
        whole = all(file.is_file() and file.stat().st_size == self._nbytes for file in files)
        return int(stored["next"]) if whole and stored["identity"] == self._digest else 0


def _allocate(path: Path, n_bytes: int) -> None:
    """Give a file all its blocks. What it holds stays.

    A full disk is an error here. Where a mapped page finds no block, the system ends the process without a word.
    """
    if not hasattr(os, "posix_fallocate"):  # as on macOS
        return
    with open(path, "r+b" if path.is_file() else "w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot
                raise OSError(error.errno, error.strerror, str(path)) from None
