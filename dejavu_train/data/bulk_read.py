"""Reads long stretches of a shard's dataset with several threads, straight into their place in memory. Hashes files so.

The HDF5 library has one lock for all threads and copies every row more than once. Our chunks hold whole rows, one after
the other and uncompressed, so their bytes are read from where the library says they lie.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from dejavu_train.ground.files import sha256_file
from dejavu_train.ground.machine import cores

PIECE_BYTES = 16 << 20  # of one read
MOST_THREADS = 8
Piece = tuple[Path, int, int, int]  # file, offset of its first byte, first row in the result, rows


def runs(dataset: h5py.Dataset, start: int, stop: int) -> list[tuple[int, int]] | None:
    """Where rows ``start`` .. ``stop`` - 1 lie: (offset in the file, rows) of stretches of bytes, in order.

    None where they do not lie in the file as they are: compressed, of another byte order, or never written.
    """
    plain = dataset.chunks is not None and dataset.dtype.isnative and dataset.chunks[1:] == dataset.shape[1:]
    if not plain or dataset.id.get_create_plist().get_nfilters():
        return None
    row = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=int))
    height = dataset.chunks[0]
    runs: list[tuple[int, int]] = []
    for first in range(start - start % height, stop, height):
        at = dataset.id.get_chunk_info_by_coord((first, *(0 for _ in dataset.shape[1:]))).byte_offset
        if at is None:
            return None
        low, high = max(start, first), min(stop, first + height)
        offset = at + (low - first) * row
        if runs and runs[-1][0] + runs[-1][1] * row == offset and runs[-1][1] * row < PIECE_BYTES:
            runs[-1] = (runs[-1][0], runs[-1][1] + high - low)
        else:
            runs.append((offset, high - low))
    return runs


def pieces(path: Path, found: Iterable[tuple[int, int]], first: int) -> Iterator[Piece]:
    """The same runs with the places of their rows in the result, which begin at ``first``."""
    for offset, rows in found:
        yield path, offset, first, rows
        first += rows


def fill(result: Tensor, pieces: Iterable[Piece]) -> None:
    """Read all pieces into their rows of ``result`` (N, ...), contiguous, on a CPU or a GPU.

    Raises:
        OSError: a file that ends too early, or cannot be read.
    """
    row = result[:1].nbytes

    def read(piece: Piece) -> None:
        path, offset, first, rows = piece
        # Pinned memory comes from torch's pool, which gives it out again only when the copy is over.
        on_gpu = result.device.type == "cuda"
        place = result[first : first + rows]
        buffer = torch.empty(place.shape, dtype=place.dtype, pin_memory=True) if on_gpu else place
        view = buffer.view(torch.uint8).numpy().data.cast("B")
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < rows * row:
                got = file.readinto(view[done:])
                if not got:
                    raise OSError(f"{path.name} ends at byte {offset + done}")
                done += got
        if on_gpu:
            place.copy_(buffer, non_blocking=True)

    with ThreadPoolExecutor(min(MOST_THREADS, cores())) as pool:
        for _ in pool.map(read, pieces):
            pass


def sha256_files(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file. One thread hashes no faster than a disk reads.

    Raises:
        OSError: one that cannot be read.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, cores())) as pool:
        return list(pool.map(sha256_file, paths))
