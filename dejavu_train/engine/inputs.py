"""Inputs of a decode engine: how tokens are sampled, and the checks that every engine makes."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral

from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COLDEST, WIDEST, check_whole

MAX_BATCH = 32  # rows of the engine on a GPU
MAX_STOPS = 8
SEEDS = 2**26  # times at most 32 rows of a batch it fits 32 bits
LAST = 2**31 - 1  # positions and counts of an engine are 32 bits. No row is as long, and no vocabulary as large
SMALLEST_P = 1e-9  # the likeliest token of any vocabulary is likelier, so that a smaller set has it alone


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a next token is chosen.

    Attributes:
        temperature: 0 = greedy, and so is what lies below 1e-6. At most 1e30.
        top_p: below 1 = from the smallest set of most likely tokens whose probability reaches top_p.
        top_k: above 0 = from the top_k most likely tokens, before top_p. More than the vocabulary has are all of them.
        min_p: above 0 = of what these leave, from tokens at least min_p times as likely as the likeliest.
        repetition_penalty: a logit of a token that the row holds is divided by it if positive, else multiplied. From
            1e-30 to 1e30.
        presence_penalty: taken from the logits of tokens that were generated. frequency_penalty: as often as they were.
            Both at most 1e30, of either sign.
        seed: 0 to 2^26 - 1. A row's random numbers follow from it, its number in the batch and the position.
    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    _: dataclasses.KW_ONLY
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            check_whole(name, getattr(self, name))
        if not 0 <= self.temperature <= WIDEST:
            raise UserError(f"temperature must be a number from 0 to {WIDEST:g}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie above 0 and at most at 1, got {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0 = off), got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must lie in 0 to 1 (0 = off), got {self.min_p}")
        if not 1 / WIDEST <= self.repetition_penalty <= WIDEST:
            allowed = f"from {1 / WIDEST:g} to {WIDEST:g} (1 = off)"
            raise UserError(f"repetition_penalty must be a number {allowed}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -WIDEST <= getattr(self, name) <= WIDEST:
                allowed = f"from {-WIDEST:g} to {WIDEST:g} (0 = off)"
                raise UserError(f"{name} must be a number {allowed}, got {getattr(self, name)}")
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"seed must lie in 0 to {SEEDS - 1}, got {self.seed}")
        held = {"top_k": min(int(self.top_k), LAST), "top_p": max(self.top_p, SMALLEST_P)}
        held["temperature"] = self.temperature if self.temperature >= COLDEST else 0.0
        for name, value in held.items():  # the same choice, in a number that every engine holds
            object.__setattr__(self, name, value)

    @property
    def mode(self) -> str:
        """greedy, temperature, top_p or top_k. What these do not say is mixed, each row by its own numbers."""
        if self.penalised or (self.temperature > 0 and self.min_p > 0):
            return "mixed"
        if self.temperature == 0:
            return "greedy"
        if self.top_k > 0:
            return "top_k"
        return "top_p" if self.top_p < 1 else "temperature"

    @property
    def penalised(self) -> bool:
        """Whether a choice depends on what the row holds."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclasses.dataclass(frozen=True)
class Row:
    """Beginning of a row of an engine.

    Attributes:
        tokens: known ones. total: tokens at most, the known ones included.
        sparse_from: first sparse position. Behind the row's end it is dense. prefilled: tokens that are run densely at
            once.
        least: tokens before which no stop token is chosen. number: of the row among those of a call, for its noise.
        scored_from: first position whose log-probability is kept, above 0. None = none. top: how many others' are.
    """

    tokens: Sequence[int]
    total: int
    sampling: Sampling = Sampling()
    sparse_from: int = 0
    prefilled: int = 0
    least: int = 0
    number: int = 0
    scored_from: int | None = None
    top: int = 0

    def __post_init__(self) -> None:
        for name in ("sparse_from", "least"):
            object.__setattr__(self, name, min(int(getattr(self, name)), LAST))

    @classmethod
    def of_prompt(
        cls, prompt: Sequence[int], total: int, sampling: Sampling = Sampling(), least: int = 0, number: int = 0
    ) -> "Row":
        """Dense to the end of the prompt, which is run at once, and sparse from there on."""
        return cls(prompt, total, sampling, len(prompt), len(prompt), least, number)

    def prefilling(self, most: int) -> "Row":
        """The same row, of whose known tokens at most so many are prefilled."""
        return dataclasses.replace(self, prefilled=min(most, len(self.tokens)))


