"""Ends a call whose numbers are not finite, by the name of the layer where that began."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from dejavu_train.families import family_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import at_module, hooked

HEAD = "the final LayerNorm or the LM head"


def not_finite(what: str, dtype: torch.dtype | None = None) -> UserError:
    """The error of a model that gives NaN or infinity.

    Args:
        what: a statement of what is not finite, with the place where that began.
        dtype: may be too narrow for the model. None = it is not.
    """
    name = str(dtype).removeprefix("torch.")
    wider = f", and if {name} is too narrow for its activations load it with dtype bfloat16 or float32"
    return UserError(f"{what}; check the model's weights{'' if dtype is None else wider}")


def name_half(half: int) -> str:
    """The name of half layer 2 * layer + (0 attention | 1 MLP).

    >>> name_half(7)
    'the MLP of layer 3'
    """
    return f"the {'MLP' if half % 2 else 'attention'} of layer {half // 2}"


def finite_positions(values: Tensor) -> Tensor:
    """(B, T) bool: where all of values (B, T, n) are finite. No tensor of their size is made."""
    return values.detach().sum(-1, dtype=torch.float32).isfinite()


def check_finite(values: Tensor, shown: Tensor, inputs: Callable[[], Sequence[Tensor | None]], n_layers: int) -> None:
    """Raise :class:`UserError` where values (B, T, n) are not finite at positions that are shown, (B, T) bool.

    Args:
        inputs: gives (B, T) bool, where the input of each layer, then that of the final LayerNorm is finite. Nothing
            where all of these are. None: nobody knows of this layer's. Asked for after a fault alone.
        n_layers: of the model.
    """
    if bool((finite_positions(values) | ~shown.to(values.device)).all()):
        return
    parts = [None if fine is None else bool((fine | ~shown.to(fine.device)).all()) for fine in inputs()]
    names = ["the embeddings", *(f"layer {layer}" for layer in range(n_layers)), HEAD]
    place = parts.index(False) if False in parts else len(parts)
    where = names[place] if parts else HEAD
    if parts and place and parts[place - 1] is None:
        where += " or an earlier layer"
    narrow = None if values.dtype == torch.float32 else values.dtype
    raise not_finite(f"the model's numbers are not finite from {where} on", narrow)


def check_logits(logits: Tensor, model: PreTrainedModel, ids: Tensor, **inputs: Any) -> None:
    """Refuse logits, or what was made of them, that hold a NaN or an infinity.

    Args:
        logits: of any shape.
        ids: (B, T) that they were computed of. Read once more, after a fault alone, to find the layer.
        inputs: whatever else the model was given.
    Raises:
        UserError: one that is not finite.
    """
    if bool(torch.isfinite(logits).all()):
        return
    place = first_fault(model, ids, **inputs)
    began = "" if place is None else f", from {place} on"
    what = f"the logits of the model in {str(model.dtype).removeprefix('torch.')} are not finite{began}"
    raise not_finite(what, model.dtype if model.dtype == torch.float16 else None)


@torch.no_grad()
def first_fault(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> str | None:
    """The first part of the model whose output for ids (B, T) is not finite. None where no one is known."""
    family = family_of(model)
    parts: list[tuple[str, nn.Module]] = [("the embeddings", module) for module in family.embeddings(model)]
    for layer, block in enumerate(family.blocks(model)):
        parts += [(name_half(2 * layer), block.out), (name_half(2 * layer + 1), block.down)]
        parts += [] if block.targets else [(f"layer {layer}", block.whole)]
    norm = family.final_norm(model)
    parts += [(f"the final {type(norm).__name__}", norm)]
    faulty: list[str] = []

    def look(name: str, values: Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            faulty.append(name)

    with hooked(at_module(part, "output", partial(look, name)) for name, part in parts if part is not None):
        model(input_ids=ids.to(model.device), use_cache=False, **inputs)
    if not faulty and not bool(torch.isfinite(model.get_output_embeddings().weight).all()):
        return "the LM head"
    return faulty[0] if faulty else None


class FiniteLogits(LogitsProcessor):
    """Refuses logits that are not finite within ``generate()`` of a dense model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores (B, V) as they are. Raises :class:`UserError` as :func:`check_logits`."""
        check_logits(scores, self.model, input_ids)
        return scores
