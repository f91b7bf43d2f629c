"""What stands where in the inputs of a sparse model: positions, padding, lengths of prompts."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dejavu_train.errors import UserError

SparseFrom = int | Tensor | str


def sparse_positions(start: SparseFrom, positions: Tensor, past: int) -> Tensor:
    """(B, T) bool: which of ``positions`` lie at or behind ``sparse_from``; "prompt": those behind a cache of ``past``.

    Raises:
        UserError: another word, or starts for another number of rows.
    """
    if isinstance(start, str):
        if start != "prompt":
            raise UserError(f"sparse_from must be a position, one per row, or 'prompt', got {start}")
        return torch.full_like(positions, past > 0, dtype=torch.bool)
    if isinstance(start, Tensor):
        start = start.to(positions.device).reshape(-1)
        if positions.shape[0] % len(start):
            raise UserError(f"sparse_from has {len(start)} rows, the batch has {positions.shape[0]}")
        # Beam search and several returned sequences repeat every row.
        start = start.repeat_interleave(positions.shape[0] // len(start))[:, None]
    return positions >= start


def kept_columns(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The columns whose logits are requested: the last so many (0 = all), or those named."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def positions_of(
    shape: torch.Size, attention_mask: Tensor | None, position_ids: Tensor | None, past: int, device: torch.device
) -> Tensor:
    """(B, T) int64, the position of every new token; -1 for padding, as transformers counts."""
    rows, new = shape
    if position_ids is not None:
        return position_ids.to(device).expand(rows, new)
    if attention_mask is not None and attention_mask.dim() == 2:
        counted = attention_mask.to(device).long().cumsum(dim=1)
        return (counted * attention_mask.to(device).long() - 1)[:, past:]
    return torch.arange(past, past + new, device=device).expand(rows, new)


def visible_columns(attention_mask: Tensor | None, shape: torch.Size, past: int, device: torch.device) -> Tensor:
    """(B, S + T) bool, false for padding."""
    total = past + shape[1]
    if attention_mask is None:
        return torch.ones(shape[0], total, dtype=torch.bool, device=device)
    if attention_mask.shape != (shape[0], total):
        raise UserError(
            f"attention_mask must be (batch, past + new tokens) = {(shape[0], total)},"
            f" got {tuple(attention_mask.shape)}"
        )
    return attention_mask.to(device, torch.bool)


def prompt_lengths(inputs: Tensor | None, kwargs: dict[str, Any], pad: int | None, cache: Cache | None) -> Tensor:
    """(B,) tokens of each row's prompt, those already in the cache included."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask.sum(dim=1)
    ids = next((x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    if ids is None:
        raise UserError("sparse_from='prompt' needs a prompt; give input_ids")
    if ids.dim() == 2 and pad is not None:
        return (ids != pad).sum(dim=1)
    return torch.full((ids.shape[0],), ids.shape[1], device=ids.device)


def refuse_right_padding(inputs: Tensor | None, kwargs: dict[str, Any], pad: Any, ending: Any) -> None:
    """Refuse prompts of ``generate`` with padding behind them: what follows would be read off the padding.

    Where no ``attention_mask`` is given, padding is what transformers takes for it: the padding token, unless it ends
    texts as well.

    Raises:
        UserError: naming the first such row.
    """
    mask = kwargs.get("attention_mask")
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    if mask is None and ids is not None and pad is not None and pad not in torch.as_tensor(ending or []).reshape(-1):
        mask = ids != pad
    if mask is None or mask.dim() != 2:
        return
    padded = (mask[:, -1] == 0) & (mask != 0).any(dim=1)
    if padded.any():
        raise UserError(
            f"generate() of the backend gather needs padding on the left, row {int(padded.nonzero()[0])} has it on the"
            " right; set tokenizer.padding_side = 'left'"
        )
