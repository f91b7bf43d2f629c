"""Writes greedy answers with a variant of a model, one row at a time, through the engine of its device."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import DENSE, FOUR_BITS, SPARSE
from dejavu_train.sparse.model import SparseCausalLM

LOSSLESS = "lossless"


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer without what stands from a stop string on. ``ended``: by itself, before the limit of tokens."""

    text: str
    tokens: int
    seconds: float
    ended: bool


def names(subject: Subject) -> list[str]:
    """Variants that a subject has."""
    return [DENSE, FOUR_BITS] if subject.bundle is None else [DENSE, SPARSE, LOSSLESS, FOUR_BITS]


class Writer:
    """A variant that writes. Dense is the exact engine, which leaves out rows of silent neurons alone.

    Raises:
        UserError: no twin in 4 bits.
    """

    def __init__(self, subject: Subject, variant: str) -> None:
        self.tokenizer, self.lossless = subject.tokenizer, variant == LOSSLESS
        sparse = subject.bundle if variant in (SPARSE, LOSSLESS) else None
        model = subject.four_bits if variant == FOUR_BITS else subject.dense
        self.model: Any = SparseCausalLM.from_model(model, sparse or subject.exact, "auto", sparse_from="prompt")

    def write(self, ids: Sequence[int], new_tokens: int, stops: Sequence[str] = ()) -> Answer:
        """An answer behind a prompt of token ids."""
        given = torch.tensor([list(ids)], device=self.model.device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "lossless": self.lossless}
        settings |= {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": 1}
        if stops:
            settings |= {"stop_strings": list(stops), "tokenizer": self.tokenizer}
        began = time.perf_counter()
        out = self.model.generate(given, attention_mask=torch.ones_like(given), **settings)
        seconds = time.perf_counter() - began
        new = out[0, len(ids) :].tolist()
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return Answer(cut(text, stops), len(new), seconds, len(new) < new_tokens)


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of the stop strings.

    >>> cut("4 apples. Question: and", ["Question:", "Problem:"])
    '4 apples. '
    """
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]
