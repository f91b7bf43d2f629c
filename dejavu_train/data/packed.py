"""Whole numbers of 32 bits as few bytes: bytes of equal weight side by side compress better, by LZMA."""

import lzma

import numpy as np


def pack(numbers: np.ndarray) -> bytes:
    """Numbers of any shape from 0 to 2^32 - 1, whose shape is not kept."""
    planes = np.ascontiguousarray(numbers, dtype="<u4").reshape(-1).view(np.uint8).reshape(-1, 4).T
    return lzma.compress(planes.tobytes(), preset=9)


def unpack(data: bytes) -> np.ndarray:
    """(N,) uint32, what :func:`pack` was given.

    Raises:
        ValueError, lzma.LZMAError: damaged data.
    """
    planes = np.frombuffer(lzma.decompress(data), np.uint8)
    return np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4")[:, 0]
