"""Asks a server, and compares what it says with what an oracle says."""

import dataclasses
import json
import math
import os
from typing import Any

import httpx
import torch

from dejavu_train.engine.inputs import SEEDS, Row, Sampling
from dejavu_train.engine.rows import Rows

from .bodies import draw
from .reader import Wish, Wrong, read

CLOSE = 1e-3  # between two logits that may change places
END = 2  # of the model


@dataclasses.dataclass
class Written:
    """What an oracle writes behind a prompt: text, tokens, and how it ends."""

    text: str
    tokens: int
    finish: str


class Oracle:
    """Greedy texts by whole forward passes of the model, drawn ones by an engine of its own.

    Args:
        model: backend ``mask``. engine: of one row, of the same bundle.
    """

    def __init__(self, model: Any, engine: Any, tokenizer: Any) -> None:
        self.model, self.engine, self.tokenizer = model, engine, tokenizer

    @torch.no_grad()
    def nats(self, ids: list[int], start: int) -> torch.Tensor:
        """(T, V): the log-probabilities behind each token, sparse from ``start`` on."""
        self.model.sparse_from = start
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    @torch.no_grad()
    def tokens(self, prompt: list[int], wish: Wish, number: int) -> list[int]:
        """As many new tokens as there may be, or up to the model's end."""
        given = wish.fields
        temperature = given.get("temperature", 1.0)
        least = given.get("min_tokens", 0)
        names = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        options = {name: given[name] for name in names if name in given}
        if temperature >= 1e-6:
            sampling = Sampling(temperature, given.get("top_p", 1.0), seed=given["seed"] % SEEDS, **options)
            row = Row.of_prompt(prompt, len(prompt) + wish.new, sampling, len(prompt) + least, number)
            rows, found = Rows(self.engine, [END]), []
            b = rows.join(row)
            while rows.taken:
                found += [token for news in rows.step(8) if news.row == b for token in news.tokens]
            return found
        ids = list(prompt)
        while len(ids) < len(prompt) + wish.new:
            ids.append(self._greedy(ids, prompt, given, least))
            if ids[-1] == END:
                break
        return ids[len(prompt) :]

    def _greedy(self, ids: list[int], prompt: list[int], given: dict[str, Any], least: int) -> int:
        self.model.sparse_from = len(prompt)
        logits = self.model(torch.tensor([ids])).logits[0, -1].double()
        penalty = given.get("repetition_penalty", 1.0)
        for token in set(ids):
            value = logits[token]
            logits[token] = value * penalty if value < 0 else value / penalty
        for token in set(ids[len(prompt) :]):
            times = ids[len(prompt) :].count(token)
            logits[token] -= given.get("presence_penalty", 0) + given.get("frequency_penalty", 0) * times
        if len(ids) - len(prompt) < least:
            logits[END] = -math.inf
        best = logits.topk(2).values
        if float(best[0] - best[1]) < CLOSE:
            raise TooClose
        return int(logits.argmax())

    def text(self, prompt: list[int], new: list[int], wish: Wish, ends: set[int]) -> Written:
        """The text of tokens, up to a stop. Every beginning is decoded anew."""
        least = wish.fields.get("min_tokens", 0)
        for n in range(1, len(new) + 1):
            ended = n > least and new[n - 1] in ends
            over = ended or n == len(new)
            raw = self._behind(prompt, new[:n], False)
            found = [place for place in (raw.find(stop) for stop in wish.fields["stop"]) if place >= 0]
            if found and not (raw[: min(found)].endswith("\ufffd") and not over):
                shown = raw[: min(found)]
                for name in self.tokenizer.all_special_tokens:
                    shown = shown.replace(name, "")
                return Written(shown, n, "stop")
            if ended:
                return Written(self._behind(prompt, new[: n - 1], True), n, "stop")
        return Written(self._behind(prompt, new, True), len(new), "length")

    def _behind(self, prompt: list[int], new: list[int], skip: bool) -> str:
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        both, before = (self.tokenizer.decode(ids, **options) for ids in (prompt + new, prompt))
        if before.endswith("\ufffd"):  # the prompt ends within a character, which the text completes
            before = os.path.commonprefix((before, both))
        return both[len(before) :]


class TooClose(Exception):
    """Two tokens are almost equally likely, so that either is right."""


@dataclasses.dataclass
class Outcome:
    """What became of a request. finding: what is wrong, or None."""

    kind: str
    finding: str | None = None


