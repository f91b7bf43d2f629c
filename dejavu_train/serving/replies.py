"""What clients get: OpenAI's bodies, chunks of a stream, and errors."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error: status, message, the field that is meant, a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass
class Choice:
    """A text that is being written."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None


@dataclass
class Reply:
    """One request's answer.

    Attributes:
        prompt_tokens: of all prompts, each counted once. density: of the bundle, by target. chat: its form.
    """

    model: str
    prompt_tokens: int
    density: Mapping[str, float]
    chat: bool
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
            made.append({"index": i, **text, "logprobs": None, "finish_reason": choice.finish})
        return self._object(made, "") | {"usage": self.usage(choices)}

    def chunk(self, i: int, text: str, finish: str | None) -> str:
        """An event of a stream."""
        part: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return event(self._object([{"index": i, **part, "logprobs": None, "finish_reason": finish}], ".chunk"))

    def last_chunk(self, choices: Sequence[Choice]) -> str:
        """The event that tells usage."""
        return event(self._object([], ".chunk") | {"usage": self.usage(choices)})

    def _object(self, choices: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {"id": self.name, "object": kind, "created": self.made, "model": self.model, "choices": choices}


def event(body: Mapping[str, Any]) -> str:
    """A body as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
