"""Contextual sparsity for OPT models: train predictors, run the model sparsely. Importing this costs nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu_train.bundle.artifact import Bundle
    from dejavu_train.bundle.guard_config import Guard
    from dejavu_train.sparse.model import SparseOPTForCausalLM

__all__ = ["Bundle", "Guard", "SparseOPTForCausalLM"]


def __getattr__(name: str) -> Any:
    if name == "Bundle":
        from dejavu_train.bundle.artifact import Bundle

        return Bundle
    if name == "Guard":
        from dejavu_train.bundle.guard_config import Guard

        return Guard
    if name == "SparseOPTForCausalLM":
        from dejavu_train.sparse.model import SparseOPTForCausalLM

        return SparseOPTForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
