"""Decoding on a CPU: compiled with numba, no compiler on the user's machine.

Numba is imported when the engine is first asked for: it may be missing, or broken where it is there.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dejavu_train.engine.inputs import Sampling
from dejavu_train.ground.errors import Unsupported

if TYPE_CHECKING:
    from dejavu_train.engine.cpu.engine import CpuEngine
    from dejavu_train.engine.cpu.weights import CpuWeights

__all__ = ["CpuEngine", "CpuWeights", "Sampling", "load_engine"]
_MODULES = {"CpuEngine": "engine", "CpuWeights": "weights"}


def load_engine() -> None:
    """Import numba, then the engine.

    Raises:
        Unsupported: Windows, or numba is not installed, its LLVM does not load, or it is a version that the engine does
            not know.
    """
    if sys.platform == "win32":
        raise Unsupported("the CPU engine's threads are those of Linux and macOS, and this is Windows")
    try:
        importlib.import_module("numba")
    except Exception as error:  # of somebody else: OSError, ImportError, AttributeError and SystemError were seen
        raise _cannot_load(error) from error
    try:
        importlib.import_module("dejavu_train.engine.cpu.engine")
    except ImportError as error:
        raise _cannot_load(error) from error


def _cannot_load(error: Exception) -> Unsupported:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Unsupported(f"the CPU engine cannot be loaded ({reason}), install numba anew (pip install numba) for it")


def __getattr__(name: str) -> Any:
    """The engine's classes. Raises Unsupported as `load_engine` does."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_engine()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
