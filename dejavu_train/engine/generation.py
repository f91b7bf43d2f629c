"""``generate()`` of transformers on a decode engine: arguments in, padded tokens and streams out."""

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.draft import Draft, check_alone
from dejavu_train.engine.lossless import Acceptance
from dejavu_train.engine.request import Request, check_arguments, read_request, stop_strings
from dejavu_train.engine.turns import Turns
from dejavu_train.families import dims_of
from dejavu_train.families.plain import NotPlain, check_calls
from dejavu_train.ground.errors import Unsupported

LEAST_CONTEXT = 256


class EnginePool(ABC):
    """Engines of one model and bundle behind ``generate()``, which share their weights.

    There is one a number of rows, each as long as the longest that was asked for so far.

    Args:
        model: not kept alive.
    Attributes:
        max_rows: of an engine.
        turns: held from the first token of a call to its last.
        acceptance: of the last lossless call, or None.
    Raises:
        NotPlain: a module that must be called.
    """

    max_rows: int

    def __init__(self, model: Any, bundle: Bundle) -> None:
        check_calls(model)
        self._model, self.bundle = weakref.ref(model), bundle
        self._weights: Any = None
        self.shape, self.device = dims_of(model.config), model.device
        self.engines: dict[int, Any] = {}
        self.turns = Turns(Unsupported)
        self.acceptance: Acceptance | None = None

    @abstractmethod
    def _read(self, model: Any) -> Any:
        """The model's weights in the layout of the engines."""

    @abstractmethod
    def _build(self, batch: int, context: int) -> Any:
        """An engine."""

    @property
    def weights(self) -> Any:
        """Laid out when they are first needed: until then the model's modules are transformers' own.

        Raises:
            Unsupported: a module that must be called.
        """
        if self._weights is None:
            model = self._model()
            assert model is not None, "the model that owns this pool is alive"
            try:
                self._weights = self._read(model)
            except NotPlain as refusal:
                raise Unsupported(refusal.what) from None
        return self._weights

    @property
    def laid_out(self) -> bool:
        """Whether weights were read by now."""
        return self._weights is not None

    def engine(self, rows: int, tokens: int) -> Any:
        """An engine for at least so many rows of so many tokens. The model's limit is the most."""
        tokens = min(tokens, self.shape.max_positions)
        batch = 1 << (rows - 1).bit_length()
        held = self.engines.get(batch)
        if held is not None and held.context >= tokens:
            return held
        held = None  # its caches make room for those of the next one
        self.engines.pop(batch, None)
        context = min(self.shape.max_positions, max(LEAST_CONTEXT, 1 << (tokens - 1).bit_length()))
        self.engines[batch] = self._build(batch, max(context, 2))
        return self.engines[batch]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within it the engines belong to the caller, and autocast changes nothing."""
        with self.turns, torch.autocast(self.device.type, enabled=False):
            yield

    def generate(
        self,
        model: Any,
        inputs: Tensor | None,
        generation_config: Any,
        kwargs: dict[str, Any],
        sparse_from: int | Tensor | str,
        draft: Draft | None = None,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """``model.generate(inputs, generation_config, **kwargs)`` through an engine.

        Args:
            draft: of lossless decoding, whose prompts are dense whatever ``sparse_from`` says.
        Raises:
            Unsupported: what the engine does not do. Nothing is decoded then.
            UserError: under lossless, several sequences, or an engine without verification.
        """
        kwargs = dict(kwargs)
        streamer = kwargs.pop("streamer", None)
        given = (generation_config, model.generation_config)
        default_length = kwargs.get("max_length") is None and all(c is None or c.max_length is None for c in given)
        config, rest = model._prepare_generation_config(generation_config, **kwargs)
        check_arguments(rest)
        ids = inputs if inputs is not None else rest.get("input_ids")
        if ids is None:  # as transformers does: from the start token
            ids = torch.tensor([[config.bos_token_id]])
        mask, limit = rest.get("attention_mask"), self.shape.max_positions
        with self.turn():
            request = read_request(ids, mask, config, default_length, limit, sparse_from, streamer, self.max_rows)
            request = dataclasses.replace(request, ended=stop_strings(config, rest.get("tokenizer")))
            if draft is not None:
                check_alone(len(request.prompts))
                request = dataclasses.replace(request, sparse_from=None, draft=draft)
            engine = self.engine(len(request.prompts), max(map(len, request.prompts)) + request.max_new_tokens)
            known = ids.repeat_interleave(len(request.prompts) // len(ids), dim=0)
            if streamer is not None:  # behind all that can be refused: another backend would show the prompt again
                streamer.put(known.cpu())
            new = run(engine, request).to(known.device)
            self.acceptance = None if draft is None else engine.acceptance
        sequences = torch.cat([known, new], dim=1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def run(engine: Any, request: Request) -> Tensor:
    """The continuation of every row: (rows, longest) token ids on the CPU, filled up with the padding token."""
    n = len(request.prompts)
    stream = None
    if request.streamer is not None:
        stream = Stream(request.streamer, n, request.pad_token, request.stop_tokens)
    held = [list(prompt) for prompt in request.prompts]

    def hear(row: int, token: int) -> bool:
        ended = False
        if request.ended is not None:
            held[row].append(token)
            ended = bool(request.ended(torch.tensor([held[row]]), None))
        if stream is not None:
            stream.add(row, token, ended)
        return ended

    rows = engine.generate(
        request.prompts,
        request.max_new_tokens,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens,
        sparse_from=request.sparse_from,
        callback=None if stream is None and request.ended is None else hear,
        min_new_tokens=request.min_new_tokens,
        lossless=request.draft or False,
    )
    if stream is not None:
        stream.end()
    tokens = torch.full((n, max(map(len, rows))), request.pad_token, dtype=torch.long)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = torch.tensor(row)
    return tokens


class Stream:
    """Gives a streamer of transformers the tokens (B,) of one position after the other, padding behind a row's end.

    Args:
        stop_tokens: after which a row ends.
    """

    def __init__(self, streamer: Any, rows: int, pad_token: int, stop_tokens: Sequence[int]) -> None:
        self.streamer, self.pad_token, self.stop_tokens = streamer, pad_token, frozenset(stop_tokens)
        self.waiting: list[list[int]] = [[] for _ in range(rows)]
        self.ended = [False] * rows

    def add(self, row: int, token: int, ended: bool = False) -> None:
        """A new token of a row. Rows may run ahead of others that have longer prompts. ended: it is the row's last."""
        self.waiting[row].append(token)
        self.ended[row] = ended or token in self.stop_tokens
        while any(self.waiting) and all(tokens or over for tokens, over in zip(self.waiting, self.ended, strict=True)):
            self._put()

    def _put(self) -> None:
        self.streamer.put(torch.tensor([tokens.pop(0) if tokens else self.pad_token for tokens in self.waiting]))

    def end(self) -> None:
        """All rows are over."""
        while any(self.waiting):
            self._put()
        self.streamer.end()
