"""A hundred malformed requests, and what the client of each sees. malformed.csv has what it should see.

Bodies that are no JSON, cut in the middle, lack a field, or have a field of the wrong kind or out of range. They are
sent by the package openai, whose exception a row names. The server is asked for a text at last, and must write it.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import openai

HUNDRED = 100
SHOWN = 60  # characters of a body in a row
WRONG: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1}, {"max_tokens": True}, {"max_tokens": "x"}, {"max_tokens": 1.5}, {"max_tokens": 10**9},
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": 3}, {"top_p": 0}, {"top_p": 2},
    {"top_k": -1}, {"min_p": 2}, {"repetition_penalty": 0}, {"presence_penalty": 9}, {"n": 0}, {"n": 1000},
    {"n": True}, {"seed": "a"}, {"stop": {}}, {"stop": [""]}, {"stop": ["a"] * 17}, {"stop": 3},
    {"stream": "yes"}, {"stream_options": 1}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]},
    {"prompt": [10**9]}, {"prompt": [2**70]}, {"prompt": ["a", 1]}, {"prompt": None}, {"prompt": {}},
    {"prompt": "a " * 1500}, {"logprobs": 99}, {"echo": "yes"}, {"best_of": 4}, {"suffix": "b"},
    {"logit_bias": {"5": 9}},
    {"unknown": 1}, {"model": "other"}, {"model": None},
)  # fmt: skip


def requests(model: str) -> Iterator[tuple[str, bytes]]:
    """A hundred addresses and bodies, the same each time."""
    bare = [b"", b"{", b"[]", b"null", b"\xff\xfe", json.dumps({"model": model}).encode(), b'{"prompt": "a"}']
    wrong = [json.dumps({"model": model, "prompt": "a"} | each).encode() for each in WRONG]
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}]}
    yield "/chat/completions", json.dumps(chat).encode()  # the tokenizer has no template
    yield "/nothing", b"{}"
    for body in bare + wrong:
        yield "/completions", body
    rng = random.Random(0)
    whole = json.dumps({"model": model, "prompt": "abc", "max_tokens": 3, "stop": ["a"]}).encode()
    for _ in range(HUNDRED - 2 - len(bare) - len(wrong)):
        yield "/completions", whole[: rng.randrange(1, len(whole) - 1)]


def seen(client: openai.OpenAI, path: str, body: bytes) -> dict[str, Any]:
    """What the client sees: a status, its exception, and OpenAI's fields of an error."""
    shown = body.decode("utf-8", "backslashreplace")
    asked = {"asked": shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}...", "status": "", "raised": "nothing"}
    try:
        client.post(path, content=body, cast_to=object, options={"headers": {"content-type": "application/json"}})
    except openai.APIStatusError as error:
        found = error.body if isinstance(error.body, dict) else {}
        asked |= {"status": str(error.status_code), "raised": type(error).__name__}
        asked |= {name: found.get(name) for name in ("type", "param", "code", "message")}
    except openai.APIError as error:
        asked |= {"raised": type(error).__name__, "message": str(error)}
    return asked


def ask_all(url: str, model: str) -> list[dict[str, Any]]:
    """A row for each request. Raises openai's exceptions where the server then writes no text."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        rows = [{"number": i, **seen(client, *each)} for i, each in enumerate(requests(model), 1)]
        client.completions.create(model=model, prompt="a", max_tokens=2)
    return rows
