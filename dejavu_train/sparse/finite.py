"""Ends a call whose numbers are not finite, by the name of the layer where that began."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dejavu_train.errors import UserError

HEAD = "the final LayerNorm or the LM head"


def not_finite(where: str, dtype: torch.dtype) -> UserError:
    """The error of a model that gives NaN or infinity; ``where``: the part that did so first."""
    name = str(dtype).removeprefix("torch.")
    wider = "" if dtype == torch.float32 else f", or load the model in a wider dtype than {name}, such as float32"
    return UserError(f"the model's numbers are not finite from {where} on; check its weights{wider}")


def finite_positions(values: Tensor) -> Tensor:
    """(B, T) bool: where all of values (B, T, n) are finite; no tensor of their size is made."""
    return values.detach().sum(-1, dtype=torch.float32).isfinite()


def check_finite(values: Tensor, shown: Tensor, inputs: Callable[[], Sequence[Tensor]], n_layers: int) -> None:
    """Raise :class:`UserError` where values (B, T, n) are not finite at positions that are shown, (B, T) bool.

    Args:
        inputs: gives (B, T) bool, where the input of each layer, then that of the final LayerNorm is finite; nothing
            where all of these are. Asked for after a fault alone.
        n_layers: of the model.
    """
    if bool((finite_positions(values) | ~shown.to(values.device)).all()):
        return
    parts = [bool((fine | ~shown.to(fine.device)).all()) for fine in inputs()]
    names = ["the embeddings", *(f"layer {layer}" for layer in range(n_layers)), HEAD]
    raise not_finite(names[parts.index(False) if False in parts else len(parts)] if parts else HEAD, values.dtype)
