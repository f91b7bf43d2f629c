"""The model ``dejavu`` of lm-evaluation-harness: a sparse model on any of its backends, the decode engine included.

It is the harness's ``HFLM``, which takes any model of transformers. Added is where a continuation begins, which
``sparse_from="prompt"`` needs. Requests whose continuations begin at one position are asked together, so the logits of
contexts are not computed either.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string
from torch import Tensor
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import PREDICTORS_FOLDER
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import Progress
from dejavu_train.models.finite import FiniteLogits, check_logits
from dejavu_train.models.hub import model_folder
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.sparse.model import SparseCausalLM
from dejavu_train.sparse.runtime import ENGINES

DENSE = "dense"
# Of a batch, with batch_size=auto. On a CPU more than this leaves the caches, and short rows are padded for nothing.
POSITIONS_AT_ONCE = {"cpu": 1024, "cuda": 8192}

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""Request of lm-eval: the strings (the key of its cache), the context's tokens, the continuation's tokens."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model by its names: ``--model_args pretrained=FOLDER,predictors=BUNDLE,mlp_density=0.1,head_density=0.85``.

    Attributes:
        pretrained: folder or hub id of an OPT.
        predictors: folder or hub id of a bundle. None: the folder ``predictors`` beside the model.
        backend: ``dense`` (no predictors), ``auto``, ``mask``, ``gather``, ``triton`` or ``cpu``.
        mlp_density, head_density: means over the layers. None: as the bundle was calibrated.
        lossless: tasks that generate get the dense model's own text, drafted by an engine.
        sparse_from, batch_size, max_length: as of :class:`DejavuLM`.
        max_batch_size: given by lm-eval, without effect.
    """

    pretrained: str
    predictors: str | None = None
    backend: str = "auto"
    mlp_density: float | None = None
    head_density: float | None = None
    sparse_from: str | int = "prompt"
    lossless: bool = False
    dtype: str = "float32"
    device: str | None = None
    revision: str | None = None
    batch_size: int | str = "auto"
    max_batch_size: int | None = None
    max_length: int | None = None


