"""Draws bodies of requests: good ones, and up to two mutations of each."""

import json
import random
from typing import Any

WORDS = "the model reads a token and the layer keeps only those rows that matter naïve 🙂".split()
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2.5, 2**31, 2**63, 10**30, -(2**70), 1e-39, 1e-46, 1e39, 1e308, float("nan"),
    float("inf"), "", "x", "\ud83d", "auto", "none", [], {}, [None], [1], ["a"], [[]], {"a": 1}, [0] * 300,
    ["a"] * 40, [0] * 200 + [None], {"type": "text"}, "é" * 3000, [[[[[[]]]]]],
]  # fmt: skip
KNOWN = "model prompt messages max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p seed stop n"
KNOWN += " repetition_penalty presence_penalty frequency_penalty stop_token_ids stream stream_options logprobs"
KNOWN += " top_logprobs echo best_of suffix logit_bias tools tool_choice functions function_call response_format user"
KNOWN += " metadata parallel_tool_calls service_tier store modalities unknown"
FIELDS = KNOWN.split()


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def good(rng: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """An address and a body that is answered with a text."""
    body: dict[str, Any] = {"model": name, "max_tokens": rng.randint(1, 12)}
    if rng.random() < 0.65:
        ids = [2, *(rng.randrange(4, 320) for _ in range(rng.randint(0, 12)))]
        one = rng.random() < 0.7
        text = [words(rng, 9) for _ in range(rng.randint(1, 3))]
        body["prompt"] = rng.choice([text[0] if one else text, ids if one else [ids, ids[:2]]])
        extra: list[dict[str, Any]] = [{"echo": True}, {"logprobs": rng.randint(0, 5)}, {"best_of": 1}, {"suffix": ""}]
        extra += [{"echo": True, "logprobs": 1, "max_tokens": rng.choice((0, 1))}]
        path = "completions"
    else:
        part = {"type": "text", "text": words(rng, 4)}
        content: Any = rng.choice([words(rng, 6), [part], [part, part]])
        body["messages"] = [{"role": rng.choice(["user", "developer", "system"]), "content": content}]
        if rng.random() < 0.3:
            body["messages"] += [{"role": "assistant", "content": words(rng, 3)}, {"role": "user", "content": "so"}]
        extra = [{"logprobs": True, "top_logprobs": 2}, {"tools": []}, {"tool_choice": "auto"}]
        extra += [{"response_format": {"type": "text"}}, {"max_completion_tokens": 5}]
        path = "chat/completions"
    if rng.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"temperature": round(rng.uniform(0.3, 1.5), 2), "seed": rng.randrange(-5, 2**40)}
    extra += [
        {"top_p": 0.8}, {"top_k": rng.choice((1, 5, 10**6))}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"n": 2},
        {"presence_penalty": 0.5, "frequency_penalty": -0.2}, {"stop": rng.choice([" the", ["a", "zz"], "</s>"])},
        {"stop_token_ids": [rng.randrange(320) for _ in range(4)]}, {"stream": True}, {"min_tokens": 1},
        {"stream": True, "stream_options": {"include_usage": True}}, {"user": "u"}, {"logit_bias": {}},
        {"temperature": rng.choice((1e-7, 1e-39))},
    ]  # fmt: skip
    for each in rng.sample(extra, rng.randint(0, 3)):
        body |= each
    return path, body


def draw(seed: int, name: str) -> tuple[str, bytes]:
    """The request of a seed."""
    rng = random.Random(seed)
    path, body = good(rng, name)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        kind = rng.random()
        if kind < 0.6:
            body[rng.choice(FIELDS)] = rng.choice(ODD)
        elif kind < 0.75 and len(body) > 1:
            del body[rng.choice(sorted(body))]
        elif kind < 0.9:
            place = rng.choice(["prompt", "messages", "stop", "stream_options"])
            held = body.get(place)
            if isinstance(held, list):
                held = [*held]
                held[rng.randrange(len(held))] = rng.choice(ODD) if held else None
                body[place] = held
            elif isinstance(held, dict):
                body[place] = held | {rng.choice(["include_usage", "other"]): rng.choice(ODD)}
        elif isinstance(body.get("messages"), list) and isinstance(body["messages"][0], dict):
            body["messages"] = [body["messages"][0] | {rng.choice(["role", "content", "name"]): rng.choice(ODD)}]
    raw = json.dumps(body).encode()
    if rng.random() < 0.08:
        raw = raw[: rng.randrange(len(raw))]
    elif rng.random() < 0.08:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return path, raw
