"""A sparse OPT that is used as ``OPTForCausalLM`` is: the same signature, ``generate()``, cache, config and device.

Three backends select the same units: ``mask`` (whole sequences, for quality), ``gather`` (reads selected rows only, any
device) and ``triton`` (fast, on a GPU). ``sparse_from`` is the position from which on a row is sparse: an integer, one
per row, or ``"prompt"`` for a dense prompt and sparse generation, as in the paper.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_train.bundle import FACTS, Bundle
from dejavu_train.errors import UserError
from dejavu_train.gather import KV_POLICIES, GatherDecoder
from dejavu_train.mask import masking
from dejavu_train.opt_model import load_opt, weight_hash
from dejavu_train.selections import Predicted
from dejavu_train.sparse_cache import SparseCache

BACKENDS = ("mask", "gather", "triton")
PREDICTORS_FOLDER = "predictors"
SparseFrom = int | Tensor | str


class SparseOPTForCausalLM(OPTForCausalLM):
    """An OPT whose blocks use the units that the predictors of a bundle select.

    Make one with :meth:`from_pretrained` or, around a model in memory, :meth:`from_model`.

    Attributes:
        sparse_from: may be changed between calls.
        kv_policy: ``backfill``, ``always`` or ``stale``, see ``gather``; ``mask`` computes all K and V anyway.
    """

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        self.backend = "mask"
        self.sparse_from: SparseFrom = 0
        self.kv_policy = "backfill"
        self._bundle: Bundle | None = None
        self._selector: Predicted | None = None
        self._means: dict[int, Tensor] = {}
        self._decoder: Any = None
        self._ending_tokens: Tensor | None = None  # within generate: tokens after which a row is over

    @classmethod
    def from_model(
        cls,
        model: OPTForCausalLM,
        bundle: Bundle,
        backend: str = "mask",
        sparse_from: SparseFrom = 0,
        kv_policy: str = "backfill",
    ) -> "SparseOPTForCausalLM":
        """Wrap a dense model; the weights are shared, not copied. The caller knows that the bundle belongs to it.

        Raises:
            UserError: an unknown backend or policy, or a backend that cannot run here.
        """
        if backend not in BACKENDS:
            raise UserError(f"backend must be one of {', '.join(BACKENDS)}, got {backend}")
        if kv_policy not in KV_POLICIES:
            raise UserError(f"kv_policy must be one of {', '.join(KV_POLICIES)}, got {kv_policy}")
        if isinstance(sparse_from, str) and sparse_from != "prompt":
            raise UserError(f"sparse_from must be a position, one per row, or 'prompt', got {sparse_from}")
        made = _adopt(cls, model)
        made.backend, made.sparse_from, made.kv_policy = backend, sparse_from, kv_policy
        made.set_bundle(bundle)
        return made.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        predictors: Bundle | str | Path | None = None,
        backend: str = "mask",
        sparse_from: SparseFrom = 0,
        kv_policy: str = "backfill",
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        device_map: Any = None,
        revision: str | None = None,
    ) -> "SparseOPTForCausalLM":
        """Load a model and its predictors.

        Args:
            pretrained_model_name_or_path: folder or hub id of an OPT.
            predictors: a bundle, or where it lies; None: in the model's folder, as :meth:`save_pretrained` leaves it.
            backend: ``mask``, ``gather`` or ``triton``.
            device_map: as in transformers, for models larger than one GPU.
        Raises:
            UserError: no such model or bundle, or a bundle of other weights.
        """
        name = str(pretrained_model_name_or_path)
        if predictors is None:
            predictors = Path(name) / PREDICTORS_FOLDER
            if not (predictors / FACTS).is_file():
                raise UserError(f"{name} holds no {PREDICTORS_FOLDER} folder; give predictors=<bundle folder>")
        bundle = predictors if isinstance(predictors, Bundle) else Bundle.from_pretrained(predictors)
        bundle.check_model(name, revision)
        model = load_opt(name, str(dtype).removeprefix("torch."), device, device_map, revision)
        return cls.from_model(model, bundle, backend, sparse_from, kv_policy)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the dense model and, in its folder ``predictors``, the bundle."""
        _adopt(OPTForCausalLM, self).save_pretrained(save_directory, **kwargs)
        name = str(save_directory)
        saved = dataclasses.replace(self.bundle, model=name, weight_hash=weight_hash(name))
        saved.save_pretrained(Path(save_directory) / PREDICTORS_FOLDER)

    @property
    def bundle(self) -> Bundle:
        """The predictors and thresholds in use; change them with :meth:`set_bundle`."""
        assert self._bundle is not None, "make this model with from_pretrained or from_model"
        return self._bundle

    def set_bundle(self, bundle: Bundle) -> None:
        """Use other predictors or thresholds, for instance ``model.set_bundle(model.bundle.at(mlp_density=0.2))``."""
        self._bundle = bundle
        if self.backend == "mask":
            self._selector, self._means = Predicted(bundle, self.device, self), bundle.head_means(self.device)
        elif self.backend == "gather":
            self._decoder = GatherDecoder(self, bundle, self.kv_policy)
        else:
            self._decoder = _triton_decoder(self, bundle, self.kv_policy)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What ``to``, ``cuda``, ``half`` and the like do: predictors and folded weights follow the model."""
        moved = super()._apply(fn, recurse)
        if getattr(self, "_bundle", None) is not None:
            self.set_bundle(self.bundle)
        return moved

    def new_cache(self) -> SparseCache | None:
        """An empty cache for this backend; None where transformers makes its own."""
        return None if self.backend == "mask" else SparseCache(self.config.num_hidden_layers)

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
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """As ``OPTForCausalLM.forward``.

        Raises:
            UserError: ``gather`` and ``triton`` with another cache than a SparseCache, a mask that is not (B, S),
                or asked for attentions or hidden states.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        shape = (input_ids if input_ids is not None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if self.backend != "mask":
            attention_mask = _visible(attention_mask, shape, past, self.device)
        positions = _positions(shape, attention_mask, position_ids, past, self.device)
        sparse = self._sparse(positions, past)
        common = {"labels": labels, "use_cache": use_cache, "logits_to_keep": logits_to_keep, **kwargs}
        if self.backend == "mask":
            assert self._selector is not None
            with masking(self, self._selector, sparse, means=self._means):
                return super().forward(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    inputs_embeds=inputs_embeds,
                    position_ids=position_ids,
                    **common,
                )
        assert attention_mask is not None
        tokens = (input_ids, attention_mask, past_key_values, inputs_embeds)
        return self._forward_sparse(*tokens, positions, sparse, **common)

    def _forward_sparse(
        self,
        input_ids: Tensor | None,
        visible: Tensor,
        cache: Cache | None,
        embeds: Tensor | None,
        positions: Tensor,
        sparse: Tensor,
        labels: Tensor | None,
        use_cache: bool | None,
        logits_to_keep: int | Tensor,
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """The forward pass of ``gather`` and ``triton``."""
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise UserError(
                    f"the backend {self.backend} gives no {name.removeprefix('output_')}; use backend='mask'"
                )
        if cache is not None and not isinstance(cache, SparseCache):
            raise UserError(
                f"the backend {self.backend} needs a SparseCache, got {type(cache).__name__};"
                " leave past_key_values out, or make one with model.new_cache()"
            )
        cache = cache if cache is not None else SparseCache(self.config.num_hidden_layers)
        live = self._note_ended_rows(input_ids, cache)
        decoder = self.model.decoder
        hidden = decoder.embed_tokens(input_ids) if embeds is None else embeds
        hidden = hidden + decoder.embed_positions(visible.long(), 0, position_ids=positions).to(hidden.device)
        hidden = self._decoder.forward(hidden, cache, sparse, visible, live)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        returned = None if use_cache is False else cache
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=returned)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _sparse(self, positions: Tensor, past: int) -> Tensor:
        """(B, T) bool: which of ``positions`` lie at or behind ``sparse_from``."""
        start = self.sparse_from
        if isinstance(start, str):
            return torch.full_like(positions, past > 0, dtype=torch.bool)
        if isinstance(start, Tensor):
            start = start.to(positions.device).reshape(-1)
            if positions.shape[0] % len(start):
                raise UserError(f"sparse_from has {len(start)} rows, the batch has {positions.shape[0]}")
            # Beam search and several returned sequences repeat every row.
            start = start.repeat_interleave(positions.shape[0] // len(start))[:, None]
        return positions >= start

    def _note_ended_rows(self, input_ids: Tensor | None, cache: SparseCache) -> Tensor | None:
        """Within ``generate``: (B,) bool, rows that go on. An ended row leaves the union, its outputs are not used."""
        if self._ending_tokens is None or input_ids is None or input_ids.shape[1] != 1 or not cache.get_seq_length():
            return None
        ended = torch.isin(input_ids[:, 0], self._ending_tokens.to(input_ids.device))
        cache.finished = ended if cache.finished is None else cache.finished | ended
        return ~cache.finished

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As ``OPTForCausalLM.generate``; makes its own SparseCache where the backend needs one."""
        settings = generation_config or self.generation_config

        def setting(name: str) -> Any:
            return kwargs.get(name, getattr(settings, name, None))

        cache = kwargs.get("past_key_values")
        if cache is None and self.backend != "mask" and setting("use_cache") is not False:
            cache = kwargs["past_key_values"] = self.new_cache()
        if isinstance(cache, SparseCache):
            cache.finished = None
        ending = setting("eos_token_id") if (setting("num_beams") or 1) == 1 else None
        start = self.sparse_from
        if isinstance(start, str):
            start = _prompt_lengths(inputs, kwargs, setting("pad_token_id"), cache)
        with self._generating(start, None if ending is None else torch.as_tensor(ending).reshape(-1)):
            return super().generate(inputs, generation_config, **kwargs)

    @contextmanager
    def _generating(self, sparse_from: SparseFrom, ending_tokens: Tensor | None) -> Iterator[None]:
        before = self.sparse_from
        self.sparse_from, self._ending_tokens = sparse_from, ending_tokens
        try:
            yield
        finally:
            self.sparse_from, self._ending_tokens = before, None


def _adopt(cls: type[OPTForCausalLM], model: OPTForCausalLM) -> Any:
    """A model of class ``cls`` with the modules of ``model``: nothing is copied, nothing initialised."""
    with torch.device("meta"):
        made = cls(model.config)
    made.model, made.lm_head = model.model, model.lm_head
    made.generation_config = model.generation_config
    if hasattr(model, "hf_device_map"):
        made.hf_device_map = model.hf_device_map
    return made


def _triton_decoder(model: SparseOPTForCausalLM, bundle: Bundle, kv_policy: str) -> Any:
    import os

    if model.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("the backend triton needs a GPU; use backend='gather' here")
    try:
        from dejavu_train.triton_backend import TritonDecoder
    except ImportError as error:
        raise UserError(f"the backend triton cannot be loaded ({error}); use backend='gather'") from None
    return TritonDecoder(model, bundle, kv_policy)


def _positions(
    shape: torch.Size, attention_mask: Tensor | None, position_ids: Tensor | None, past: int, device: torch.device
) -> Tensor:
    """(B, T) int64, the position of every new token; -1 for padding, as transformers counts."""
    rows, new = shape
    if position_ids is not None:
        return position_ids.to(device).expand(rows, new)
    if attention_mask is not None and attention_mask.dim() == 2:
        counted = attention_mask.to(device).long().cumsum(dim=1)
        return (counted * attention_mask.to(device).long() - 1)[:, past:]
    return torch.arange(past, past + new, device=device).expand(rows, new)


def _visible(attention_mask: Tensor | None, shape: torch.Size, past: int, device: torch.device) -> Tensor:
    """(B, S + T) bool, false for padding."""
    total = past + shape[1]
    if attention_mask is None:
        return torch.ones(shape[0], total, dtype=torch.bool, device=device)
    if attention_mask.shape != (shape[0], total):
        raise UserError(
            f"attention_mask must be (batch, past + new tokens) = {(shape[0], total)},"
            f" got {tuple(attention_mask.shape)}"
        )
    return attention_mask.to(device, torch.bool)


def _prompt_lengths(inputs: Tensor | None, kwargs: dict[str, Any], pad: int | None, cache: Cache | None) -> Tensor:
    """(B,) tokens of each row's prompt, those already in the cache included."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask.sum(dim=1)
    ids = next((x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    if ids is None:
        raise UserError("sparse_from='prompt' needs a prompt; give input_ids")
    if ids.dim() == 2 and pad is not None:
        return (ids != pad).sum(dim=1)
    return torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