def asked(url: str, path: str, raw: bytes) -> tuple[int, Any]:
    """Status and body of an answer. Of a stream a body that is joined of its parts."""
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/{path}", content=raw, headers=headers, timeout=60)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return answer.status_code, answer.json()
    parts = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n") or "error" in parts[-1], answer.text[-200:]
    if "error" in parts[-1]:
        return 500, parts[-1]
    return answer.status_code, joined(parts)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Parts of a stream as one body."""
    made: dict[int, dict[str, Any]] = {}
    usage = None
    for part in parts:
        usage = part.get("usage") or usage
        for each in part["choices"]:
            new = {"text": "", "finish_reason": None, "logprobs": None, "index": each["index"], "role": ""}
            choice = made.setdefault(each["index"], new)
            delta = each.get("delta", {})
            choice["text"] += each.get("text", "") + delta.get("content", "")
            choice["role"] += delta.get("role", "")
            choice["finish_reason"] = each["finish_reason"] or choice["finish_reason"]
            for name, values in (each["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"][name] = (choice["logprobs"].get(name) or []) + (values or [])
    return {"choices": [made[i] for i in sorted(made)], "usage": usage}


def judge(seed: int, url: str, name: str, oracle: Oracle, context: int) -> Outcome:
    """Ask the request of a seed."""
    path, raw = draw(seed, name)
    try:
        status, body = asked(url, path, raw)
    except (httpx.HTTPError, ValueError, AssertionError) as error:
        return Outcome("lost", f"{type(error).__name__}: {error}")
    try:
        wish = read(path, raw, name, oracle.tokenizer, context, oracle.engine.shape.vocab_size)
    except Wrong as wrong:
        good = status in (400, 404) and set(body.get("error", {})) == {"message", "type", "param", "code"}
        return Outcome("refused", None if good else f"must be refused ({wrong}), got {status}: {str(body)[:200]}")
    if status != 200:
        return Outcome("text", f"must be answered, got {status}: {str(body)[:300]}")
    try:
        return Outcome("text", differs(wish, body, oracle))
    except TooClose:
        return Outcome("too close to call")


def differs(wish: Wish, body: dict[str, Any], oracle: Oracle) -> str | None:
    """What is wrong with an answer. None where nothing is."""
    given, n = wish.fields, wish.fields.get("n", 1)
    if len(body["choices"]) != n * len(wish.prompts):
        return f"{len(body['choices'])} choices"
    drawn = given.get("temperature", 1.0) >= 1e-6
    total = 0
    for i, choice in enumerate(body["choices"]):
        prompt = wish.prompts[i // n]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if wish.chat and choice.get("role", "assistant") != "assistant":
            return f"the role is {choice['role']!r}"
        echo = wish.texts[i // n] if given.get("echo") else ""
        if drawn and "seed" not in given:
            if not text.startswith(echo) or choice["finish_reason"] not in ("stop", "length"):
                return f"choice {i}: {choice}"
            continue
        new = oracle.tokens(prompt, wish, i % n) if wish.new else []
        ends = {END, *given["stop_token_ids"]}
        right = oracle.text(prompt, new, wish, ends)
        total += right.tokens
        if (text, choice["finish_reason"]) != (echo + right.text, right.finish):
            return f"choice {i}: {text!r} {choice['finish_reason']}, not {echo + right.text!r} {right.finish}"
        if wrong := wrong_scores(choice["logprobs"], wish, prompt, new[: right.tokens], oracle):
            return f"choice {i}: {wrong}"
    usage = body["usage"]
    if usage is not None and usage["prompt_tokens"] != sum(map(len, wish.prompts)):
        return f"usage {usage}"
    if usage is not None and not (drawn and "seed" not in given) and usage["completion_tokens"] != total:
        return f"usage {usage}, {total} tokens"
    return None


def wrong_scores(said: Any, wish: Wish, prompt: list[int], new: list[int], oracle: Oracle) -> str | None:
    """What is wrong with log-probabilities."""
    logprobs = wish.fields.get("logprobs", False)
    wanted = logprobs is not False
    if (said is not None) != wanted:
        return None if wanted and not new and not wish.fields.get("echo") else f"logprobs {said}"
    if said is None:
        return None
    nats = oracle.nats(prompt + new, len(prompt))
    first = 1 if wish.fields.get("echo") else len(prompt)
    right = [float(nats[at - 1, token]) for at, token in enumerate(prompt + new) if at >= first]
    values = [each["logprob"] for each in said["content"]] if wish.chat else said["token_logprobs"]
    values = values[1:] if wish.fields.get("echo") else values
    near = len(values) == len(right) and all(abs(a - b) < CLOSE for a, b in zip(values, right, strict=True))
    return None if near else f"logprobs {values}, not {right}"
