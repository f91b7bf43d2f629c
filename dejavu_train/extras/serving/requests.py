"""Requests of clients: OpenAI's fields, counted, checked, then tokenised, as rows of an engine.

A body is counted before its values become objects, and checked before its text becomes tokens. So what is refused costs
little, whatever its size. None of it is done on the event loop.
"""

import functools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError

from dejavu_train.engine.inputs import SEEDS, Row, Sampling
from dejavu_train.extras.serving.replies import Refusal
from dejavu_train.extras.serving.text import Vocabulary
from dejavu_train.ground.errors import UserError, first_line

MOST_CHOICES = 32
MOST_STOPS = 16
MOST_ENDS = 64
MOST_TOP = 20  # log-probabilities beside that of a token
VALUES_A_TOKEN = 40  # JSON values that a body may have for each token of the context: 32 prompts of ids, and some more
SHOWN = 60  # characters of a wrong value in a message
SURROGATE = re.compile("[\ud800-\udfff]")
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
SPECIFIC = "specific"  # the kind of pydantic's errors that say by themselves what is wrong
KINDS = {  # of fields that take several: what each may be, which no single error says
    "prompt": "a text, several, token ids, or several lists of token ids",
    "stop": f"a text of 1 to 200 characters, or at most {MOST_STOPS} of them",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields of OpenAI that this server has not, and values that ask for nothing
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "response_format": ({}, {"type": "text"}),
    "modalities": ([], ["text"]),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prediction": ({},),
    "audio": ({},),
}
IGNORED = ("metadata", "user", "safety_identifier", "prompt_cache_key")  # for whoever keeps requests, which nobody does
ROLES = "system, developer, user or assistant"


def _check_characters(text: str) -> str:
    """JSON can spell half of a character, as it is where a client cuts a text. No tokenizer takes it."""
    half = SURROGATE.search(text)
    if half is not None:
        said = ascii(half[0]).strip("'")
        raise PydanticCustomError(SPECIFIC, "has {half}, half of a character; send whole ones", {"half": said})
    return text


def _read_stops(value: Any) -> list[str]:
    """Stop strings of one text or a list. An empty text alone asks for nothing."""
    several = [value] if isinstance(value, str) and value else [] if value == "" else value
    if not isinstance(several, list) or len(several) > MOST_STOPS:
        raise ValueError("stop")
    if not all(isinstance(each, str) and 1 <= len(each) <= 200 for each in several):
        raise ValueError("stop")
    return [_check_characters(each) for each in several]


def _read_content(value: Any) -> str:
    """A message's text, given at once or in parts. null is none."""
    if not isinstance(value, list):
        return "" if value is None else value
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            said = "must be a text, or parts such as {example}, got {part} as part {i}"
            example = '{"type": "text", "text": "..."}'
            raise PydanticCustomError(SPECIFIC, said, {"example": example, "part": _shown(part), "i": i})
        texts.append(part["text"])
    return "".join(texts)


def _none_of_false(value: Any) -> Any:
    """The value, but what a chat says where it wants none."""
    return None if value is False else value


Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
Whole = Annotated[str, AfterValidator(_check_characters)]


