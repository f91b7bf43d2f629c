"""Ends an evaluation whose numbers are not finite, by the name of the layer where that began."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from dejavu_train.errors import UserError
from dejavu_train.families import family_of
from dejavu_train.models.hooks import at_module, hooked


def check_logits(logits: Tensor, model: PreTrainedModel, ids: Tensor, **inputs: Any) -> None:
    """Refuse logits, or what was made of them, that hold a NaN or an infinity.

    Args:
        logits: of any shape.
        ids: (B, T) that they were computed of; read once more, after a fault alone, to find the layer.
        inputs: whatever else the model was given.
    Raises:
        UserError: one that is not finite.
    """
    if bool(torch.isfinite(logits).all()):
        return
    kind = str(model.dtype).removeprefix("torch.")
    wider = ", or take --dtype float32 or bfloat16" if model.dtype == torch.float16 else ""
    place = first_fault(model, ids, **inputs)
    began = "" if place is None else f", from {place} on"
    raise UserError(f"the logits of the model in {kind} are not finite{began}; check its weights{wider}")


@torch.no_grad()
def first_fault(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> str | None:
    """The first part of the model whose output for ids (B, T) is not finite; None where no one is known."""
    family = family_of(model)
    parts: list[tuple[str, nn.Module]] = [("the embeddings", module) for module in family.embeddings(model)]
    for layer, block in enumerate(family.blocks(model)):
        parts += [(f"the attention of layer {layer}", block.out), (f"the MLP of layer {layer}", block.down)]
    norm = family.final_norm(model)
    parts += [(f"the final {type(norm).__name__}", norm)]
    found: list[str] = []

    def look(name: str, values: Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            found.append(name)

    with hooked(at_module(part, "output", partial(look, name)) for name, part in parts if part is not None):
        model(input_ids=ids.to(model.device), use_cache=False, **inputs)
    if not found and not bool(torch.isfinite(model.get_output_embeddings().weight).all()):
        return "the LM head"
    return found[0] if found else None


class FiniteLogits(LogitsProcessor):
    """Refuses logits that are not finite within ``generate()`` of a dense model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores (B, V) as they are. Raises :class:`UserError` as :func:`check_logits`."""
        check_logits(scores, self.model, input_ids)
        return scores
