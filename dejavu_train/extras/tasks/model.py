"""The model ``dejavu`` of lm-evaluation-harness: a sparse OPT on any of its backends, the decode engine included.

Built on the harness's ``HFLM``: tokens, windows of long texts, generation, cutting at stop strings and the cache of
answers are its own. Scoring is ours, because ``sparse_from="prompt"`` needs to know where a continuation begins, and
because only a continuation's logits are requested.

Letters: K positions whose logits are requested, V vocabulary.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import PREDICTORS_FOLDER
from dejavu_train.extras.tasks.packing import Row, build_rows, pack
from dejavu_train.families import dims_of
from dejavu_train.families.dims import Positions
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.progress import Progress
from dejavu_train.models.finite import FiniteLogits, check_logits
from dejavu_train.models.hub import model_folder
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device, weight_hash
from dejavu_train.sparse.model import SparseCausalLM
from dejavu_train.sparse.runtime import ENGINES

DENSE = "dense"
# Of a batch, with batch_size=auto. On a CPU more than this leaves the caches, and short rows are padded for nothing.
POSITIONS_AT_ONCE = {"cpu": 1024, "cuda": 8192}

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""What lm-eval asks for: the strings (the key of its cache), the context's tokens, the continuation's tokens."""


@dataclasses.dataclass(frozen=True)
class Asked:
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
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        sparse_from: str | int = "prompt",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.sparse_from, self.lossless = sparse_from, False
        self.encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self.identity = dict(identity or {"model": model.name_or_path, "sparse_from": sparse_from})
        logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns of a model in memory
        self.by_positions = str(batch_size).startswith("auto")
        rows = 1 if self.by_positions else int(batch_size)
        window = max_length or dims_of(model.config).max_positions  # HFLM knows no sliding windows, and not BLOOM's key
        super().__init__(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=rows, max_length=window)
        if self.by_positions:  # of whole windows and of generation
            self.batch_size_per_gpu = max(1, self.positions_at_once // self.max_length)

    @classmethod
    def load(cls, asked: Asked) -> "DejavuLM":
        """The model that is asked for.

        Raises:
            UserError: no such model or bundle, a bundle of other weights, a density or backend that does not exist.
        """
        name, revision, device = asked.pretrained, asked.revision, resolve_device(asked.device or "auto")
        tokenizer = load_tokenizer(name, revision)
        identity: dict[str, Any] = {"model": name, "backend": asked.backend, "sparse_from": asked.sparse_from}
        identity["weight_hash"] = weight_hash(name, revision=revision)
        if asked.backend == DENSE:
            model = load_opt(name, asked.dtype, device, revision=revision)
        else:
            beside = model_folder(name, revision=revision) / PREDICTORS_FOLDER
            bundle = Bundle.from_pretrained(asked.predictors or beside).at(asked.mlp_density, asked.head_density)
            settings = (asked.backend, asked.sparse_from, asked.dtype, device)
            model = SparseCausalLM.from_pretrained(name, bundle, *settings, revision=revision)
            identity |= {target: bundle.mean_density(target) for target in bundle.targets}
            identity["bundle"] = bundle.digest()
            identity |= {"lossless": True} if asked.lossless else {}
        made = cls(model, tokenizer, asked.sparse_from, asked.batch_size, asked.max_length, identity)
        made.lossless = asked.lossless and asked.backend != DENSE
        return made

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Any = None) -> "DejavuLM":
        """As lm-eval makes a model: ``arg_dict`` are the ``--model_args``, ``additional_config`` its own flags."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls.load(Asked(**arg_dict, **flags))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> "DejavuLM":
        """The same for ``--model_args`` as text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def positions_at_once(self) -> int:
        """Of a batch whose size was left to us."""
        return POSITIONS_AT_ONCE[self.device.type]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        return {
            **self.identity,
            "model_dtype": str(self.model.dtype),
            "model_num_parameters": self.model.num_parameters(),
        }

    def use(self, model: PreTrainedModel) -> None:
        """Answer with another model of the same tokenizer, on the same device."""
        self._model = model

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As HFLM. Kept in ``encoded``, because several models of one tokenizer are asked the same."""
        pair = (context, continuation)
        if pair not in self.encoded:
            self.encoded[pair] = super()._encode_pair(context, continuation)
        return self.encoded[pair]

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
        self, requests: list[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """For each request the summed log-probability of its continuation, and whether each token is the greedy one.

        Requests of one context share a row, see :mod:`packing`. Contexts too long for the model lose their beginning.
        """
        for _, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens exceeds the model's {self.max_length} positions;"
                    " leave out the task that asks for it"
                )
        waiting = build_rows([request[1:] for request in requests], self.max_length, shared=self._shares_contexts)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        shown = contextlib.nullcontext() if disable_tqdm else Progress("log-likelihoods", len(requests), "request")
        with shown as bar:
            while waiting:
                fitting = max(1, self.positions_at_once // len(waiting[0]))
                n = override_bs or (fitting if self.by_positions else self.batch_size)
                batch, waiting = waiting[:n], waiting[n:]
                for i, answer in self._scores(batch, requests):
                    answers[i] = answer
                    key = requests[i][0]
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                    if bar is not None:
                        bar.update()
        return answers

    @property
    def _shares_contexts(self) -> bool:
        """Whether a forward pass takes a mask that is more than padding. ALiBi counts its positions off the mask."""
        whole_sequences = getattr(self.model, "backend", "mask") == "mask"
        return whole_sequences and dims_of(self.model.config).positions != Positions.ALIBI

    @torch.no_grad()
    def _scores(self, rows: list[Row], requests: list[Scored]) -> list[tuple[int, tuple[float, bool]]]:
        """Of a batch, the number and the answer of every request. One transfer from the device for all of them."""
        packed = pack(rows, self.tokenizer.pad_token_id)
        if isinstance(self.model, SparseCausalLM):
            starts = torch.tensor([row.start for row in rows])
            self.model.sparse_from = starts if self.sparse_from == "prompt" else self.sparse_from
        asked = {"input_ids": packed.ids, "attention_mask": packed.attention_mask, "logits_to_keep": packed.columns}
        if packed.position_ids is not None:
            asked["position_ids"] = packed.position_ids
        logits = self.model(**{name: tensor.to(self.device) for name, tensor in asked.items()}).logits
        place = {column: i for i, column in enumerate(packed.columns.tolist())}
        answered: list[int] = []
        taken: list[tuple[int, int, int, int]] = []  # row, place of the column, target, number in `answered`
        for b, row in enumerate(rows):
            for columns, numbers in zip(row.columns().values(), row.branches.values(), strict=True):
                for i in numbers:
                    for column, target in zip(columns, requests[i][2], strict=True):
                        taken.append((b, place[column], target, len(answered)))
                    answered.append(i)
        b_, c_, targets, owners = torch.tensor(taken, device=logits.device).T
        chosen = logits[b_, c_].float()
        check_logits(chosen, self.model, packed.ids)
        token_nats = chosen.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
        zeros = torch.zeros(len(answered), dtype=torch.float64, device=logits.device)
        nats = zeros.index_add(0, owners, token_nats).tolist()
        wrong = zeros.index_add(0, owners, (chosen.argmax(-1) != targets).double()).tolist()
        return [(i, (nats[n], wrong[n] == 0)) for n, i in enumerate(answered)]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """As HFLM. An engine goes on behind a stop string, which HFLM cuts off. Lossless rows come in turn."""
        if isinstance(self.model, SparseCausalLM):
            self.model.sparse_from = self.sparse_from
            settings = {**settings, "lossless": self.lossless}
        else:
            settings = {**settings, "logits_processor": [FiniteLogits(self.model)]}
        if getattr(self.model, "backend", None) not in ENGINES:
            return super()._model_generate(context, max_length, stop, **settings)
        if not settings.get("do_sample"):
            settings = {**settings, "do_sample": False, "temperature": None}
        settings |= {"pad_token_id": self.tokenizer.pad_token_id}
        if not self.lossless:
            return self.model.generate(input_ids=context, max_length=max_length, **settings)
        shown = settings.pop("attention_mask", torch.ones_like(context)).bool()
        new = max_length - context.shape[1]
        rows = [
            self.model.generate(input_ids=ids[mask][None], max_new_tokens=new, **settings)[0, int(mask.sum()) :]
            for ids, mask in zip(context, shown, strict=True)
        ]
        behind = pad_sequence(rows, batch_first=True, padding_value=settings["pad_token_id"])
        return torch.cat([context, behind.to(context)], dim=1)
