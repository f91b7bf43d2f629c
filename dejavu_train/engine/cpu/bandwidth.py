"""Measures how fast this machine reads memory: the yardstick for a step that reads weights once."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from dejavu_train.engine.cpu.engine import usable_cores

MEGABYTES = 512  # several times the caches of most processors
SECONDS = 0.7


@njit(nogil=True, cache=True, fastmath=True)
def _sum(data: np.ndarray) -> float:
    total = np.float32(0)
    for i in range(data.shape[0]):  # over an iterator LLVM would not make vector instructions of it
        total += data[i]
    return float(total)


def read_bandwidth(threads: int | None = None, megabytes: int = MEGABYTES, seconds: float = SECONDS) -> float:
    """GB/s (1e9 bytes) of the fastest of some passes of sequential reading, a share of the memory for each thread.

    Takes about a second, and the memory that it reads. Other work on the machine lowers it.

    Args:
        threads: None = as many as the process may use.
    """
    n = threads or usable_cores()
    parts = [np.ones((megabytes << 20) // 4 // n, np.float32) for _ in range(n)]
    _sum(parts[0][:16])
    best, end = np.inf, time.perf_counter() + seconds
    with ThreadPoolExecutor(n) as pool:
        while time.perf_counter() < end:
            started = time.perf_counter()
            list(pool.map(_sum, parts))
            best = min(best, time.perf_counter() - started)
    return sum(part.nbytes for part in parts) / float(best) / 1e9


if __name__ == "__main__":
    print(f"{read_bandwidth():.1f} GB/s with {usable_cores()} threads")
