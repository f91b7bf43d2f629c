"""The model that evidence is about, with its bundle, texts and twin in 4 bits. Each is loaded when first needed."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import Document
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.perplexity import EvalCorpus, hold_out
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import load_text, trained_text
from dejavu_train.extras.evidence.config import EvidenceConfig
from dejavu_train.extras.survey.speed import Machine, this_machine
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise

logger = logging.getLogger(__name__)
T = TypeVar("T")
QUANTIZING = 4  # times the forward pass over the calibration text that gptq takes, about
TRIAL = 1024  # rows and columns of the product that is timed
QUESTIONS, RETRIEVAL = "questions", "retrieval"
HAYSTACKS = 100  # of a length, where no limit is given


class Rates(NamedTuple):
    """Seconds of a dense step of one row, of a token in a long pass and of loading a model. Bytes of its weights."""

    step: float
    token: float
    load: float
    weights: float


class Subject:
    """A model on a device.

    Raises:
        UserError: no such model or device, a bundle of other weights.
    """

    def __init__(self, config: EvidenceConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.dims = read_dims(config.model, config.revision)
        self.hash = weight_hash(config.model, revision=config.revision)
        self.bundle: Bundle | None = None
        if config.bundle:
            self.bundle = Bundle.from_pretrained(config.bundle)
            self.bundle.check_model(config.model, config.revision)
        self.tokenizer = load_tokenizer(config.model, config.revision)
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        self.unreachable = "HF_HUB_OFFLINE is set" if offline else ""
        self._sets: dict[str, Any] = {}
        on_cpu = self.device.type == "cpu"
        self.dtype = ("float32" if on_cpu else self.dims.half_dtype) if config.dtype == "auto" else config.dtype

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def exact(self) -> Bundle:
        """A bundle without predictors."""
        return Bundle.exact(self.config.model, self.dims, self.hash)

    @cached_property
    def dense(self) -> PreTrainedModel:
        """The dense model."""
        return load_model(self.config.model, self.dtype, self.device, revision=self.config.revision)

    @cached_property
    def four_bits(self) -> PreTrainedModel:
        """Its twin in 4 bits. Raises UserError where none can be made."""
        return load_model(str(self._four_bit_folder()), self.dtype, self.device)

    @cached_property
    def smaller(self) -> PreTrainedModel:
        """The smaller model. Raises UserError where it has another vocabulary."""
        name, own = self.config.smaller, self.dims.vocab_size
        if (words := read_dims(name).vocab_size) != own:
            raise UserError(f"--smaller {name} has {words:,} words instead of {own:,}; name one of the same tokenizer")
        return load_model(name, self.dtype, self.device)

    @property
    def _quantizing(self) -> QuantizeConfig:
        config, folder = self.config, Path(self.config.output) / f"int4-{self.hash[:12]}"
        window = min(512, self.dims.max_positions)
        return QuantizeConfig(config.model, config.revision, str(folder), device=config.device, window=window)

    def _four_bit_folder(self) -> Path:
        if self.config.four_bits:
            return Path(self.config.four_bits)
        if self.quantizing_seconds:
            self._quantizing.check(self.dims)
            quantise(self._quantizing)
        return Path(self._quantizing.output)

    @property
    def quantizing_seconds(self) -> float:
        """Seconds that making the twin in 4 bits takes, about. 0 where there is one."""
        done = self.config.four_bits or (Path(self._quantizing.output) / "config.json").is_file()
        return 0.0 if done else QUANTIZING * self._quantizing.calibration_tokens(self.dims) * self.rates.token

    @cached_property
    def texts(self) -> dict[str, EvalCorpus]:
        """By name the texts that are asked for, and the questions of the sets, which are one more.

        Raises:
            UserError: a text that cannot be read, or has less than one window.
        """
        config, made = self.config, dict[str, EvalCorpus]()
        window = min(config.window, self.dims.max_positions)
        trained: dict[str, Any] = trained_text(self.bundle, config.bundle) if self.bundle else {}
        for name, source in name_texts(config.text).items():
            options = (TEXT_SET, config.model, trained, self.tokenizer, window, config.tokens, config.seed)
            made[name] = load_text(name, config.source(source), *options).held
        asked = self._all_questions() if config.local or "generation" in config.parts else []
        documents = [Document(str(number), text) for number, text in enumerate(asked)]
        questions = hold_out(documents, self.tokenizer, window, config.tokens, config.seed)
        if questions.tokens >= window - 1:
            made[QUESTIONS] = questions
        return made

    @property
    def set_names(self) -> list[str]:
        """Sets that are asked for. Retrieval is one for each length."""
        lengths = [f"{RETRIEVAL} {length}" for length in self.config.contexts]
        return [each for name in self.config.sets for each in (lengths if name == RETRIEVAL else [name])]

    def set(self, name: str) -> Any:
        """A set as a task of lm-eval. Raises UserError where it cannot be had, or must be asked for by a flag."""
        from dejavu_train.extras.tasks.sets import haystacks, load_set  # imports lm-eval

        config = self.config
        if name == "humaneval" and not config.run_code:
            raise UserError("it runs programs that the model wrote, in a process with limits; give --run_code true")
        if name not in self._sets and name.startswith(RETRIEVAL):
            length = int(name.split()[1])
            if length > self.dims.max_positions:
                raise UserError(f"the model has {self.dims.max_positions:,} positions")
            made = partial(haystacks, self.tokenizer, length, config.limit or HAYSTACKS, config.seed)
            self._sets[name] = load_set(RETRIEVAL, None, made)
        elif name not in self._sets:
            self._sets[name] = self.local_or_hub(lambda folder: load_set(name, folder))
        return self._sets[name]

    def local_or_hub(self, load: Callable[[str | None], T]) -> T:
        """Result of ``load`` for the local folder, else for the hub (None). Raises UserError where it is nowhere.

        The first failure to reach the hub stands for all that follow.
        """
        beside = ""
        if self.config.local is not None:
            try:
                return load(self.config.local)
            except UserError as error:
                if not str(error).startswith("there is no"):
                    raise
                beside = f"{first_line(error).partition(';')[0]}, and "
        if self.unreachable:
            raise UserError(f"{beside}the hub cannot be reached ({self.unreachable}); give --local a folder with it")
        try:
            return load(None)
        except UserError as error:
            if "cannot fetch" in str(error):
                self.unreachable = first_line(error)
            raise

    def questions(self, name: str) -> list[str]:
        """Texts that a set asks. Raises as :meth:`set`."""
        from dejavu_train.extras.tasks.sets import SETS

        question = SETS[name.split()[0]].needs[0]
        return [doc[question] for doc in list(self.set(name).test_docs())[: self.config.limit]]

    def _all_questions(self) -> list[str]:
        """Questions of all sets that are there. Haystacks are no text."""
        made: list[str] = []
        for name in self.set_names:
            with contextlib.suppress(UserError):
                made += [] if name.startswith(RETRIEVAL) else self.questions(name)
        return made

    @cached_property
    def machine(self) -> Machine:
        """This machine, whose memory is timed in about a second."""
        return this_machine(self.device)

    @cached_property
    def rates(self) -> Rates:
        """Rates by the machine's bandwidth, and by a product of matrices that is timed here."""
        weight = getattr(torch, self.dtype).itemsize
        n_bytes = float(self.dims.weights * weight)
        fixed = self.machine.sparse_layer * self.dims.n_layers
        step = n_bytes / (self.machine.bandwidth * self.machine.reached) + fixed
        return Rates(step, 2 * self.dims.weights / self._flops(), 2 + n_bytes / 2e8, n_bytes)

    def _flops(self) -> float:
        """Operations a second of a product, the best of several."""
        a = torch.ones(TRIAL, TRIAL, device=self.device, dtype=getattr(torch, self.dtype))
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            float((a @ a)[0, 0])
            best = min(best, time.perf_counter() - began)
        return 2 * TRIAL**3 / best

    def key(self) -> dict[str, Any]:
        """Hashes and types that all rows depend on."""
        bundle = None if self.bundle is None else self.bundle.digest()
        return {"model": self.hash, "bundle": bundle, "dtype": self.dtype, "device": self.device.type}
