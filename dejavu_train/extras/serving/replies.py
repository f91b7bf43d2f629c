"""Replies to clients: OpenAI's bodies, chunks of a stream, and errors."""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dejavu_train.engine.scores import Score
from dejavu_train.extras.serving.logprobs import ChoiceScores

SEPARATORS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}  # that some clients end lines at
KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error: status, message, the field that is meant, a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    message = _whole(message)
    param = None if param is None else _whole(param)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _whole(text: str) -> str:
    """A text that UTF-8 can write, whatever a client has put into it."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass
class Choice:
    """A text that is being written. logprobs: of its tokens in OpenAI's form, where they are asked for."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    logprobs: dict[str, Any] | None = None
    scores: list[Score] = field(default_factory=list)
    scored: ChoiceScores | None = None
    first: int | None = None
    cached: int = 0

    def keep(self, scored: ChoiceScores, first: int | None) -> None:
        """Its log-probabilities are asked for. first: a token in front of them, see `ChoiceScores.part`."""
        self.scored, self.first = scored, first

    async def told(self) -> dict[str, Any] | None:
        """Log-probabilities since the last call. Those of a long prompt take a while, so a thread writes them."""
        if self.scored is None:
            return None
        scores, first, self.scores, self.first = self.scores, self.first, [], None
        return await asyncio.to_thread(self.scored.part, scores, first)


@dataclass
class Reply:
    """One request's answer.

    Attributes:
        prompt_tokens: of all prompts, each counted once. density: of the bundle, by target. chat: its form.
        tells_usage: a stream's last chunk tells usage.
    """

    model: str
    prompt_tokens: int
    density: Mapping[str, float]
    chat: bool
    tells_usage: bool = False
    acceptance: float | None = None
    made: int = field(default_factory=lambda: int(time.time()))
    name: str = ""

    def __post_init__(self) -> None:
        self.name = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens, what share of the units the bundle selects, and the share of drafted tokens that was accepted."""
        new = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.prompt_tokens, sum(each.cached for each in choices))},
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "density": dict(self.density),
            "acceptance": self.acceptance,
        }

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A whole answer."""
        made: list[dict[str, Any]] = []
        for i, choice in enumerate(choices):
            text: dict[str, Any] = {"text": choice.text}
            if self.chat:
                text = {"message": {"role": "assistant", "content": choice.text}}
            made.append({"index": i, **text, "logprobs": choice.logprobs, "finish_reason": choice.finish})
        return self._object(made, "") | {"usage": self.usage(choices)}

    def chunk(self, i: int, text: str, finish: str | None, logprobs: dict[str, Any] | None = None) -> str:
        """An event of a stream."""
        part: dict[str, Any] = {"text": text}
        if self.chat:
            part = {"delta": {"content": text} if text else {}}
        return self._chunk(i, part, finish, logprobs)

    def first_chunks(self, n: int) -> str:
        """Events that begin the messages of a chat, in their order. Clients join what chunks repeat, so no other tells
        the role."""
        return "".join(self._chunk(i, {"delta": {"role": "assistant", "content": ""}}) for i in range(n))

    def _chunk(
        self, i: int, part: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> str:
        made = self._object([{"index": i, **part, "logprobs": logprobs, "finish_reason": finish}], ".chunk")
        return event(made | {"usage": None} if self.tells_usage else made)

    def last_chunk(self, choices: Sequence[Choice]) -> str:
        """The event that tells usage."""
        return event(self._object([], ".chunk") | {"usage": self.usage(choices)})

    def _object(self, choices: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {"id": self.name, "object": kind, "created": self.made, "model": self.model, "choices": choices}


def event(body: Mapping[str, Any]) -> str:
    """A body as a server-sent event, without what a client may take for the end of a line."""
    data = json.dumps(body, ensure_ascii=False)
    for separator, escaped in SEPARATORS.items():
        data = data.replace(separator, escaped)
    return f"data: {data}\n\n"
