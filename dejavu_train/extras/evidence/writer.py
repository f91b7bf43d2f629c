"""Writes greedy answers with a variant of a model, one row at a time, through the engine of its device."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from dejavu_train.evaluation.texts import behind_start
from dejavu_train.extras.evidence.subject import Subject
from dejavu_train.extras.evidence.variants import DENSE, FOUR_BITS, SPARSE
from dejavu_train.ground.progress import progress
from dejavu_train.sparse.model import SparseCausalLM

LOSSLESS = "lossless"
LEAST = 16  # tokens that an answer must have room for


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
    """A variant that writes what lm-eval asks. Dense is the exact engine, which leaves rows of silent neurons out.

    Args:
        plain: no template for chats stands around a question.
    Raises:
        UserError: no twin in 4 bits.

    ``answers``: by question. None where the model has no room for one.
    """

    def __init__(self, subject: Subject, variant: str, plain: bool = False) -> None:
        self.subject, self.variant, self.plain = subject, variant, plain
        sparse = subject.bundle if variant in (SPARSE, LOSSLESS) else None
        model = subject.four_bits if variant == FOUR_BITS else subject.dense
        self.model: Any = SparseCausalLM.from_model(model, sparse or subject.exact, "auto", sparse_from="prompt")
        self.answers: list[Answer | None] = []

    def encoded(self, text: str) -> list[int]:
        """Token ids of a prompt. What a template for chats gives has its start token."""
        tokenizer = self.subject.tokenizer
        if getattr(tokenizer, "chat_template", None) and not self.plain:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return behind_start(tokenizer, text, "a prompt")

    def room(self, text: str) -> int:
        """Tokens that the model has positions for behind a prompt."""
        return self.subject.dims.max_positions - len(self.encoded(text))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Texts behind lm-eval's requests, each up to its first stop string."""
        self.write(self.encoded("A first text, which compiles what is compiled once"), LEAST)
        for request in progress(requests, self.variant, len(requests), "answer"):
            text, asked = request.args
            most = min(self.subject.config.answer_tokens, asked.get("max_gen_toks", self.room(text)), self.room(text))
            self.answers.append(self.write(self.encoded(text), most, asked["until"]) if most >= LEAST else None)
        return ["" if answer is None else answer.text for answer in self.answers]

    def write(self, ids: Sequence[int], new_tokens: int, stops: Sequence[str] = ()) -> Answer:
        """An answer behind a prompt of token ids."""
        tokenizer, given = self.subject.tokenizer, torch.tensor([list(ids)], device=self.model.device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        settings |= {"lossless": self.variant == LOSSLESS, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 1}
        if stops:
            settings |= {"stop_strings": list(stops), "tokenizer": tokenizer}
        began = time.perf_counter()
        out = self.model.generate(given, attention_mask=torch.ones_like(given), **settings)
        seconds = time.perf_counter() - began
        new = out[0, len(ids) :].tolist()
        text = str(tokenizer.decode(new, skip_special_tokens=True))
        for stop in stops:
            text = text.partition(stop)[0]
        return Answer(text, len(new), seconds, len(new) < new_tokens)
