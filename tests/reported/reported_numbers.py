"""Reported faults of numbers that pass a check and break behind it: the same at every door."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reported_case import GREEDY, IDS, Case, Row, refusal

from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import LAST, Sampling, rows_of
from dejavu_train.ground.errors import UserError

HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64 + 5, 10**30)
OPTIONS = {"mask": {}, "gather": {}, "cpu": {}, "triton": {"ops": "reference"}}
EACH = dict.fromkeys(OPTIONS, True)


def each(one: Callable[[Any], bool]) -> Callable[[Case], dict[str, bool]]:
    def call(case: Case) -> dict[str, bool]:
        models = {name: case.sparse(name, sparse_from="prompt", **given) for name, given in OPTIONS.items()}
        return {name: one(model) for name, model in models.items()}

    return call


def a_forward_pass_refuses_as_generate(case: Case) -> bool:
    ids = [
        refusal(lambda m=m, ids=ids: m(ids))
        for m in (case.sparse(name, **given) for name, given in OPTIONS.items())
        for ids in (IDS + 10**6, IDS - 1000)
    ]
    mask = refusal(lambda: case.sparse("mask")(IDS, attention_mask=torch.ones_like(IDS)[:, :-1]))
    return "attention_mask must be" in str(mask) and all("token ids must lie" in str(line) for line in ids)


def text(model: Any, **asked: Any) -> list[int]:
    torch.manual_seed(0)
    asked = {"max_new_tokens": 6, "do_sample": True, "attention_mask": torch.ones_like(IDS)} | asked
    return model.generate(IDS, **asked)[0].tolist()


def more_than_the_vocabulary(model: Any) -> bool:
    return all(text(model, top_k=value) == text(model, top_k=model.config.vocab_size) for value in HUGE)


def a_huge_start_is_dense(model: Any) -> bool:
    found = []
    for value in (LAST, sys.maxsize, *HUGE, [10**30], torch.tensor([2**62])):
        model.sparse_from = value
        found.append(model.generate(IDS, **GREEDY)[0].tolist())
    model.sparse_from = 100  # behind the text's end
    return all(tokens == model.generate(IDS, **GREEDY)[0].tolist() for tokens in found)


def cold_is_greedy_or_refused(model: Any) -> bool:
    greedy = text(model, do_sample=False)
    for value in (1e-6, 1e-9, 1e-30, 1e-38, 1e-39, 1e-46, 5e-324):
        try:
            if text(model, temperature=value) != greedy:
                return False
        except UserError:
            continue
    return True


def answered_or_refused(**given: Any) -> Callable[[Any], bool]:
    (name, values) = next(iter(given.items()))

    def one(model: Any) -> bool:
        for value in values:
            try:
                text(model, **{name: value})
            except ValueError:  # transformers' own, or ours
                continue
        return True

    return one


def sampling(_: Case) -> bool:
    """What an engine is given is what its 32 bits hold."""
    greedy = Sampling(1e-39)
    for wrong in ({"temperature": 1e39}, {"repetition_penalty": 1e-40}, {"presence_penalty": 1e39}, {"top_k": 2.5}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Sampling(**wrong)
    rows = rows_of([[3, 4]], sys.maxsize)
    held = Sampling(1.0, 1e-46, top_k=10**30)
    return greedy.mode == "greedy" and rows[0].sparse_from == held.top_k == LAST and held.top_p == 1e-9


def a_stop_that_no_token_is(case: Case) -> bool:
    model = case.sparse("triton", ops="reference")
    engine = model.engine_pool().engine(1, 32)
    line = refusal(lambda: engine.generate([[2, 5]], 3, stop_tokens=[2**40]))
    return line is not None and "stop_tokens must be token ids" in line


def whole_numbers(case: Case) -> bool:
    """What counts something has no fraction, whoever is asked."""
    model = case.sparse("cpu")
    engine = model.engine_pool().engine(1, 32)
    calls: list[Callable[[Any], Any]] = [
        lambda value: Guard(every=value),
        lambda value: Guard(every=8, memory=value),
        lambda value: Draft(length=value),
        lambda value: engine.generate([[2, 5]], value),
        lambda value: engine.generate([[2, 5]], 4, min_new_tokens=value),
    ]
    return all("whole number" in str(refusal(lambda c=c, v=v: c(v))) for c in calls for v in (2.5, math.nan))


FLOATS = (1e-46, 1e-39, 1e39, 1e300, float("inf"), float("nan"))
ROWS = (
    Row("T8", "ids and masks of a forward pass", a_forward_pass_refuses_as_generate),
    Row("T1", "top_k beyond the vocabulary is all of it", each(more_than_the_vocabulary), EACH),
    Row("T1", "sparse_from beyond the text is dense", each(a_huge_start_is_dense), EACH),
    Row("T1", "a temperature that fp32 does not hold", each(cold_is_greedy_or_refused), EACH),
    Row("T1", "ids of tokens", each(answered_or_refused(eos_token_id=(*HUGE, -1, [2**40, 3]))), EACH),
    Row("T1", "padding", each(answered_or_refused(pad_token_id=HUGE)), EACH),
    Row("T1", "repetition_penalty", each(answered_or_refused(repetition_penalty=FLOATS)), EACH),
    Row("T1", "top_p", each(answered_or_refused(top_p=(5e-324, *FLOATS))), EACH),
    Row("T1", "min_p", each(answered_or_refused(min_p=(5e-324, *FLOATS))), EACH),
    Row("T1", "sequences", each(answered_or_refused(num_return_sequences=(0, -1, 2**31, 2**63))), EACH),
    Row("T1", "an engine's own numbers", sampling),
    Row("T1", "counts with a fraction", whole_numbers),
    Row("T1", "an engine's stop tokens", a_stop_that_no_token_is),
)
