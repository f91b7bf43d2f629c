"""Columns of a sparse model's inputs: positions, padding, lengths of prompts, and which it refuses.

``docs/reference/signatures.md`` lists every parameter of transformers' calls and what becomes of it here.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache

from dejavu_train.engine.inputs import LAST
from dejavu_train.engine.request import check_mask, padding_mask
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COLDEST, WIDEST

SparseFrom = int | Tensor | str
MOST_SEQUENCES = 2**16  # of a prompt. More are out of any memory

# Keywords of a forward pass, beside its parameters, that are read; the loss takes all of them.
READ = frozenset("return_dict output_attentions output_hidden_states is_causal".split())
OF_THE_LOSS = frozenset("num_items_in_batch ignore_index shift_labels".split())


def read_sparse_from(value: Any) -> SparseFrom:
    """``sparse_from`` as it was given: a position, several in a tensor, list or tuple, or "prompt".

    Raises:
        UserError: anything else.
    """
    if isinstance(value, str) and value == "prompt":
        return value
    if _is_position(value):
        return min(int(value), LAST)
    if isinstance(value, Tensor) and not value.is_floating_point() and value.numel():
        starts = value.reshape(-1).tolist()
    else:
        starts = list(value) if isinstance(value, (list, tuple)) else []
    if starts and all(map(_is_position, starts)):
        device = value.device if isinstance(value, Tensor) else None
        return torch.tensor([min(int(start), LAST) for start in starts], device=device)
    raise UserError(f"sparse_from must be a position from 0 on, one per row, or 'prompt', got {value!r}")


def _is_position(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def check_numbers(config: GenerationConfig) -> None:
    """Refuse numbers of ``generate()`` that transformers lets pass, and that nothing behind it holds.

    Raises:
        UserError: the first by name.
    """
    allowed: dict[str, tuple[float, float]] = {"repetition_penalty": (1 / WIDEST, WIDEST)}
    if config.do_sample:
        allowed["temperature"] = (COLDEST, WIDEST)
    for name, (least, most) in allowed.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            hint = "; for greedy use do_sample=False" if name == "temperature" and value < least else ""
            raise UserError(f"{name} must be a number from {least:g} to {most:g}, got {value}{hint}")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = getattr(config, name)
        for token in ids if isinstance(ids, (list, tuple)) else [ids]:
            if isinstance(token, Integral) and not -LAST <= int(token) <= LAST:
                raise UserError(f"{name} must be a token id, at most {LAST}, got {token}")
    repeats = config.num_return_sequences
    if repeats is not None and not 1 <= repeats <= MOST_SEQUENCES:
        raise UserError(f"num_return_sequences must lie in 1 to {MOST_SEQUENCES}, got {repeats}")


def sparse_positions(start: SparseFrom, positions: Tensor, past: int) -> Tensor:
    """(B, T) bool: which of ``positions`` lie at or behind ``sparse_from``. "prompt": those behind a cache of ``past``.

    Raises:
        UserError: starts for another number of rows.
    """
    if isinstance(start, str):
        return torch.full_like(positions, past > 0, dtype=torch.bool)
    if isinstance(start, Tensor):
        start = start.to(positions.device).reshape(-1)
        if positions.shape[0] % len(start):
            raise UserError(
                f"sparse_from has {len(start)} rows, the batch has {positions.shape[0]}; give one number, or one for"
                " each row"
            )
        # Beam search and several returned sequences repeat every row.
        start = start.repeat_interleave(positions.shape[0] // len(start))[:, None]
    return positions >= start


def keep_columns(values: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Columns of ``values`` (B, T, n) whose logits are requested, (B, K, n).

    Args:
        logits_to_keep: the last so many (0 = all). (K,) columns of all rows. (B, K) int64, those of each row, or (B, T)
            bool, whose columns come back as one row (number of true, n).
    """
    if isinstance(logits_to_keep, int):
        return values[:, -logits_to_keep:]
    if not isinstance(logits_to_keep, Tensor) or logits_to_keep.dim() < 2:
        return values[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return values[logits_to_keep]
    return values[torch.arange(len(values), device=values.device)[:, None], logits_to_keep]


def as_rows(input_ids: Any) -> Tensor:
    """Token ids as (B, T), of a single row also from (T,), as transformers takes them.

    Raises:
        UserError: something else than a tensor of int64 or int32, or no token.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32) or not input_ids.dim():
        hint = ": unpack it, model(**inputs)" if isinstance(input_ids, Mapping) else ""
        raise UserError(f"input_ids must be a tensor (batch, tokens) of int64 or int32, got {_kind(input_ids)}{hint}")
    if not input_ids.numel():
        shape = tuple(input_ids.shape)
        raise UserError(f"input_ids holds no token, its shape is {shape}; give at least the tokenizer's bos_token_id")
    return input_ids.view(-1, input_ids.shape[-1])


def check_ids(ids: Tensor, model: Any) -> None:
    """Raise :class:`UserError` for token ids outside the vocabulary."""
    table = getattr(model.get_input_embeddings(), "weight", None)  # of an adapter around an embedding as well
    low, high, size = int(ids.min()), int(ids.max()), model.config.vocab_size if table is None else len(table)
    if not 0 <= low <= high < size:
        raise UserError(f"token ids must lie in 0 to {size - 1}, got {low} to {high}")


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def refuse_outputs(asked: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse what the backends that read selected rows only cannot give: attentions, hidden states, other masks.

    Args:
        asked: keywords of a forward pass. What is missing there, transformers reads from the ``config``.
    Raises:
        UserError: the first of them by name.
    """
    for name in ("output_attentions", "output_hidden_states"):
        if asked[name] if name in asked else getattr(config, name, False):
            raise UserError(f"only the backend mask gives {name.removeprefix('output_')}; use backend='mask'")
    if asked.get("is_causal") is False:
        raise UserError("only the backend mask lets a token see later ones, is_causal=False; use backend='mask'")


def unread_keywords(asked: Mapping[str, Any]) -> list[str]:
    """Keywords of a forward pass that nothing reads but perhaps the loss."""
    return [name for name, value in asked.items() if value is not None and name not in READ | OF_THE_LOSS]


def positions_of(
    shape: torch.Size,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past: int,
    device: torch.device,
) -> Tensor:
    """(B, T) int64, the position of every new token. -1 for padding, as transformers counts.

    Raises:
        UserError: ``position_ids`` of another shape or dtype, or below -1.
    """
    rows, new = shape
    if position_ids is not None:
        given = tuple(position_ids.shape)
        if position_ids.is_floating_point() or given not in ((rows, new), (1, new), (new,)):
            raise UserError(f"position_ids must be int64 of ({rows}, {new}), got {position_ids.dtype} of {given}")
        if (lowest := int(position_ids.min())) < -1:
            raise UserError(f"position_ids must be at least 0, got {lowest}")
        return position_ids.to(device).expand(rows, new)
    if attention_mask is not None and attention_mask.dim() == 2:
        counted = attention_mask.to(device).long().cumsum(dim=1)
        return (counted * attention_mask.to(device).long() - 1)[:, past:]
    return torch.arange(past, past + new, device=device).expand(rows, new)


def columns_of(positions: Tensor, past: int) -> Tensor:
    """Columns (B, T) int64 of new tokens at ``positions`` (B, T), behind a cache of ``past``."""
    return torch.arange(past, past + positions.shape[1], device=positions.device).expand_as(positions)


def has_gap(visible: Tensor) -> bool:
    """Whether a row of ``visible`` (B, S) bool has padding between its tokens."""
    begins = visible.clone()
    begins[:, 1:] &= ~visible[:, :-1]
    return bool((begins.sum(dim=1) > 1).any())


def visible_columns(attention_mask: Tensor | None, shape: torch.Size, past: int, device: torch.device) -> Tensor:
    """(B, S + T) bool, false for padding."""
    total = past + shape[1]
    if attention_mask is None:
        return torch.ones(shape[0], total, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (shape[0], total):
        raise UserError(
            f"attention_mask must be (batch, past + new tokens) = {(shape[0], total)}, got {_kind(attention_mask)}"
        )
    return attention_mask.to(device, torch.bool)


def read_prompt(inputs: Tensor | None, kwargs: Mapping[str, Any], config: GenerationConfig, model: Any) -> Tensor:
    """Where the prompt of ``generate`` has tokens, those already in the cache included. False = padding.

    What transformers would end with a traceback for, or continue wrongly, is refused.

    Args:
        inputs, kwargs: of ``generate``. config: with all defaults filled in. It says what padding is without a mask.
    Returns:
        (B, S) bool.
    Raises:
        UserError: no tensor of token ids, or none at all and no start token. An id outside the vocabulary, or more
            tokens than positions. A mask of another shape, a row of padding alone, or a cache that holds the whole
            prompt.
    """
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    cache = kwargs.get("past_key_values")
    if cache is not None and not isinstance(cache, Cache):
        raise UserError(f"past_key_values must be a Cache, got {type(cache).__name__}; see model.new_cache()")
    past = 0 if cache is None else int(cache.get_seq_length())
    if embeds is not None:
        rows, new = embeds.shape[:2]
        mask = torch.ones(rows, new, dtype=torch.bool, device=embeds.device) if mask is None else mask
    elif ids is None:
        if config.bos_token_id is None:
            raise UserError("without input_ids generate() begins with bos_token_id, and this model names none; give"
                            " input_ids")  # fmt: skip
        return torch.ones(1, 1, dtype=torch.bool)  # transformers begins with the start token
    else:
        if as_rows(ids).shape != ids.shape:
            raise UserError(f"generate() takes input_ids (batch, tokens), got {tuple(ids.shape)}")
        check_ids(ids, model)
        rows, new = ids.shape
        mask = padding_mask(ids, None, config) if mask is None else mask
    whole, behind = (rows, new), (rows, past + new)
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in (whole, behind):
        allowed = f"(batch, tokens) = {whole}" + (f", or {behind} with those in the cache" if past else "")
        raise UserError(f"attention_mask must be {allowed}, got {_kind(mask)}")
    check_mask(mask)
    shown = mask != 0
    counts, columns = shown.sum(dim=1), shown.shape[1]
    if not counts.all():
        row = int(counts.argmin())
        raise UserError(f"row {row} of the prompts is padding everywhere; give it at least bos_token_id")
    if (tokens := int(counts.max())) > (limit := dims_of(model.config).max_positions):
        raise UserError(f"the prompt has {tokens} tokens and the model {limit} positions; shorten the prompt")
    if past and columns == new and new <= past:
        raise UserError(
            f"the cache holds {past} tokens and the prompt has {new}; give the whole text, longer than the cache; or"
            f" give new tokens, with an attention_mask of {behind}"
        )
    return shown


def refuse_for_gather(shown: Tensor, kwargs: Mapping[str, Any], config: GenerationConfig, model: Any) -> None:
    """Refuse what ``generate`` cannot do through ``gather``.

    Args:
        shown: (B, S) bool, false where the prompt is padded.
        kwargs: of ``generate``. config: with all defaults filled in. model: whose config says the rest.
    Raises:
        UserError: as :func:`refuse_outputs`, padding behind a prompt, since what follows would be read off the
            padding, or a cache of another implementation.
    """
    padded = ~shown[:, -1] & shown.any(dim=1)
    if padded.any():
        raise UserError(
            f"generate() of the backend gather needs padding on the left, row {int(padded.nonzero()[0])} has it on the"
            " right; set tokenizer.padding_side = 'left'"
        )
    names = ("output_attentions", "output_hidden_states")
    asked = {name: True for name in names if getattr(config, name, False)}
    refuse_outputs({**asked, "is_causal": kwargs.get("is_causal")}, model.config)
    if config.cache_implementation is not None:
        raise UserError("the backend gather keeps a cache of its own; leave cache_implementation out")
