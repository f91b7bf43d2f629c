"""Reads what ``generate()`` was asked for into the engine's terms, or says in one line what the engine cannot do."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria

from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import MAX_STOPS, SEEDS, Sampling
from dejavu_train.ground.errors import Unsupported, UserError

# What a request may set. The rest of a GenerationConfig must be unset or neutral.
HONOURED = frozenset(
    "max_length max_new_tokens min_length min_new_tokens do_sample temperature top_p top_k eos_token_id pad_token_id "
    "min_p repetition_penalty stop_strings "
    "bos_token_id num_return_sequences use_cache return_dict_in_generate transformers_version".split()
)
SAMPLING_ONLY = frozenset("temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff top_h".split())
# Of what is passed beside the settings: read here, and what False leaves as it is.
ARGUMENTS = ("input_ids", "attention_mask", "tokenizer")
OFF = ("synced_gpus", "trust_remote_code", "output_attentions", "output_hidden_states", "output_router_logits")

LOOP = (  # methods of a model
    "forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_get_logits_processor",
    "_get_stopping_criteria", "_sample",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A call of ``generate()``.

    Attributes:
        prompts: token ids of each row without padding. Several returned sequences repeat a row.
        max_new_tokens: at most, of each row. min_new_tokens: before which no stop token is chosen.
        sparse_from: first sparse position of each row. None = behind its prompt.
        streamer: of transformers, or None. draft: of lossless decoding, or None.
        ended: of transformers, says of (1, T) token ids whether they end with a stop string. None without one.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    min_new_tokens: int
    sampling: Sampling
    stop_tokens: list[int]
    pad_token: int
    sparse_from: list[int] | None
    streamer: Any
    draft: Draft | None = None
    ended: Any = None


def check_settings(config: GenerationConfig) -> None:
    """Refuse settings that the engine's loop would ignore.

    Raises:
        Unsupported: the first of them by name.
    """
    neutral = GenerationConfig._get_default_generation_params()
    for name, value in config.to_dict().items():
        if name in HONOURED or name.startswith("_") or (name in SAMPLING_ONLY and not config.do_sample):
            continue
        usual = neutral.get(name)
        if value is not None and value is not False and value != usual:
            remedy = f"leave {name} out" if usual is None else f"pass {name}={usual}"
            raise Unsupported(f"generate({name}={value}) is not for the decode engine; {remedy} to stay on it")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse what is passed to ``generate()`` beside the settings.

    Raises:
        Unsupported: the first of them by name.
    """
    for name, value in arguments.items():
        if name in ARGUMENTS or value is None or (value is False and name in OFF):
            continue
        if isinstance(value, (list, tuple)) and not value:  # an empty list of processors
            continue
        raise Unsupported(f"generate() with {name} is not for the decode engine; leave {name} out to stay on it")


def check_loop(model: Any, plain: Sequence[type]) -> None:
    """Refuse a model with another method in the place of one that transformers' loop calls and an engine does not.

    peft's prompt tuning exchanges one, and so may a class of your own.

    Args:
        plain: classes whose methods the engine stands for, the most special first.
    Raises:
        Unsupported: the first such method by name.
    """
    for name in LOOP:
        usual = next(vars(kind)[name] for kind in plain if name in vars(kind))
        own = None if name == "forward" else vars(model).get(name)  # the backend has looked at that of the model itself
        found = getattr(type(model), name) if own is None else getattr(own, "__func__", own)
        if found is not usual:
            raise Unsupported(f"generate() of a model with an exchanged {name} is not for the decode engine")


def check_forward(**asked: Any) -> None:
    """Refuse what a forward pass through the engine's steps cannot take or give.

    Args:
        asked: by name, true or not None where it is asked for.
    Raises:
        Unsupported: the first of them by name.
    """
    for name, value in asked.items():
        if value is not None and value is not False:
            raise Unsupported(
                f"a forward pass with {name} is not for the decode engine; leave {name} out to stay on it"
            )


def token_list(value: Any) -> list[int]:
    """Token ids of a setting: a number, several, a tensor, or None."""
    if value is None:
        return []
    return [int(token) for token in torch.as_tensor(value).reshape(-1).tolist()]


def check_mask(mask: Any) -> None:
    """Raise :class:`UserError` for a mask (B, T) that holds more than 0 for padding and 1 for tokens.

    Transformers adds such values to scores, counts positions with them, or takes them for 1, each in its place.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype == torch.bool:
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise UserError(
            f"attention_mask must hold 0 for padding and 1 for tokens, got {other[0].item():g}; give (mask != 0)"
        )


def padding_mask(input_ids: Tensor, mask: Tensor | None, config: GenerationConfig) -> Tensor:
    """(B, T) bool, as transformers infers it: given, or where the padding token stands and does not end a text."""
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise UserError(f"attention_mask must be (B, T) = {tuple(input_ids.shape)}, got {tuple(mask.shape)}")
        check_mask(mask)
        return mask.bool().to(input_ids.device)
    pad = config.pad_token_id
    if pad is None or int(pad) in token_list(config.eos_token_id):
        return torch.ones_like(input_ids, dtype=torch.bool)
    return input_ids != int(pad)


def read_request(
    input_ids: Tensor,
    mask: Tensor | None,
    config: GenerationConfig,
    default_length: bool,
    max_positions: int,
    sparse_from: int | Tensor | str,
    streamer: Any,
    max_rows: int = 32,
) -> Request:
    """Read a request.

    Args:
        input_ids: (B, T), left- or right-padded. mask: (B, T), or None: read from the padding token.
        config: with all defaults filled in. default_length: nobody has set max_length.
    Raises:
        Unsupported: see `check_settings`. More than ``max_rows`` rows, more than 8 stop tokens, as many tokens as the
            model's positions and one more, which is never run.
        UserError: no room for a new token.
    """
    check_settings(config)
    repeats = config.num_return_sequences or 1
    n_rows, width = input_ids.shape
    if n_rows * repeats > max_rows:
        raise Unsupported(
            f"the decode engine generates at most {max_rows} rows at once, got {n_rows * repeats}; pass"
            f" {max_rows} at a time to stay on it"
        )
    stops = token_list(config.eos_token_id)
    if len(stops) > MAX_STOPS:
        raise Unsupported(
            f"the decode engine knows at most {MAX_STOPS} stop tokens, got {len(stops)}; pass so many of them in"
            " eos_token_id to stay on it"
        )
    longest = config.max_length
    if config.max_new_tokens is not None:
        longest = width + config.max_new_tokens
    elif default_length:
        longest = min(width + config.max_length, max_positions)
    least = config.min_new_tokens if config.min_new_tokens is not None else max(0, (config.min_length or 0) - width)
    visible = padding_mask(input_ids, mask, config)
    rows = [ids[seen].tolist() for ids, seen in zip(input_ids.cpu(), visible.cpu(), strict=True)]
    new, known = int(longest) - width, max(map(len, rows))
    if new < 1 and known >= max_positions:
        raise UserError(f"the prompt's {known} tokens take the model's {max_positions} positions; shorten the prompt")
    if new < 1:
        raise UserError(
            f"max_length={longest} leaves no room for a new token behind a prompt of {width}; set max_new_tokens"
        )
    if known + new == max_positions + 1:
        raise Unsupported(
            f"the decode engine holds {max_positions} tokens, prompt and new ones together, got {known + new}"
        )
    if least > new:  # as transformers, which goes on; an engine's own generate() refuses it
        warnings.warn(f"Unfeasible length constraints: at least {least} new tokens, and at most {new}", stacklevel=2)
    return Request(
        prompts=[list(row) for row in rows for _ in range(repeats)],
        max_new_tokens=new,
        min_new_tokens=min(least, new),
        sampling=_sampling(config),
        stop_tokens=stops,
        pad_token=_pad_token(config, stops),
        sparse_from=None if isinstance(sparse_from, str) else starts_of(sparse_from, n_rows, repeats),
        streamer=streamer,
    )


def stop_strings(config: GenerationConfig, tokenizer: Any) -> Any:
    """Criterion that ends a row at a stop string, for `Request.ended`. None where there are none.

    Raises:
        UserError: no tokenizer.
    """
    strings = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings or ())
    if not strings:
        return None
    if tokenizer is None:
        raise UserError("stop_strings are looked for in text, so generate() needs tokenizer=...; pass it too")
    return StopStringCriteria(tokenizer, strings)


def _sampling(config: GenerationConfig) -> Sampling:
    penalty = 1.0 if config.repetition_penalty is None else float(config.repetition_penalty)
    if not config.do_sample:
        return Sampling(repetition_penalty=penalty)
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = 1.0 if config.top_p is None else min(1.0, float(config.top_p))  # above 1 it is off in transformers too
    if top_p == 0:
        raise Unsupported(
            "generate(top_p=0), the likeliest token alone, is not for the decode engine; pass do_sample=False to"
            " stay on it"
        )
    # The seed comes from torch's generator, so torch.manual_seed makes a text repeatable.
    return Sampling(
        temperature, top_p, top_k=int(config.top_k or 0), min_p=float(config.min_p or 0), repetition_penalty=penalty,
        seed=int(torch.randint(SEEDS, ())),
    )  # fmt: skip


def _pad_token(config: GenerationConfig, stops: Sequence[int]) -> int:
    """Filler of rows that end early: the padding token, else the first stop token, as in transformers."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return stops[0] if stops else 0


def starts_of(sparse_from: int | Tensor, n_rows: int, repeats: int = 1) -> list[int]:
    """The first sparse position of each row, rows repeated."""
    starts = [sparse_from] if isinstance(sparse_from, int) else [int(start) for start in sparse_from.reshape(-1)]
    if n_rows % len(starts):
        raise UserError(
            f"sparse_from has {len(starts)} rows, the batch has {n_rows}; give one number, or one for each row"
        )
    return [start for start in starts for _ in range(n_rows * repeats // len(starts))]
