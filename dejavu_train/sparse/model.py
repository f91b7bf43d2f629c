"""A sparse model that is used as the dense one is: the same signature, ``generate()``, config and device.

Four backends select the same units, but that ``triton`` has no second stage and selects all candidates:

- ``mask``: the dense model with skipped units taken out. Whole sequences, for study.
- ``gather``: reads selected rows only, in plain torch on any device, with everything that transformers' loops do.
- ``triton``: the decode engine, one CUDA graph a token, on a GPU. What it cannot do is refused and names ``gather``.
- ``cpu``: the compiled engine for CPUs, for ``generate()`` of up to 8 rows.

``auto`` takes the engine where it runs here, else ``gather``. A call that the engine refuses then runs through
``gather``, and one logged line says so. ``sparse_from`` is the position from which on a row is sparse: an integer, or
one for each row. ``"prompt"`` is a dense prompt and sparse generation, as in the paper.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import GenerationMixin, OPTForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.families import dims_of
from dejavu_train.families.plain import execution_device
from dejavu_train.ground.errors import UserError
from dejavu_train.models.installed import installed
from dejavu_train.predictors.custom import PredictorClass
from dejavu_train.sparse.cache import SparseCache
from dejavu_train.sparse.call import Call, call_of
from dejavu_train.sparse.current import ModelRuntime
from dejavu_train.sparse.forward import ForwardArguments, Output, forwarded
from dejavu_train.sparse.generation import generated
from dejavu_train.sparse.inputs import SparseFrom, read_sparse_from
from dejavu_train.sparse.loading import adopt, load_together, wrapped_class
from dejavu_train.sparse.runtime import Runtime, Settings, check_bundle_of
from dejavu_train.sparse.saving import UPLOADS, push_together, save_together

logger = logging.getLogger(__name__)

if TYPE_CHECKING:

    class _Dense(PreTrainedModel, GenerationMixin):
        """The dense class that a sparse one is derived from as well."""
else:
    _Dense = object


class SparseCausalLM(_Dense):
    """A model whose blocks use the units that the predictors of a bundle select.

    Make one with :meth:`from_pretrained` or, around a model in memory, :meth:`from_model`. Its class is derived from
    this one and from the dense model's: see :func:`sparse_class`.

    Attributes:
        dense_class: of transformers. None in this class alone, whose models take the class that suits the dense one.
        sparse_from: may be changed between calls.
    """

    dense_class: ClassVar[type[PreTrainedModel] | None] = None

    def __init__(self, config: PreTrainedConfig) -> None:
        """For transformers' own use. A model made this way has no bundle."""
        super().__init__(config)
        self.sparse_from = 0
        self._current = ModelRuntime()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        bundle: Bundle | None = None,
        backend: str = "auto",
        sparse_from: SparseFrom = 0,
        ops: str = "triton",
        guard: Guard | None = None,
        zeros: str = "auto",
        stored: str | None = None,
    ) -> Self:
        """Wrap a dense model. The weights are shared, not copied. The caller knows that the bundle belongs to it.

        ``gather`` and ``triton`` lay some weights of the model out anew, in place. The dense model keeps its values and
        goes on working. Through ``triton`` its q, k and v projections become views of the engine's tensor, see
        ``models/grouped.py``.

        Args:
            bundle: None: no predictors. All units are computed, exactly, and rows of silent neurons are not read.
            ops: of the engine: ``triton``, or ``reference`` for plain torch on any device, slow, for tests.
            guard: decode every N-th token densely and move thresholds, see :class:`Guard`. ``gather`` and ``triton``.
                Its thresholds and measurements are state of the model, and go on from one call to the next. They end
                with :meth:`reset_guard`, :meth:`set_bundle` or a move to another device or dtype.

            zeros: what becomes of rows of neurons that are exactly zero, in layers that select nothing. ``skip`` leaves
                them out, ``read`` reads them. ``auto`` leaves them out where that was measured to be no slower. The
                text is the same.
            stored: how the CPU engine keeps weights: ``float32``, ``float16``, ``bfloat16``, ``int8`` or ``int4``.
                None: the codes of a 4-bit model, else the model's dtype.

        Raises:
            UserError: an unknown backend, one that cannot run here, no guard, or a bundle or backend
                that cannot be guarded. ``skip`` for an activation that makes no neuron zero.
        """
        if not isinstance(guard, Guard | None):
            raise UserError(f"guard must be a Guard or None, got {guard!r}; write guard=Guard(every=64)")
        sparse_from = read_sparse_from(sparse_from)
        dense = wrapped_class(cls, model)
        if bundle is None:
            bundle = Bundle.exact(model.config.name_or_path, dims_of(model.config))
        check_bundle_of(model, bundle)
        sparse = adopt(cls if cls.dense_class is not None else sparse_class(dense), model)
        sparse.sparse_from = sparse_from
        sparse._current = ModelRuntime(
            Settings(backend, ops, guard if guard is not None and guard.every else None, zeros, stored)
        )
        sparse.set_bundle(bundle)
        return sparse.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        predictors: Bundle | str | Path | None = None,
        backend: str = "auto",
        sparse_from: SparseFrom = 0,
        dtype: str | torch.dtype | None = "float32",
        device: str | int | torch.device | None = "cpu",
        device_map: Any = None,
        revision: str | None = None,
        predictor_class: PredictorClass | Mapping[str, PredictorClass] | None = None,
        guard: Guard | None = None,
        torch_dtype: str | torch.dtype | None = None,
        zeros: str = "auto",
        stored: str | None = None,
        **keywords: Any,
    ) -> Any:
        """Load a model and its predictors.

        Args:
            pretrained_model_name_or_path: folder or hub id of a model.
            predictors: a bundle, or where it lies. None: in the model's folder, as :meth:`save_pretrained` leaves it.
                Where there is none, the model runs without predictors, see :meth:`from_model`.
            backend: ``auto``, ``mask``, ``gather``, ``triton`` or ``cpu``.
            sparse_from: first sparse position: one for all rows, (B,) one per row, or ``prompt``: the prompt is dense.
            dtype: ``float32``, ``float16`` or ``bfloat16``, by any name that torch has. ``auto`` or None: as stored.
            device: where the model lies. Ignored when ``device_map`` is given.
            revision: commit or tag of a hub model.
            device_map: as in transformers, for models larger than one GPU.
            predictor_class: as :meth:`Bundle.from_pretrained` takes it, for a bundle with predictors of your own.
            guard, zeros, stored: as in :meth:`from_model`.
            torch_dtype: ``dtype`` by its earlier name in transformers.
            keywords: of transformers, as ``sparse/keywords.py`` lists them: those of the hub, ``subfolder``, ``config``
                and its values, ``attn_implementation`` (of ``mask``), ``max_memory``, ``offload_folder`` and the like.

        Returns:
            The model, with ``output_loading_info=True`` a pair of it and what transformers says of the loading.

        Raises:
            UserError: no such model or bundle, a bundle of other weights or of another tokenizer, a keyword that is
                unknown or refused.
        """
        kind = dtype if torch_dtype is None else torch_dtype
        name = installed(str(pretrained_model_name_or_path))
        loaded = load_together(
            name, predictors, kind, device, device_map, revision, predictor_class, keywords, cls.__name__,
        )  # fmt: skip
        model = cls.from_model(
            loaded.dense, loaded.bundle, backend, sparse_from, guard=guard, zeros=zeros, stored=stored
        )
        if "attn_implementation" in keywords and model.backend != "mask":
            logger.warning("attn_implementation is of the backend mask; %s computes attention itself", model.backend)
        return (model, loaded.info) if keywords.get("output_loading_info") else model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write the model and, in its folder ``predictors``, the bundle. Keywords as in transformers.

        The folder may be the one that the model came from: it is written aside and renamed. The config.json names a
        model type of its own: ``AutoModelForCausalLM`` loads this class where this package is imported and refuses the
        folder elsewhere. The dense class loads the dense model, with a warning.

        Raises:
            UserError: a model that a folder of its family cannot hold, a file in the folder's place, ``variant`` and
                ``distributed_checkpoint``. The folder is as it was.
        """
        if not is_main_process:
            return
        if ranks_of(self) is not None:
            raise UserError("each process of torchrun holds a part of this model; save it from one process")
        uploads = {key: kwargs.pop(key) for key in ("repo_id", "results", "tags", *UPLOADS) if key in kwargs}
        assert self.dense_class is not None
        dense = adopt(self.dense_class, self)
        save_together(dense, self.bundle, Path(save_directory), type(self).__name__, **kwargs)
        if push_to_hub:
            self.push_to_hub(uploads.pop("repo_id", Path(save_directory).name), **uploads)

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, *, results: str | Path | None = None, tags: Sequence[str] = (), **options: Any
    ) -> str:
        """Upload what :meth:`save_pretrained` writes, with a model card, to a repository of the hub, made if need be.

        Args:
            repo_id: ``OWNER/NAME``, or ``NAME`` for the owner of the token.
            results: folder in which ``infer.py`` scored this bundle, for the card.
            tags: more tags of the card.
            options: ``private``, ``token``, ``revision`` (a branch), ``create_pr``, ``commit_message``,
                ``commit_description`` and ``max_shard_size``, as in transformers.

        Returns:
            the address of the commit.

        Raises:
            UserError: as :meth:`save_pretrained`. A ``repo_id`` that cannot be one, no network, no access, or the hub
                refuses. ``results`` of another bundle.
        """
        return push_together(self, repo_id, results, tags or (), options)

    def extra_repr(self) -> str:
        """The backend and the bundle, in a line of the model's repr."""
        runtime = self._current.made  # showing a model makes nothing
        backend = self._current.settings.backend if runtime is None else runtime.backend
        return f"backend={backend}, sparse_from={self.sparse_from}, bundle={self._current.bundle!r}"

    @property
    def sparse_from(self) -> SparseFrom:
        """First sparse position: one of all rows, (B,) one per row, or ``prompt``. May be set between calls.

        Raises:
            UserError: set to anything else.
        """
        return self._sparse_from

    @sparse_from.setter
    def sparse_from(self, value: Any) -> None:
        self._sparse_from = read_sparse_from(value)

    @property
    def bundle(self) -> Bundle:
        """The predictors and thresholds in use. Change them with :meth:`set_bundle`."""
        assert self._current.bundle is not None, "make this model with from_pretrained or from_model"
        return self._current.bundle

    def set_bundle(self, bundle: Bundle) -> None:
        """Use other predictors or thresholds, for instance ``model.set_bundle(model.bundle.at(mlp_density=0.2))``.

        Calls that have begun go on with what they began with.

        Raises:
            UserError: no bundle, one of another shape, or one that the backend cannot run. Nothing is changed then.
        """
        self._current.set_bundle(self, bundle)

    @property
    def _runtime(self) -> Runtime:
        """Runtime of a call that begins now."""
        return self._current.runtime(self)

    @property
    def device(self) -> torch.device:
        """Where the model computes. Parameters that are offloaded lie nowhere, and accelerate's hooks say where."""
        where = super().device
        return execution_device(self) or where if where.type == "meta" else where

    @property
    def backend(self) -> str:
        """``mask``, ``gather``, ``triton`` or ``cpu``, in use. Another one is chosen with :meth:`from_model`."""
        return "mask" if self._current.bundle is None else self._runtime.backend

    def describe(self, rows: int = 1, tokens: int = 256) -> str:
        """Say what runs in a decoding step of so many rows of so many tokens, and why. An engine is built to tell.

        Raises:
            UserError: what the engine refuses.
        """
        return self._runtime.describe(self, rows, tokens)

    def engine_pool(self) -> Any:
        """The engines behind :meth:`generate`, for whoever runs their rows himself.

        Raises:
            UserError: the backend has none.
        """
        runtime = self._runtime
        runtime.check_engine("this")
        runtime.prepare(self)
        return runtime.engines

    def warm_up(self, rows: int = 1, tokens: int | None = None) -> None:
        """Compile and record what the first :meth:`generate` would wait for.

        Args:
            rows: sequences at once. tokens: of a sequence at most, prompt included. None: the model's limit.

        Raises:
            UserError: the backend has no engine.
        """
        pool = self.engine_pool()
        with pool.turn():
            pool.engine(rows, tokens or pool.shape.max_positions).warm_up()

    def guard_report(self) -> dict[str, Any] | None:
        """Measurements of the guard since it was made or reset, see :meth:`GuardState.report`. None without one."""
        guarded = self._runtime.guarded
        return None if guarded is None else guarded.report()

    def lossless_report(self) -> dict[str, float] | None:
        """Drafts and acceptance of the last lossless call, see `Acceptance.report`. None without one."""
        engines = self._runtime.engines
        acceptance = None if engines is None else engines.acceptance
        return None if acceptance is None else acceptance.report()

    def reset_guard(self) -> None:
        """Put back the bundle's thresholds and forget what was measured."""
        guarded = self._runtime.guarded
        if guarded is not None:
            guarded.reset()

    def _judge(self, refusal: UserError, runtime: Runtime) -> None:
        """Return where gather may stand in for an engine that refuses, else raise."""
        self._current.judge(self, super().forward, refusal, runtime)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Run ``to``, ``half`` and the like: what was derived is given up, the next call makes it anew."""
        self._current.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """State for a shallow copy: it derives for itself."""
        return self.__dict__ | {"_current": self._current.copied()}

    def _replicate_for_data_parallel(self) -> Any:
        """A copy on another device derives for itself."""
        replica = super()._replicate_for_data_parallel()
        replica._current = self._current.copied()
        return replica

    def new_cache(self) -> SparseCache | None:
        """An empty cache for this backend. None where transformers makes its own."""
        return None if self._runtime.backend == "mask" else SparseCache.of(self)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        sparse_call: Call | None = None,
        **kwargs: Any,
    ) -> Output:
        """As the dense model's.

        ``sparse_call`` is given by ``generate()``: a forward pass that somebody else makes meanwhile is not part of it.
        Through ``triton`` every position of whole rows is scored by the engine's steps. No cache comes back.

        Raises:
            UserError: ``gather`` with another cache than a SparseCache, or a mask that is not (B, S). ``gather`` asked
                for attentions, for hidden states, or for gradients in the backward pass. ``mask`` under gradient
                checkpointing. ``triton`` with any cache, ``use_cache=True``, embeddings or positions. Any under
                ``torch.export``.
        """
        given = ForwardArguments(
            input_ids, attention_mask, past_key_values, inputs_embeds, position_ids, labels, use_cache, logits_to_keep,
            kwargs,
        )  # fmt: skip
        return forwarded(self, super().forward, given, sparse_call)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # transformers looks at its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', with the call that the forward pass belongs to."""
        call = call_of(self)
        call = None if call is None else call.knowing(kwargs.get("attention_mask"))
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "sparse_call": call}

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As the dense model's.

        The engines do greedy decoding and sampling (temperature, top_k, top_p, min_p, repetition_penalty), with stop
        tokens and stop_strings, minimum and maximum lengths. ``triton`` takes padded batches of up to 32 rows,
        ``cpu`` of up to 8, several sequences a row, streamers, and ``return_dict_in_generate`` (sequences only).

        ``lossless=True``: the dense model's text, drafted sparsely and verified. One prompt, on an engine. None = as
        ``lossless`` of the bundle's metadata says, which is false unless somebody put it there.
        ``draft_length``: 0 to 7 tokens, None = chosen. ``draft_weights``: the draft's are rounded, ``"int8"`` on a CPU
        and ``"int4"`` on a GPU, or those of a folder in 4 bits. :meth:`lossless_report` says what was accepted.

        Raises:
            UserError: ``triton`` was asked for anything else. ``gather`` for prompts that are padded on the right.
                ``lossless`` for what no engine here verifies.
        """
        assert self.dense_class is not None
        plain = (SparseCausalLM, *self.dense_class.__mro__)
        return generated(self, super().generate, inputs, generation_config, kwargs, plain)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refused: its attention and its cache are its own, and it calls the model from a thread of its own.

        Raises:
            UserError: always.
        """
        raise UserError("continuous batching (generate_batch, 'paged') is for dense models; use generate()")


class SparseOPTForCausalLM(SparseCausalLM, OPTForCausalLM):
    """A sparse OPT."""

    dense_class = OPTForCausalLM


def sparse_class(dense: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of sparse models whose dense class is ``dense``, of transformers. It is made when first needed."""
    name = f"Sparse{dense.__name__}"
    if name not in globals():  # where pickle finds it
        own = {"__module__": __name__, "__doc__": f"A sparse {dense.__name__}.", "dense_class": dense}
        globals()[name] = type(name, (SparseCausalLM, dense), own)
        _let_pipelines_take(name)
    return globals()[name]


def _let_pipelines_take(name: str) -> None:
    """Pipelines compare a class's name with this table. No configuration has such a key: no other look-up finds it."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"dejavu_train_{name}"] = name


_let_pipelines_take(SparseOPTForCausalLM.__name__)


SparseForCausalLM = SparseCausalLM  # the name in the manner of transformers' classes
