"""The model that evidence is about, with its bundle, texts and twin in 4 bits. Each is loaded when first needed."""

import dataclasses
import logging
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import Document
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.perplexity import EvalCorpus, hold_out
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import load_text, trained_text
from dejavu_train.extras.evidence.config import EvidenceConfig
from dejavu_train.extras.evidence.records import Records
from dejavu_train.extras.survey.speed import Machine, this_machine
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.models.weight_format import CODES4
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise

logger = logging.getLogger(__name__)
TRIAL = 1024  # rows and columns of the product that is timed
QUESTIONS = "questions"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of this machine for one model.

    Attributes:
        step: seconds of a dense decoding step of one row. token: of one token in a long forward pass.
        load: seconds of loading the model. weights: bytes of it in memory.
    """

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
        self.records = Records(config.local, config.limit)
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

    def _four_bit_folder(self) -> Path:
        if self.config.four_bits:
            return Path(self.config.four_bits)
        folder = Path(self.config.output) / f"int4-{self.hash[:12]}"
        if not (folder / "config.json").is_file():
            own = QuantizeConfig(model=self.config.model, revision=self.config.revision, output=str(folder))
            own = dataclasses.replace(own, device=self.config.device, window=min(512, self.dims.max_positions))
            own.check(self.dims)
            quantise(own)
        return folder

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
        wanted = config.sets if config.local or "generation" in config.parts else ()
        asked = [text for each in wanted for text in self.records.questions(each)]
        documents = [Document(str(number), text) for number, text in enumerate(asked)]
        questions = hold_out(documents, self.tokenizer, window, config.tokens, config.seed)
        if questions.tokens >= window - 1:
            made[QUESTIONS] = questions
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

    @property
    def code_bytes(self) -> float:
        """Bytes of the twin in 4 bits that is made. 0 where one is given, or none can be made."""
        try:
            unit = CODES4.unit_bytes(self.dims)
        except UserError:  # its cells say why
            return 0.0
        layers = sum(unit.dense(self.dims, key.target) for key in self.dims.keys)
        return 0.0 if self.config.four_bits else layers + 2.0 * self.dims.outer_weights

    def key(self) -> dict[str, Any]:
        """Hashes and types that all rows depend on."""
        bundle = None if self.bundle is None else self.bundle.digest()
        return {"model": self.hash, "bundle": bundle, "dtype": self.dtype, "device": self.device.type}
