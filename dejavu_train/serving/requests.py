"""What clients send: OpenAI's fields, checked, as rows of an engine."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from dejavu_train.engine.inputs import SEEDS, Row, Sampling
from dejavu_train.errors import UserError, first_line
from dejavu_train.serving.replies import Refusal

MOST_CHOICES = 32
MOST_STOPS = 4
SHOWN = 60  # characters of a wrong value in a message
SURROGATE = re.compile("[\ud800-\udfff]")
HALF = "half_character"  # the kind of pydantic's error about a text that cannot be written as UTF-8
KINDS = {  # of fields that take several: what each may be, which no single error says
    "prompt": "a text, several, token ids, or several lists of token ids",
    "stop": f"a text of 1 to 200 characters, or at most {MOST_STOPS} of them",
}


def _check_characters(text: str) -> str:
    """JSON can spell half of a character, as it is where a client cuts a text. No tokenizer takes it."""
    half = SURROGATE.search(text)
    if half is not None:
        said = ascii(half[0]).strip("'")
        raise PydanticCustomError(HALF, "has {half}, half of a character; send whole ones", {"half": said})
    return text


Whole = Annotated[str, AfterValidator(_check_characters)]
Words = Annotated[Whole, Field(min_length=1, max_length=200)]


def explain(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str | None, str]:
    """The field that is meant, and what is wrong, of pydantic's errors about a body."""
    error = next((each for each in errors if each["type"] == HALF), errors[0])
    place, kind = error["loc"][1:], error["type"]
    if kind == "json_invalid":
        fault = error["ctx"]["error"].lower().removesuffix(" at")
        return None, f"the body must be JSON: {fault} at character {place[0]}"
    if isinstance(body, bytes) and body:
        return None, "the body is not marked as JSON; send the header Content-Type: application/json"
    if not place:
        return None, "the body must be a JSON object" + ("" if kind == "missing" else f", got {_shown(error['input'])}")
    name = str(place[0]) if place[0] in KINDS else ".".join(map(str, place))
    if kind == "missing":
        return name, f"{name} is missing; give it"
    if kind in ("extra_forbidden", "none_required"):
        return name, f"this server has no {name}; leave it out"
    if kind == HALF:
        return name, f"{name} {error['msg']}"
    if name in KINDS:
        return name, f"{name} must be {KINDS[name]}, got {_shown(body[name])}"
    said = error["msg"].replace("Input should", f"{name} must").replace("False", "false")
    return name, f"{said if name in said else f'{name}: {said}'}, got {_shown(error['input'])}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


class StreamOptions(BaseModel):
    """Of a stream: whether its last chunk tells usage."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Asked(BaseModel):
    """What both calls share. A field that is not here is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Whole
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=0)
    min_p: float | None = Field(0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(1.0, gt=0, le=10)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    min_tokens: int | None = Field(0, ge=0)
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: Words | Annotated[list[Words], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self) -> Sampling:
        """How tokens are chosen. A seed that is left out is drawn."""
        seed = random.randrange(SEEDS) if self.seed is None else self.seed % SEEDS

        def given(value: Any, usual: Any) -> Any:
            return usual if value is None else value

        return Sampling(
            given(self.temperature, 1.0), given(self.top_p, 1.0), top_k=given(self.top_k, 0),
            min_p=given(self.min_p, 0.0), repetition_penalty=given(self.repetition_penalty, 1.0),
            presence_penalty=given(self.presence_penalty, 0.0), frequency_penalty=given(self.frequency_penalty, 0.0),
            seed=seed,
        )  # fmt: skip


class Completion(Asked):
    """The body of /v1/completions. prompt: a text, several, token ids, or several lists of them."""

    prompt: Whole | list[Whole] | list[int] | list[list[int]]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant"]
    content: Whole


class Chat(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None


@dataclass(frozen=True)
class Reader:
    """Makes rows of what is asked.

    Attributes:
        context: tokens that a row holds. lossless: whether the dense model's text is written.
    """

    tokenizer: Any
    context: int
    vocab: int
    lossless: bool

    def completion(self, asked: Completion) -> list[Row]:
        """The rows of a completion, choice after choice.

        Raises:
            Refusal: an empty prompt, an id outside the vocabulary, too many tokens.
        """
        prompt: Any = asked.prompt
        if isinstance(prompt, str) or all(isinstance(each, int) for each in prompt):
            prompt = [prompt]
        many = [self.tokenizer(each).input_ids if isinstance(each, str) else list(each) for each in prompt]
        if len(many) * (asked.n or 1) > MOST_CHOICES:
            raise Refusal(400, f"at most {MOST_CHOICES} choices a request, got {len(many) * (asked.n or 1)}", "n")
        return [row for ids in many for row in self._rows(asked, ids, asked.max_tokens or 16, "prompt")]

    def chat(self, asked: Chat) -> list[Row]:
        """The rows of a chat.

        Raises:
            Refusal: a tokenizer without a chat template, too many tokens.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal(400, "this model's tokenizer has no chat template; use /v1/completions", "messages")
        messages = [message.model_dump() for message in asked.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template raises whatever its author chose
            raise Refusal(400, f"the chat template refuses these messages: {first_line(error)}", "messages") from None
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        most = asked.max_completion_tokens or asked.max_tokens or max(1, self.context - len(ids))
        return self._rows(asked, ids, most, "messages")

    def _rows(self, asked: Asked, ids: list[int], new: int, name: str) -> list[Row]:
        if not ids:
            raise Refusal(400, f"{name} has no tokens; give at least one", name)
        if not 0 <= min(ids) <= max(ids) < self.vocab:
            raise Refusal(400, f"token ids must lie in 0 to {self.vocab - 1}, got {min(ids)} to {max(ids)}", name)
        if len(ids) + new > self.context:
            raise Refusal(
                400,
                f"the prompt's {len(ids)} tokens and {new} new ones do not fit the context of {self.context};"
                " shorten the prompt or max_tokens",
                name,
                "context_length_exceeded",
            )
        fewest = asked.min_tokens or 0
        if fewest > new:
            raise Refusal(
                400, f"min_tokens must be at most max_tokens, here {new}, got {fewest}; raise max_tokens", "min_tokens"
            )
        try:
            sampling = asked.sampling()
        except UserError as error:
            raise Refusal(400, str(error)) from None
        if self.lossless and sampling.penalised:
            raise Refusal(400, "this server is lossless, which has no penalties; leave them out")
        return [Row.of_prompt(ids, len(ids) + new, sampling, len(ids) + fewest, i) for i in range(asked.n or 1)]
