"""What the machine must have for what was asked: packages and devices, found without importing anything."""

import importlib.util
import re
from pathlib import Path

from dejavu_train.errors import UserError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def has_package(name: str) -> bool:
    """Whether ``import name`` would find something; a package that is there may still fail."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require_package(name: str, what: str, install: str) -> None:
    """Raise :class:`UserError` where ``what`` needs a package that is not installed; ``install`` is pip's argument."""
    if not has_package(name):
        raise UserError(f"{what} needs the package {name}, which is not installed: pip install {install}")


def check_device_name(name: str, key: str) -> None:
    """Raise :class:`UserError` for a device that cannot be one; whether it is there torch says."""
    if not _DEVICE.fullmatch(name):
        raise UserError(f"{key} must be auto, cpu, cuda or cuda:N, got {name}")


def free_memory() -> int | None:
    """Bytes that can be taken without swapping, as the kernel reckons; None where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
