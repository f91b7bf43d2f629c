"""Whether a model is a part of one. Loads no kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads Triton
    from dejavu_train.engine.ranks.ranks import Ranks

RANKS = "dejavu_ranks"  # of a model that is a part


def ranks_of(model: Any) -> "Ranks | None":
    """Ranks of a model that `load_rank` has loaded. None = it is whole."""
    found: Ranks | None = getattr(model, RANKS, None)
    return found