def explain(error: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[str, str]:
    """The field that is meant, and what is wrong, of one of pydantic's errors about a body."""
    place, kind = error["loc"], error["type"]
    name = str(place[0]) if place[0] in KINDS else ".".join(map(str, place))
    if kind == "missing":
        return name, f"{name} is missing; give it"
    if kind == SPECIFIC:
        return name, f"{name} {error['msg']}"
    if name in KINDS:
        return name, f"{name} must be {KINDS[name]}, got {_shown(body[name])}"
    if kind in ("model_type", "model_attributes_type"):
        return name, f"{name} must be an object, got {_shown(error['input'])}"
    if place[-1] == "role":
        return name, f"{name} must be {ROLES}, got {_shown(error['input'])}"
    said = error["msg"].lower().removeprefix("input should be ").removeprefix("value error, ")
    said = f"must be {said}" if not said.startswith(("list", "must")) else said
    said = said.replace("'true'", "true").replace("'false'", "false")
    return name, f"{name} {said}, got {_shown(error['input'])}"


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > SHOWN:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = json.dumps(value[:SHOWN] if isinstance(value, str) else value, default=str)
    except RecursionError:
        return "a value that is nested deeply"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


class StreamOptions(BaseModel):
    """Options of a stream: whether its last chunk tells usage."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class CallFields(BaseModel):
    """Fields that both calls share. Those that are null were left out before."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: Whole
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_read_stops)] = []
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=MOST_ENDS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def top(self) -> int | None:
        """Log-probabilities beside that of a token. None: not even that one."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        """How tokens are chosen. A seed that is left out is drawn. Raises UserError for a number that nothing holds."""
        return Sampling(
            self.temperature, self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=random.randrange(SEEDS) if self.seed is None else self.seed % SEEDS,
        )  # fmt: skip


class Completion(CallFields):
    """The body of /v1/completions. prompt: a text, several, token ids, or several lists of them."""

    prompt: Any
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    logprobs: Annotated[Top | None, BeforeValidator(_none_of_false)] = None

    @property
    def top(self) -> int | None:
        """See `CallFields.top`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Whole, BeforeValidator(_read_content)]