def check_length(length: int, context: int, shape: ModelDims) -> None:
    """Raise :class:`UserError` unless a row of so many tokens fits an engine of this context."""
    if length > context:
        raise UserError(
            f"{length} tokens do not fit the engine's context of {context}"
            f" (the model's limit is {shape.max_positions}); shorten the prompt or max_new_tokens"
        )


def check_rows(rows: Sequence[Row], batch: int, context: int, shape: ModelDims, unheld: int = 0) -> None:
    """Make sure that an engine of this size can take these rows.

    Args:
        unheld: last tokens of each row that the engine need not hold.
    Raises:
        UserError: too many rows, an empty one, one that does not fit, or an id outside the vocabulary.
    """
    if not rows or len(rows) > batch:
        raise UserError(f"this engine holds {batch} rows, got {len(rows)}; build it with batch={len(rows)}")
    for row in rows:
        if not row.tokens:
            raise UserError("an empty prompt cannot be continued; give at least the token that a text begins with")
        check_length(row.total - unheld, context, shape)
        least, most = min(row.tokens), max(row.tokens)
        if not 0 <= least <= most < shape.vocab_size:
            raise UserError(f"token ids must lie in 0 to {shape.vocab_size - 1}, got {least} to {most}")


def check_continuation(max_new_tokens: int, min_new_tokens: int, stop_tokens: Sequence[int], prompt_phase: str) -> None:
    """Check what ``generate`` was given beside its prompts.

    Raises:
        UserError: nothing to generate, a least number above the most, too many stop tokens or what is none, an unknown
            phase.
    """
    check_whole("max_new_tokens", max_new_tokens)
    check_whole("min_new_tokens", min_new_tokens)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if min_new_tokens > max_new_tokens:
        raise UserError(
            f"min_new_tokens must be at most max_new_tokens, which is {max_new_tokens}, got {min_new_tokens};"
            " raise max_new_tokens"
        )
    if len(stop_tokens) > MAX_STOPS:
        raise UserError(f"at most {MAX_STOPS} stop tokens are supported, got {len(stop_tokens)}")
    for token in stop_tokens:
        if not -LAST <= token <= LAST:
            raise UserError(f"stop_tokens must be token ids, at most {LAST}, got {token}")
    if prompt_phase not in ("dense", "steps"):
        raise UserError(f"prompt_phase must be dense or steps, got {prompt_phase}")


def rows_of(
    tokens: Sequence[Sequence[int]],
    sparse_from: int | Sequence[int] | None,
    sampling: Sampling = Sampling(),
    *,
    new: int = 0,
    least_new: int = 0,
) -> list[Row]:
    """The rows of a call, nothing of which is prefilled.

    Args:
        tokens: known ones of each row. new: tokens behind them at most. least_new: before so many none is a stop token.
        sparse_from: first sparse position of each row. None = behind its known tokens.
    Raises:
        UserError: a negative position, or not one for each row.
    """
    lengths = [len(row) for row in tokens]
    starts = per_row(sparse_from, lengths)
    return [
        Row(row, n + new, sampling, start, least=n + least_new, number=b)
        for b, (row, n, start) in enumerate(zip(tokens, lengths, starts, strict=True))
    ]


def per_row(sparse_from: int | Sequence[int] | None, lengths: Sequence[int]) -> list[int]:
    """The first sparse position of each row. None = after its prompt of the given length.

    Raises:
        UserError: a negative position, or not one for each row.
    """
    if sparse_from is None:
        return list(lengths)
    starts = [int(sparse_from)] * len(lengths) if isinstance(sparse_from, (int, Integral)) else list(sparse_from)
    if len(starts) != len(lengths) or any(start < 0 for start in starts):
        raise UserError(f"sparse_from must be at least 0, one for all rows or one each, got {sparse_from}")
    return [min(int(start), LAST) for start in starts]
