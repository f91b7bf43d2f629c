"""Measures how fast this machine reads memory: the yardstick for a step that reads weights once."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from dejavu_train.engine.cpu.engine import usable_cores

MEGABYTES = 512  # several times the caches of most processors
SECONDS = 0.7


@njit(nogil=True, fastmath=True)  # compiled anew in a moment: numba may find no folder for its cache
def _sum(data: np.ndarray) -> float:
    total = np.float32(0)
    for i in range(data.shape[0]):  # over an iterator LLVM would not make vector instructions of it
        total += data[i]
    return float(total)


class Reader:
    """Reads the same memory again and again, a share of it for each thread.

    Args:
        threads: None = as many as the process may use.
        megabytes: in all, which stay allocated. A pass shorter than the caches measures those.
    """

    def __init__(self, threads: int | None = None, megabytes: int = MEGABYTES) -> None:
        n = threads or usable_cores()
        self._parts = [np.ones((megabytes << 20) // 4 // n, np.float32) for _ in range(n)]
        self._pool = ThreadPoolExecutor(n)
        self.n_bytes = sum(part.nbytes for part in self._parts)
        _sum(self._parts[0][:16])

    def read(self) -> None:
        """One sequential pass over all of the memory."""
        list(self._pool.map(_sum, self._parts))


def read_bandwidth(threads: int | None = None, megabytes: int = MEGABYTES, seconds: float = SECONDS) -> float:
    """GB/s (1e9 bytes) of the fastest of some passes of sequential reading.

    Takes about a second, and the memory that it reads. Other work on the machine lowers it, and so does the work of
    others on a shared host. What is compared with it should be measured in turns with it, as `benchmarks.cpu_decode`
    does.
    """
    reader = Reader(threads, megabytes)
    best, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        reader.read()
        best = min(best, time.perf_counter() - started)
    return reader.n_bytes / float(best) / 1e9


if __name__ == "__main__":
    print(f"{read_bandwidth():.1f} GB/s with {usable_cores()} threads")
