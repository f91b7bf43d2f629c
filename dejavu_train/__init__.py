"""Contextual sparsity for OPT models: train predictors, run the model sparsely. Importing this costs nothing."""

from typing import TYPE_CHECKING, Any

from dejavu_train.models.register import register_when_loaded

if TYPE_CHECKING:
    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.bundle.guard_config import Guard
    from dejavu_train.sparse.model import SparseCausalLM, SparseForCausalLM, SparseOPTForCausalLM

    __version__: str

register_when_loaded()

__all__ = ["Bundle", "Guard", "SparseCausalLM", "SparseForCausalLM", "SparseOPTForCausalLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Bundle":
        from dejavu_train.bundle.artifact import Bundle

        return Bundle
    if name == "Guard":
        from dejavu_train.bundle.guard_config import Guard

        return Guard
    if name in ("SparseCausalLM", "SparseForCausalLM", "SparseOPTForCausalLM"):
        from dejavu_train.sparse import model

        return getattr(model, name)
    if name == "__version__":
        from dejavu_train.version import package_version

        return package_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
