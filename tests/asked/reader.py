"""What a body asks for, read without the server's code: refused, or what texts it wants."""

import dataclasses
import json
import math
from typing import Any

NEUTRAL: dict[str, list[Any]] = {
    "logit_bias": [{}], "suffix": [""], "tools": [[]], "functions": [[]], "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"], "parallel_tool_calls": [True, False], "response_format": [{}, {"type": "text"}],
    "modalities": [[], ["text"]], "service_tier": ["auto", "default"], "store": [False],
}  # fmt: skip
NUMBERS = {  # least and most; the first is not allowed itself where it is a text
    "temperature": (0, 2), "top_p": ("0", 1), "min_p": (0, 1), "repetition_penalty": (1e-30, 10),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
}  # fmt: skip
COUNTS = {"max_tokens": 0, "min_tokens": 0, "top_k": 0, "n": 1, "seed": -math.inf}
SHARED = [*NUMBERS, *COUNTS, "model", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"]
OWN = {
    "completions": ["prompt", "echo", "best_of"],
    "chat/completions": ["messages", "max_completion_tokens", "top_logprobs"],
}
IGNORED = ["user", "metadata", "safety_identifier", "prompt_cache_key"]


class Wrong(Exception):
    """A body that must be refused."""


@dataclasses.dataclass
class Wish:
    """A body that must be answered: prompts as ids, with their texts, and its fields."""

    chat: bool
    prompts: list[list[int]]
    texts: list[str]
    new: int
    fields: dict[str, Any]


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def whole(value: Any) -> bool:
    return type(value) is int


def halves(value: str) -> bool:
    return any(0xD800 <= ord(letter) < 0xE000 for letter in value)


def no_constant(name: str) -> None:
    raise Wrong(name)


def read(path: str, raw: bytes, name: str, tokenizer: Any, context: int, vocab: int) -> Wish:
    """Raises Wrong for what must be refused."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"no JSON: {error}") from None
    need(isinstance(body, dict), "no object")
    body = {key: value for key, value in body.items() if value is not None}
    chat = path == "chat/completions"
    for key, value in body.items():
        known = key in SHARED or key in OWN[path] or key in IGNORED
        need(known or any(value == each and type(value) is type(each) for each in NEUTRAL.get(key, [])), key)
    need(isinstance(body.get("model"), str) and not halves(body["model"]), "model")
    need(body["model"] == name, "another model")
    for key, (least, most) in NUMBERS.items():
        value = body.get(key, 1)
        need(type(value) in (int, float) and math.isfinite(value), key)
        need((value > 0 if least == "0" else value >= least) and value <= most or key not in body, key)
    for key, low in COUNTS.items():
        need(key not in body or (whole(body[key]) and body[key] >= low), key)
    need(body.get("n", 1) <= 32, "n")
    stop = body.get("stop", [])
    stops = [] if stop == "" else [stop] if isinstance(stop, str) else stop
    need(isinstance(stops, list) and len(stops) <= 16, "stop")
    need(all(isinstance(s, str) and 0 < len(s) <= 200 and not halves(s) for s in stops), "stop")
    ends = body.get("stop_token_ids", [])
    need(isinstance(ends, list) and len(ends) <= 64 and all(map(whole, ends)), "stop_token_ids")
    need(type(body.get("stream", False)) is bool, "stream")
    options = body.get("stream_options", {})
    need(isinstance(options, dict) and type(options.get("include_usage", False)) is bool, "stream_options")
    fields = body | {"stop": stops, "stop_token_ids": ends}
    if chat:
        prompts, texts, new = read_chat(body, tokenizer, context)
    else:
        prompts, texts, new = read_completion(body, tokenizer)
    need(len(prompts) * body.get("n", 1) <= 32, "choices")
    for ids in prompts:
        need(bool(ids) and all(0 <= token < vocab for token in ids), "ids")
        need(len(ids) + new <= context, "context")
    need(body.get("min_tokens", 0) <= new, "min_tokens")
    return Wish(chat, prompts, texts, new, fields)


def read_completion(body: dict[str, Any], tokenizer: Any) -> tuple[list[list[int]], list[str], int]:
    logprobs = body.get("logprobs", 0)
    need(logprobs is False or (whole(logprobs) and 0 <= logprobs <= 20), "logprobs")
    need(type(body.get("echo", False)) is bool, "echo")
    need("best_of" not in body or (whole(body["best_of"]) and body["best_of"] == body.get("n", 1)), "best_of")
    need("prompt" in body, "prompt")
    prompt = body["prompt"]
    several = isinstance(prompt, list) and any(not whole(each) for each in prompt)
    prompts = prompt if several else [prompt]
    need(len(prompts) <= 32, "prompts")
    found, texts = [], []
    for each in prompts:
        if isinstance(each, str):
            need(not halves(each), "prompt")
            found.append(tokenizer(each).input_ids)
            texts.append(each)
        else:
            need(isinstance(each, list) and all(map(whole, each)), "prompt")
            need(all(0 <= token < 2**31 for token in each), "prompt")
            found.append(each)
            texts.append(tokenizer.decode(each, skip_special_tokens=True))
    return found, texts, body.get("max_tokens", 16)


def read_chat(body: dict[str, Any], tokenizer: Any, context: int) -> tuple[list[list[int]], list[str], int]:
    need(type(body.get("logprobs", False)) is bool, "logprobs")
    top = body.get("top_logprobs", 0)
    need(whole(top) and 0 <= top <= 20 and (not top or body.get("logprobs") is True), "top_logprobs")
    for key in ("max_tokens", "max_completion_tokens"):
        need(key not in body or (whole(body[key]) and body[key] >= 1), key)
    messages = body.get("messages")
    need(isinstance(messages, list) and bool(messages), "messages")
    made = []
    for message in messages:
        need(isinstance(message, dict) and "content" in message, "message")
        role, content = message.get("role"), message["content"]
        need(isinstance(role, str) and role in ("system", "developer", "user", "assistant"), "role")
        if isinstance(content, list):
            for part in content:
                need(
                    isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str), "part"
                )
            content = "".join(part["text"] for part in content)
        content = "" if content is None else content
        need(isinstance(content, str) and not halves(content), "content")
        made.append({"role": "system" if role == "developer" else role, "content": content})
    text = tokenizer.apply_chat_template(made, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    new = body.get("max_completion_tokens", body.get("max_tokens", max(1, context - len(ids))))
    return [ids], [text], new
