"""Reported faults of the server: numbers, text behind prompts, OpenAI's protocol, work before the count."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from bundles import make_bundle
from reported_case import Case, Row
from serving_helpers import NAME, Running
from tokenizers_of_tests import KINDS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dejavu_train.extras.serving.config import ServeConfig
from dejavu_train.extras.serving.replies import Refusal, event
from dejavu_train.extras.serving.requests import Completion, Reader
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseCausalLM


def served(case: Case, folder: Any = None, **options: Any) -> Running:
    folder = case.folder if folder is None else folder
    make_bundle(folder).at(0.3, 0.5).save_pretrained(case.own / "bundle")
    return Running(folder, case.own / "bundle", rows=2, context=64, **options)


def ask(server: Running, **body: Any) -> Any:
    body = {"model": NAME, "prompt": "the model", "max_tokens": 4, "temperature": 0} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def the_next_client(field: str, *values: Any) -> Callable[[Case], bool]:
    """Each number is answered or refused, and so is who comes behind it."""

    def call(case: Case) -> bool:
        server = served(case)
        answers = [ask(server, temperature=1, **{field: value}).status_code for value in values]
        return set(answers) <= {200, 400} and ask(server).status_code == 200

    return call


def a_first_space(case: Case) -> bool:
    """With words that begin with a mark for their space, prompt and text are what the tokenizer makes of all ids."""
    folder = case.own / "pieces"
    tokenizer = KINDS["pieces"]()
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **sizes, max_position_embeddings=64, hidden_act="relu", initializer_range=0.2
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    server = served(case, folder)
    model = SparseCausalLM.from_pretrained(folder, case.own / "bundle", sparse_from="prompt")
    found = []
    for prompt in ("the model", "a token and the", "so it is", "matter", "reads those"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0], skip_special_tokens=True)
        found.append(prompt + ask(server, prompt=prompt, max_tokens=6).json()["choices"][0]["text"] == whole)
    return all(found)


def separators(_: Case) -> int:
    return len(event({"text": "a\u2028b\u2029c\x85d\x0be"}).splitlines())


def a_long_list_with_a_wrong_member(case: Case) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    reader = Reader(tokenizer, 10**5, len(tokenizer), False)
    body = b'{"model": "m", "prompt": [' + b"0," * 90_000 + b"null]}"
    with pytest.raises(Refusal, match="prompt must be a text, several, token ids, .* got a list of 90001"):
        reader.parse(Completion, body)
    return True


def an_empty_key(_: Case) -> bool:
    with pytest.raises(UserError, match="DEJAVU_API_KEY is empty"):
        ServeConfig().key({"DEJAVU_API_KEY": ""})
    return True


ROWS = (
    Row("T1", "top_k of 64 bits in a request", the_next_client("top_k", 2**31, 2**32 + 1, 2**63, 10**30)),
    Row("T1", "a seed of any size in a request", the_next_client("seed", -(2**70), 2**63, 10**30)),
    Row("T1", "a penalty that fp32 does not hold", the_next_client("repetition_penalty", 1e-46, 1e-39, 1e-38)),
    Row("T1", "a share that fp32 does not hold", the_next_client("top_p", 5e-324, 1e-46, 1e-39)),
    Row("T3", "the first space behind a prompt", a_first_space),
    Row("T4", "separators of lines in a stream", separators, 2),
    Row("T5", "a list of ids with a wrong member", a_long_list_with_a_wrong_member),
    Row("T5", "an empty key", an_empty_key),
)