@register_model("dejavu")
class DejavuLM(HFLM):
    """A model in memory, or :meth:`load` reads one.

    Args:
        model: dense or sparse, on its device.
        sparse_from: ``prompt``: contexts are dense and continuations sparse, as in decoding, or a position (0: all).
        batch_size: rows, or ``auto``: as many as make 8,192 positions, 1,024 on a CPU.
        max_length: of a window, None for as many as the model has positions.
        identity: what names the model and its selection, for lm-eval's results and caches.
        lossless: what is generated is the dense model's own text, a row at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        sparse_from: str | int = "prompt",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        identity: Mapping[str, Any] | None = None,
        lossless: bool = False,
    ) -> None:
        self.sparse_from, self.lossless = sparse_from, lossless
        self.identity = dict(identity or {"model": model.name_or_path, "sparse_from": sparse_from})
        logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns of a model in memory
        self.by_positions, self.kept, self.written = str(batch_size).startswith("auto"), 0, list[int]()
        window = max_length or dims_of(model.config).max_positions  # HFLM knows no sliding windows, and not BLOOM's key
        rows = POSITIONS_AT_ONCE[model.device.type] // window if self.by_positions else int(batch_size)
        super().__init__(
            pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=1 if lossless else max(1, rows),
            max_length=window, softmax_dtype="float32",
        )  # fmt: skip

    @classmethod
    def load(cls, asked: ModelSpec) -> "DejavuLM":
        """The model that is asked for.

        Raises:
            UserError: no such model or bundle, a bundle of other weights, a density or backend that does not exist.
        """
        name, revision, device = asked.pretrained, asked.revision, resolve_device(asked.device or "auto")
        tokenizer = load_tokenizer(name, revision)
        identity: dict[str, Any] = {"model": name, "backend": asked.backend, "sparse_from": asked.sparse_from}
        identity["weight_hash"] = weight_hash(name, revision=revision)
        if asked.backend == DENSE:
            model = load_model(name, asked.dtype, device, revision=revision)
        else:
            beside = model_folder(name, revision=revision) / PREDICTORS_FOLDER
            bundle = Bundle.from_pretrained(asked.predictors or beside).at(asked.mlp_density, asked.head_density)
            settings = (asked.backend, asked.sparse_from, asked.dtype, device)
            model = SparseCausalLM.from_pretrained(name, bundle, *settings, revision=revision)
            identity |= {target: bundle.mean_density(target) for target in bundle.targets}
            identity["bundle"] = bundle.digest()
            identity |= {"lossless": True} if asked.lossless else {}
        lossless = asked.lossless and asked.backend != DENSE
        return cls(model, tokenizer, asked.sparse_from, asked.batch_size, asked.max_length, identity, lossless)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Any = None) -> "DejavuLM":
        """As lm-eval makes a model: ``arg_dict`` are the ``--model_args``, ``additional_config`` its own flags."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls.load(ModelSpec(**arg_dict, **flags))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> "DejavuLM":
        """The same for ``--model_args`` as text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """Facts that lm-eval writes into its results."""
        return {
            **self.identity,
            "model_dtype": str(self.model.dtype),
            "model_num_parameters": self.model.num_parameters(),
        }

    def use(self, model: PreTrainedModel) -> None:
        """Answer with another model of the same tokenizer, on the same device."""
        self._model = model

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As HFLM, but a text stands behind one ``</s>``: HFLM scores the tokenizer's own behind another one."""
        attributes: Any = vars(self)
        before, attributes["add_bos_token"] = attributes["add_bos_token"], False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            attributes["add_bos_token"] = before

    def count_tokens(self, text: str) -> int:
        """How many tokens ``loglikelihood_rolling`` scores of a text."""
        return len(self.tok_encode(text, add_special_tokens=False))

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """As HFLM, in turn for the requests whose continuations begin at one position.

        Raises:
            UserError: a continuation that is longer than the model.
        """
        by_start: dict[int, list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens exceeds the model's {self.max_length} positions;"
                    " leave out the task that asks for it"
                )
            start = min(len(context), self.max_length + 1 - len(continuation))  # HFLM cuts contexts at their beginning
            by_start.setdefault(start, []).append(i)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        rows = self.batch_size
        shown = contextlib.nullcontext() if disable_tqdm else Progress("log-likelihoods", len(requests), "request")
        with shown as bar:
            for start, numbers in sorted(by_start.items(), reverse=True):
                asked = [requests[i] for i in numbers]
                longest = start + max(len(continuation) for *_, continuation in asked) - 1
                if self.by_positions:
                    self.batch_size_per_gpu = max(1, POSITIONS_AT_ONCE[self.device.type] // longest)
                if isinstance(self.model, SparseCausalLM):
                    self.model.sparse_from = start if self.sparse_from == "prompt" else self.sparse_from
                self.kept = start - 1  # columns whose logits nobody asks for
                try:
                    found = super()._loglikelihood_tokens(asked, disable_tqdm=True)
                finally:
                    self.batch_size_per_gpu = rows
                for i, answer in zip(numbers, found, strict=True):
                    answers[i] = answer
                if bar is not None:
                    bar.update(len(numbers))
        return answers

    @torch.no_grad()
    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits of the columns that predict continuations, (B, T - kept, V)."""
        logits = self.model(inps, logits_to_keep=inps.shape[1] - self.kept).logits
        check_logits(logits, self.model, inps)
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """As HFLM, which cuts off what stands behind a stop string. ``written`` has the tokens of every call."""
        if isinstance(self.model, SparseCausalLM):
            self.model.sparse_from = self.sparse_from
            settings = {**settings, "lossless": self.lossless}
        else:
            settings = {**settings, "logits_processor": [FiniteLogits(self.model)]}
        if getattr(self.model, "backend", None) in ENGINES:
            greedy = {} if settings.get("do_sample") else {"do_sample": False, "temperature": None}
            stops = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
            settings |= greedy | stops | {"pad_token_id": self.tokenizer.pad_token_id}
            out = self.model.generate(input_ids=context, max_length=max_length, **settings)
        else:
            out = super()._model_generate(context, max_length, stop, **settings)
        self.written += [out.shape[1] - context.shape[1]]
        return out
