"""Modules that are forgotten for a while, as if the process had never imported them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def forget_modules(chosen: Callable[[str], bool]) -> Iterator[None]:
    """Forget the modules whose names are chosen, and bring them back at the end.

    An import sets a module in two places: in ``sys.modules`` and as an attribute of its package. Both are restored.
    Otherwise later tests patch a module that nobody uses any more.
    """
    saved, bound = _take(chosen)
    try:
        yield
    finally:
        _take(chosen)
        sys.modules.update(saved)
        for name in bound:
            package, _, child = name.rpartition(".")
            setattr(sys.modules[package], child, saved[name])


def _take(chosen: Callable[[str], bool]) -> tuple[dict[str, ModuleType], list[str]]:
    """Remove the chosen modules from both places. Returns them, and the names that were attributes of a package."""
    taken = {name: module for name, module in sys.modules.items() if chosen(name)}
    bound = []
    for name, module in taken.items():
        package, _, child = name.rpartition(".")
        if package in sys.modules and vars(sys.modules[package]).get(child) is module:
            delattr(sys.modules[package], child)
            bound.append(name)
    for name in taken:
        del sys.modules[name]
    return taken, bound
