"""The backend ``triton`` of sparse models: the decode engine behind ``generate()`` and ``forward()``.

Engines are built and captured once per number of rows and size of context, and reused. They share the weights with the
Hugging Face model, whose q, k and v projections become views of the engine's layout (`share`). Beside the weights there
are the caches of each engine. Of a bundle with a second stage the candidates are read whole.
"""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.facts import facts_of
from dejavu_train.engine.generation import EnginePool
from dejavu_train.engine.inputs import MAX_BATCH
from dejavu_train.engine.memory import DoesNotFit
from dejavu_train.engine.model_weights import engine_dtype, formats_of, weights_of_model
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step, read_as_codes
from dejavu_train.engine.planned import Engine
from dejavu_train.engine.predictors import TargetPredictor, load_predictors
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.engine.request import starts_of
from dejavu_train.engine.step import CAPTURING
from dejavu_train.engine.weights import DecodeWeights, dtype_name
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import Unsupported
from dejavu_train.kernels.common.checks import runs_on


class EngineBackend(EnginePool):
    """Engines for one model and bundle.

    Args:
        model: a Hugging Face model on one GPU, whose modules are changed so that they share the engine's tensors.
        bundle: predictors and thresholds.
        ops: "triton", or "reference" for plain torch on any device (slow, for tests).
        guard: what all engines share of a guard, or None. zeros: as in `EngineOptions`.
    Raises:
        Unsupported: no GPU, a model spread over several devices, a head dim or dtype without kernels.
        UserError: thresholds that were never calibrated. NotPlain: a module that must be called.
    """

    max_rows = MAX_BATCH

    def __init__(
        self,
        model: Any,
        bundle: Bundle,
        ops: str = "triton",
        guard: GuardState | None = None,
        zeros: str = "auto",
    ) -> None:
        super().__init__(model, bundle)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise Unsupported(
                "the decode engine runs on one device, and device_map has spread this model over several; pass"
                " device='cuda' instead of device_map to stay on it"
            )
        if ops == "triton" and not runs_on(self.device):
            raise Unsupported(
                f"the decode engine needs a GPU, and this model is on {self.device}; pass device='cuda' to stay on it,"
                " or backend='cpu'"
            )
        dtype = engine_dtype(model, ops)
        facts = facts_of(bundle, read_as_codes(bundle, dtype, 1), dtype_name(dtype), 1)
        options = EngineOptions(ops=ops, guard=guard, zeros=zeros)
        engine = Engine.GPU if ops == "triton" else Engine.REFERENCE
        self.ranks = ranks_of(model)
        held, world = (self.shape, 1) if self.ranks is None else (self.ranks.shard.dims, self.ranks.shard.world)
        plan = plan_step(held, facts, formats_of(model, dtype), options, engine, world)  # refuses what no engine runs
        self._options, self._dtype = options, dtype
        self._predictors: dict[frozenset[UnitKey], dict[UnitKey, TargetPredictor | None]] = {}
        self._turned = plan.turned

    def _read(self, model: Any) -> DecodeWeights:
        if self.ranks is None:
            return weights_of_model(model, self._dtype, self.device, True, self._turned)
        shard = self.ranks.shard
        return shard.with_head(weights_of_model(model, self._dtype, self.device, True, self._turned, shard.dims))

    def _build(self, batch: int, context: int) -> DecodeEngine:
        """An engine, at the price of those of other numbers of rows where the memory is short."""
        if self.ranks is not None:  # the others would not try again
            return self._make(batch, context)
        engine = None
        with contextlib.suppress(torch.cuda.OutOfMemoryError, DoesNotFit):
            engine = self._make(batch, context)
        if engine is None:  # behind the error, which would hold what was half made
            self.engines.clear()
            with CAPTURING:
                torch.cuda.empty_cache()
            engine = self._make(batch, context)
        return engine

    @torch.inference_mode(False)  # its caches are written in later calls, which may be outside
    @torch.no_grad()
    def _make(self, batch: int, context: int) -> DecodeEngine:
        dtype = self.weights.embedding.dtype
        codes = read_as_codes(self.bundle, dtype, batch)
        if codes not in self._predictors:
            self._predictors[codes] = load_predictors(self.bundle, dtype, self.device, codes)
        return DecodeEngine(
            self.weights,
            self._predictors[codes],
            replace(self._options, batch=batch, context=context, device=self.device),
            self.ranks,
        )

    def logits(self, input_ids: Tensor, visible: Tensor, sparse_from: int | Tensor | str) -> Tensor:
        """(B, T, V) in the model's dtype, every position through the engine's steps. Zeros at padding.

        Args:
            input_ids: (B, T). visible: (B, T) bool, false for padding. sparse_from: "prompt" = all dense.
        """
        rows = [ids[seen].tolist() for ids, seen in zip(input_ids.cpu(), visible.cpu(), strict=True)]
        starts = list(map(len, rows)) if isinstance(sparse_from, str) else starts_of(sparse_from, len(rows))
        dtype = self.weights.embedding.dtype
        out = torch.zeros(*input_ids.shape, self.shape.vocab_size, dtype=dtype, device=self.device)
        filled = [b for b, row in enumerate(rows) if row]
        for first in range(0, len(filled), MAX_BATCH):
            part = filled[first : first + MAX_BATCH]
            with self.turn():
                engine = self.engine(len(part), max(len(rows[b]) for b in part))
                logits = engine.logits([rows[b] for b in part], [starts[b] for b in part], dtype)
            for i, b in enumerate(part):
                out[b, visible[b].to(self.device)] = logits[i, : len(rows[b])]
        return out