class Chat(CallFields):
    """The body of /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=1)
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Top = 0

    @property
    def top(self) -> int | None:
        """See `CallFields.top`."""
        return self.top_logprobs if self.logprobs else None


A = TypeVar("A", bound=CallFields)


@dataclass(frozen=True)
class TextOrder:
    """A text that is to be written: its row, and the prompt's text where the answer repeats it.

    ends: ids at which it ends, beside those of the model.
    """

    row: Row
    echo: str | None = None
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Reader:
    """Makes rows of bodies.

    Attributes:
        context: tokens that a row holds. lossless: whether the dense model's text is written.
        scores: whether the engine gives log-probabilities. sparse_from: first sparse position. None: behind a prompt.
    """

    tokenizer: Any
    context: int
    vocab: int
    lossless: bool
    scores: bool = False
    sparse_from: int | None = None

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Facts that decoders need of the tokenizer."""
        return Vocabulary.of(self.tokenizer)

    @functools.cached_property
    def most_characters(self) -> int:
        """A text of more characters has more tokens than the context, since no token stands for more than the longest.

        A tokenizer that leaves characters out could make fewer of it. Such a text is refused all the same.
        """
        return self.context * max(map(len, self.tokenizer.get_vocab()))

    def parse(self, kind: type[A], body: bytes, content_type: str = "application/json") -> A:
        """The fields of a body, counted and checked.

        Raises:
            Refusal: no JSON, more values than any request has, a field that is wrong, or one that this server has not.
        """
        given = self._load(body, content_type)
        given = {name: value for name, value in given.items() if value is not None}  # null asks for nothing
        for name, value in given.items():
            if name in kind.model_fields or name in IGNORED:
                continue
            if not any(value == each and type(value) is type(each) for each in NEUTRAL.get(name, ())):
                raise Refusal(400, f"this server has no {name[:SHOWN]}; leave it out", name[:SHOWN])
        self._count(kind, given)
        try:
            asked = kind.model_validate(given)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False)
            field, said = explain(next((each for each in errors if each["type"] == SPECIFIC), errors[0]), given)
            raise Refusal(400, said, field) from None
        except RecursionError:
            raise Refusal(400, "the body is nested too deeply") from None
        self._check(asked)
        return asked

    def _load(self, body: bytes, content_type: str) -> dict[str, Any]:
        kind = content_type.partition(";")[0].strip().lower()
        if body and kind and not kind.endswith(("/json", "+json")):
            raise Refusal(400, "the body is not marked as JSON; send the header Content-Type: application/json")
        if not body:
            raise Refusal(400, "the body must be a JSON object")
        most = 1000 + VALUES_A_TOKEN * self.context
        if 1 + _marks(body) > most and _has_more_values(body, most):
            raise Refusal(400, f"the body has more than {most} values, which no request has; send fewer")
        try:
            given = json.loads(body, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            said = f"the body must be JSON: {error.msg.lower().removesuffix(' at')} at character {error.pos}"
            raise Refusal(400, said) from None
        except UnicodeDecodeError:
            raise Refusal(400, "the body must be JSON in UTF-8") from None
        except RecursionError:
            raise Refusal(400, "the body must be JSON, and this one is nested too deeply") from None
        except ValueError as error:  # a constant of ours, or a number of thousands of digits
            said = str(error) if str(error).startswith("the body") else "the body has a number of too many digits"
            raise Refusal(400, said) from None
        if not isinstance(given, dict):
            raise Refusal(400, f"the body must be a JSON object, got {_shown(given)}")
        return given

    def _count(self, kind: type[CallFields], given: Mapping[str, Any]) -> None:
        """Refuse what is longer than any context before its parts are looked at."""
        messages = given.get("messages")
        if kind is Chat and isinstance(messages, list) and len(messages) > self.context:
            said = f"{len(messages)} messages have more tokens than the context of {self.context}; send fewer"
            raise Refusal(400, said, "messages", "context_length_exceeded")
        if kind is Completion and "prompt" in given:
            self._check_prompts(given["prompt"], given)

    def _check_prompts(self, prompt: Any, given: Mapping[str, Any]) -> None:
        wrong = Refusal(400, f"prompt must be {KINDS['prompt']}, got {_shown(prompt)}", "prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if len(prompts) > MOST_CHOICES:
            raise Refusal(400, f"at most {MOST_CHOICES} choices a request, got {len(prompts)}", "prompt")
        for each in prompts:
            if isinstance(each, str):
                self._check_length(len(each), "prompt")
                if half := SURROGATE.search(each):
                    said = ascii(half[0]).strip("'")
                    raise Refusal(400, f"prompt has {said}, half of a character; send whole ones", "prompt")
            elif isinstance(each, list):
                if len(each) > self.context:
                    raise Refusal(
                        400,
                        f"the prompt's {len(each)} tokens do not fit the context of {self.context}; shorten the prompt",
                        "prompt",
                        "context_length_exceeded",
                    )
                if any(type(token) is not int for token in each):
                    raise wrong
            else:
                raise wrong

    def _check_length(self, characters: int, name: str) -> None:
        if characters > self.most_characters:
            raise Refusal(
                400,
                f"{name} has {characters} characters, and the context of {self.context} tokens holds at most"
                f" {self.most_characters}; shorten {name}",
                name,
                "context_length_exceeded",
            )

    def _check(self, asked: CallFields) -> None:
        """Refuse what fields mean together, or what this server's engine cannot do."""
        if isinstance(asked, Completion):
            if asked.best_of not in (None, asked.n):
                said = f"best_of must be n, here {asked.n}, got {asked.best_of}; this server ranks no texts"
                raise Refusal(400, said, "best_of")
            if len(asked.prompts) * asked.n > MOST_CHOICES:
                said = f"at most {MOST_CHOICES} choices a request, got {len(asked.prompts) * asked.n}"
                raise Refusal(400, said, "n")
        if isinstance(asked, Chat):
            self._check_length(sum(len(message.content) for message in asked.messages), "messages")
            if asked.top_logprobs and not asked.logprobs:
                raise Refusal(400, "top_logprobs needs logprobs=true; send both", "top_logprobs")
        if asked.top is not None and not self.scores:
            kind = "a lossless server" if self.lossless else "this server's engine"
            raise Refusal(400, f"{kind} gives no log-probabilities; leave logprobs out", "logprobs")
        try:
            penalised = asked.sampling().penalised
        except UserError as error:
            raise Refusal(400, str(error)) from None
        if self.lossless and penalised:
            raise Refusal(400, "this server is lossless, which has no penalties; leave them out")

    def count(self, asked: CallFields) -> int:
        """Texts that are asked for."""
        return asked.n * (len(asked.prompts) if isinstance(asked, Completion) else 1)

    def completion(self, asked: Completion) -> list[TextOrder]:
        """The texts of a completion, choice after choice. A prompt is looked at before the next one is tokenised.

        Raises:
            Refusal: an empty prompt, an id outside the vocabulary, too many tokens.
        """
        new, found = 16 if asked.max_tokens is None else asked.max_tokens, []
        for prompt in asked.prompts:
            ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
            rows = self._rows(asked, ids, new, "prompt", asked.echo)
            echo = None
            if asked.echo:
                echo = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, skip_special_tokens=True)
            found += [TextOrder(row, echo, frozenset(asked.stop_token_ids)) for row in rows]
        return found

    def chat(self, asked: Chat) -> list[TextOrder]:
        """The texts of a chat. They end at the tokenizer's end token too, and where its template ends an answer.

        Raises:
            Refusal: a tokenizer without a chat template, too many tokens.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal(400, "this model's tokenizer has no chat template; use /v1/completions", "messages")
        text = self._rendered([_as_templates_know(message) for message in asked.messages], True)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        most = asked.max_completion_tokens or asked.max_tokens or max(1, self.context - len(ids))
        ends = {*asked.stop_token_ids, *self._end_of_turn()} | {self.tokenizer.eos_token_id} - {None}
        return [TextOrder(row, None, frozenset(ends)) for row in self._rows(asked, ids, most, "messages", False)]

    def _rendered(self, messages: Sequence[Mapping[str, str]], asks: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
        except Exception as error:  # a template raises whatever its author chose
            raise Refusal(400, f"the chat template refuses these messages: {first_line(error)}", "messages") from None

    def _end_of_turn(self) -> set[int]:
        """The token that a template writes behind an answer, if it writes one there."""
        answer = "an answer of four words"
        try:
            turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
            behind = self._rendered(turns, False).rpartition(answer)[2].lstrip()
        except Refusal:
            return set()
        names = {str(added): token for token, added in self.tokenizer.added_tokens_decoder.items()}
        found = max((name for name in names if name and behind.startswith(name)), key=len, default=None)
        return set() if found is None else {names[found]}

    def _rows(self, asked: CallFields, ids: list[int], new: int, name: str, echo: bool) -> list[Row]:
        if not ids:
            raise Refusal(400, f"{name} has no tokens; give at least one", name)
        if not 0 <= min(ids) <= max(ids) < self.vocab:
            raise Refusal(
                400, f"token ids must lie in 0 to {self.vocab - 1}, got {_shown(min(ids))} to {_shown(max(ids))}", name
            )
        if len(ids) + new > self.context:
            raise Refusal(
                400,
                f"the prompt's {len(ids)} tokens and {new} new ones do not fit the context of {self.context};"
                " shorten the prompt or max_tokens",
                name,
                "context_length_exceeded",
            )
        if asked.min_tokens > new:
            said = f"min_tokens must be at most max_tokens, here {new}, got {asked.min_tokens}; raise max_tokens"
            raise Refusal(400, said, "min_tokens")
        sampling = asked.sampling()
        start = len(ids) if self.sparse_from is None else self.sparse_from
        total, scored, top = len(ids) + new, None, 0
        if asked.top is not None:
            scored, top = 1 if echo else len(ids), asked.top
        prefilled = min(start, len(ids), total - 1)  # the last token of all is only written
        least = len(ids) + asked.min_tokens
        return [Row(ids, total, sampling, start, prefilled, least, i, scored, top) for i in range(asked.n)]


def _as_templates_know(message: Message) -> dict[str, str]:
    """A message for a chat template. OpenAI's developers say what templates call the system's."""
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def _marks(part: bytes) -> int:
    """How many values a part of a body begins at most."""
    return part.count(b",") + part.count(b"[") + part.count(b"{")


def _has_more_values(body: bytes, most: int) -> bool:
    """Whether a body has more than ``most`` values, by the marks outside of its texts."""
    count, end = 1, 0
    for texts, found in enumerate(STRING.finditer(body)):
        count, end = count + _marks(body[end : found.start()]), found.end()
        if count > most or texts > 2 * most:  # a key and a value have one mark, and texts in a row are no JSON
            return True
    return count + _marks(body[end:]) > most


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the body must be JSON, which has no {name}")
