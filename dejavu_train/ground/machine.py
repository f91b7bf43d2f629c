"""Needs of a call on the machine: packages and devices, found without importing anything."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dejavu_train.ground.errors import UserError

PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")  # of a device map, that accelerate works out
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
ROOT = Path("/")  # of the file system that the kernel describes itself in


def has_package(name: str) -> bool:
    """Whether ``import name`` would find something. A package that is there may still fail."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require_package(name: str, what: str, install: str) -> None:
    """Raise :class:`UserError` where ``what`` needs a package that is not installed. ``install`` is pip's argument."""
    if not has_package(name):
        raise UserError(f"{what} needs the package {name}, which is not installed: pip install {install}")


def check_device_name(name: str, key: str) -> None:
    """Raise :class:`UserError` for a device that cannot be one. Whether it is there torch says."""
    if not _DEVICE.fullmatch(name):
        raise UserError(f"{key} must be auto, cpu, cuda or cuda:N, got {name}")


def check_device_map(name: str | None, key: str) -> None:
    """Raise :class:`UserError` for a device map that cannot be one, or without the package that lays models out."""
    if name is None:
        return
    if name not in PLACEMENTS and not _DEVICE.fullmatch(name):
        raise UserError(f"{key} must be one of {', '.join(PLACEMENTS)}, or a device such as cuda:0, got {name}")
    require_package("accelerate", key, "'dejavu-train[large]'")


def cores() -> int:
    """How many cores this process may use: those it is bound to, and no more than its control groups' quotas give.

    A quota of a part of a core is rounded down: threads that wait for each other lose more when one is held back.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for group in _control_groups("cpu"):
        quota, period = [*_numbers(group / "cpu.max"), None, None][:2]  # version 2; "max" is no number
        if quota is None or period is None:
            quota = next(iter(_numbers(group / "cpu.cfs_quota_us")), None)  # version 1; -1 = none
            period = next(iter(_numbers(group / "cpu.cfs_period_us")), None)
        if quota and period and quota > 0:
            quotas.append(quota // period)
    return max(1, min([bound, *quotas]))


def free_memory() -> int | None:
    """Bytes that can be taken without swapping, of the machine and of this process's control groups.

    None where the kernel does not say.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", (ROOT / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    free = [] if match is None else [1024 * int(match[1])]
    for group in _control_groups("memory"):
        for most, taken, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _numbers(group / most), _numbers(group / taken)
            if limit and used:
                cached = sum(_entry(group / "memory.stat", f"{prefix}{kind}_file") for kind in ("inactive", "active"))
                free.append(max(0, limit[0] - used[0] + cached))
    return min(free, default=None)


def peak_memory() -> int | None:
    """Bytes of main memory that this process held at most. None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux kilobytes


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of both versions, where they usually lie."""
    try:
        lines = os.fsdecode((ROOT / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if names and controller not in names.split(","):
            continue
        for base in (names, controller) if names else ("", "unified"):
            top = ROOT / "sys/fs/cgroup" / base
            folder = top / path.strip("/")
            # In a container the path may be that of the machine outside, and the container's own group lies on top.
            if ".." in folder.parts:
                folder = top
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a file of the kernel. None where there is no such file."""
    try:
        return [int(word) for word in path.read_text().split() if word.lstrip("-").isdigit()]
    except OSError:
        return []


def _entry(path: Path, name: str) -> int:
    """The number behind a name in a file of names and numbers. 0 where it is not there."""
    try:
        match = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if match is None else int(match[1])
