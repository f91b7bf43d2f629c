"""Has transformers know this package after ``import dejavu_train``, without importing transformers for that.

4-bit models are loaded, gates of ours are computed, and a folder that holds a bundle beside its model is loaded as the
sparse model.
Where a module of transformers is loaded already, ours joins it at once, else as soon as it is loaded.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

OURS = {  # which module of ours is imported behind which of transformers
    "transformers.activations": "dejavu_train.families.gates",
    "transformers.models.llama.modeling_llama": "dejavu_train.families.llama_gates",
    "transformers.models.mistral.modeling_mistral": "dejavu_train.families.mistral_gates",
    "transformers.quantizers.auto": "dejavu_train.models.int4_quantizer",
    "transformers.models.auto.configuration_auto": "dejavu_train.sparse.auto_config",
    "transformers.models.auto.modeling_auto": "dejavu_train.sparse.auto_model",
}


def register_when_loaded() -> None:
    """Import each module of ``OURS`` behind the one that it changes, now or later."""
    for theirs, ours in OURS.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of transformers as the finders behind it do, with a loader that imports ours afterwards."""

    def __init__(self) -> None:
        self._waiting = {theirs: ours for theirs, ours in OURS.items() if theirs not in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ours = self._waiting.pop(fullname, None)  # not ours again while the finders behind this one look for it
        if ours is None:
            return None
        spec = importlib.util.find_spec(fullname)
        self._waiting[fullname] = ours  # who looks for a module need not load it
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self._waiting.pop(fullname, None)
                execute(module)
                importlib.import_module(ours)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec
