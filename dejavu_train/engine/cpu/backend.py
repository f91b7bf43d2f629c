"""The backend ``cpu`` of SparseOPTForCausalLM: the compiled engine for CPUs behind ``generate()``.

The engine keeps a copy of the weights in its own layout, made when something is first generated.
"""

import os
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.spec import check_low_rank
from dejavu_train.engine.cpu import load_engine
from dejavu_train.engine.generation import EnginePool, generate
from dejavu_train.errors import Unsupported
from dejavu_train.families import dims_of
from dejavu_train.families.plain import NotPlain, check_calls
from dejavu_train.machine import free_memory


class CpuBackend:
    """Engines for one model and bundle.

    Raises:
        Unsupported: a model that is not on the CPU, another policy than backfill, no POSIX threads, predictors that
            are not low-rank, a guard.
    """

    def __init__(
        self, model: Any, bundle: Bundle, kv_policy: str = "backfill", guard: GuardState | None = None
    ) -> None:
        if guard is not None:
            raise Unsupported("the CPU engine has no guard: its thresholds are constants")
        load_engine()
        from dejavu_train.engine.cpu.engine import SUPPORTED

        check_low_rank(bundle.specs, "the CPU engine")
        check_calls(model)
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise Unsupported("the CPU engine decodes models that are on the CPU")
        if kv_policy != "backfill":
            raise Unsupported(
                f"the CPU engine knows the policy backfill only, got {kv_policy}; pass kv_policy='backfill' to stay"
                " on it"
            )
        if not SUPPORTED:
            raise Unsupported("the CPU engine needs POSIX threads (Linux or macOS)")
        if model.dtype != torch.float32:
            raise Unsupported(
                f"the CPU engine keeps weights in float32, and this model is in {model.dtype}; pass dtype='float32' to"
                " stay on it"
            )
        if model.model.decoder.final_layer_norm is None:
            raise Unsupported("the CPU engine needs a final LayerNorm")
        self._model, self.bundle, self.shape = weakref.ref(model), bundle, dims_of(model.config)
        self._weights: Any = None
        self._owner = os.getpid()
        self.pool = EnginePool(self.shape.max_positions, self._make)

    def engine(self, rows: int, tokens: int) -> Any:
        """An engine for at least so many rows of so many tokens."""
        from dejavu_train.engine.cpu import CpuWeights

        self._begin_anew_in_a_fork()
        if self._weights is None:
            model = self._model()
            assert model is not None, "the model that owns this backend is alive"
            _check_memory(CpuWeights.needed(model))
            try:
                self._weights = CpuWeights.from_model(model)
            except NotPlain as refusal:
                raise Unsupported(refusal.what) from None
        return self.pool.engine(rows, tokens)

    def _begin_anew_in_a_fork(self) -> None:
        """In a forked process the weights are there, the threads and whoever had the turn are not."""
        if self._owner != os.getpid():
            self.pool = EnginePool(self.shape.max_positions, self._make)
            self._owner = os.getpid()

    def _make(self, batch: int, context: int) -> Any:
        from dejavu_train.engine.cpu import CpuEngine

        return CpuEngine(self._weights, self.bundle, batch=batch, context=context)

    def generate(self, *call: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """As :func:`dejavu_train.engine.generation.generate`, for up to 4 rows."""
        from dejavu_train.engine.cpu.engine import MAX_BATCH

        self._begin_anew_in_a_fork()
        with self.pool.turns, torch.autocast("cpu", enabled=False):
            return generate(self.engine, self.shape, MAX_BATCH, lambda request: None, *call)

    def logits(self, *_: Any) -> Tensor:
        """Whole rows are scored by ``gather``: the engine keeps no logits of all positions."""
        raise Unsupported("a forward pass over whole rows is not for the CPU engine")


def _check_memory(needed: int) -> None:
    free = free_memory()
    if free is not None and free < needed:
        raise Unsupported(
            f"the CPU engine keeps the weights a second time, {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of memory"
            " are free"
        )
