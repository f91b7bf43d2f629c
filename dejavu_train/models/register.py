"""Has transformers know 4-bit models after ``import dejavu_train``, without importing transformers for that.

Where transformers' table of quantizers is loaded already, ours joins it at once; else as soon as it is loaded.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TABLE = "transformers.quantizers.auto"
OURS = "dejavu_train.models.int4_quantizer"


def register_when_loaded() -> None:
    """Import ``OURS`` behind ``TABLE``, now or later."""
    if TABLE in sys.modules:
        importlib.import_module(OURS)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``TABLE`` as the finders behind it do, with a loader that imports ``OURS`` afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(OURS)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec
