"""Token ids of a text: its windows behind a start token, and what ends a text that a model writes."""

from collections.abc import Sequence
from typing import Any

from dejavu_train.ground.errors import UserError

START_TOKEN = 2  # </s>, which starts a text in OPT


def windows(tokenizer: Any, text: str, window: int) -> list[list[int]]:
    """Cut a text into windows: the start token and up to ``window`` - 1 new tokens each, no overlap, tail kept.

    Every token but the leading one is scored once, so that perplexities of any two runs compare. A text that begins
    with a start token itself gets no second one.
    """
    start = start_token(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return cut_windows(ids[1:] if ids[:1] == [start] else ids, window, start)


def start_token(tokenizer: Any) -> int:
    """The token that a text begins behind: the tokenizer's ``bos_token_id``, without one its ``eos_token_id``.

    Raises:
        UserError: it has neither.
    """
    start = next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), None)
    if start is None:
        raise UserError("the tokenizer names no bos_token and no eos_token; add one to its tokenizer_config.json")
    return int(start)


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text which a model writes: the one behind it, and the one that starts the next."""
    return tuple({start_token(tokenizer), *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])})


def cut_windows(ids: Sequence[int], window: int, start: int = START_TOKEN) -> list[list[int]]:
    """The same of token ids, behind the token ``start``."""
    return [[start, *ids[begin : begin + window - 1]] for begin in range(0, len(ids), window - 1)]


def require_one_sequence(n_tokens: int, window: int, name: str) -> None:
    """Refuse text that does not fill one window.

    Raises:
        UserError: fewer tokens than ``window`` - 1.
    """
    if n_tokens < window - 1:
        raise UserError(
            f"the text {name} has {n_tokens} tokens, fewer than one sequence of {window};"
            " give more text or a smaller window"
        )
