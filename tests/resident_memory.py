"""How far the resident memory of this process grows while it works. What is freed goes back at once, so that it counts
once."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ALL_RELEASED = (-3, 1 << 17)  # M_MMAP_THRESHOLD
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")


def resident(name: str) -> int:
    """Bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def grown(work: Callable[..., None], first: tuple, *arguments: object) -> int:
    """By how many bytes it grew, at its peak. Libraries have done the same before, with the arguments ``first``."""
    ctypes.CDLL(None).mallopt(*ALL_RELEASED)
    torch.set_num_threads(1)
    work(*first)
    return peak(work, *arguments)


def peak(work: Callable[..., None], *arguments: object) -> int:
    """By how many bytes it grows while it works."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    work(*arguments)
    return resident("VmHWM") - before
