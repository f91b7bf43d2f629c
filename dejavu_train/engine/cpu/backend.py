"""The backend ``cpu`` of sparse models: the compiled engine for CPUs behind ``generate()``.

The engines keep one copy of the weights in their own layout, made when something is first generated.
"""

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.spec import check_low_rank
from dejavu_train.engine.cpu import load_engine
from dejavu_train.engine.cpu_limits import MAX_BATCH
from dejavu_train.engine.cpu_plan import cpu_format
from dejavu_train.engine.generation import EnginePool
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine, Formats
from dejavu_train.ground.errors import Unsupported

if TYPE_CHECKING:
    from dejavu_train.engine.cpu.engine import CpuEngine
    from dejavu_train.engine.cpu.selectors import Rules
    from dejavu_train.engine.cpu.weights import CpuWeights


class CpuBackend(EnginePool):
    """Engines for one model and bundle.

    Raises:
        Unsupported: a model that is not on the CPU, no POSIX threads, predictors that
            are not low-rank, a guard.
    """

    max_rows = MAX_BATCH

    def __init__(
        self,
        model: Any,
        bundle: Bundle,
        guard: GuardState | None = None,
        zeros: str = "auto",
        stored: str | None = None,
    ) -> None:
        load_engine()
        from dejavu_train.engine.cpu.engine import SUPPORTED

        check_low_rank(bundle.specs, "the CPU engine")
        super().__init__(model, bundle)
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise Unsupported("the CPU engine decodes models that are on the CPU; pass device='cpu' to stay on it")
        if not SUPPORTED:
            raise Unsupported("the CPU engine needs POSIX threads (Linux or macOS)")
        self.stored = stored
        dtype = str(model.dtype).removeprefix("torch.")
        formats = Formats(cpu_format(dtype, stored), dtype, dtype)
        options = EngineOptions(guard=guard, zeros=zeros)
        plan_step(self.shape, {}, formats, options, Engine.CPU)  # refuses now what no engine can run
        self._owner = os.getpid()
        self._rules: Rules | None = None

    def share(self, earlier: "CpuBackend") -> None:
        """Use the copy of the weights that the backend of an earlier bundle made."""
        self._weights = earlier._weights

    def _read(self, model: Any) -> "CpuWeights":
        from dejavu_train.engine.cpu.rounded import read_weights
        from dejavu_train.engine.cpu.weights import CpuWeights, check_memory

        check_memory(CpuWeights.needed(model, self.stored), "the weights a second time")
        return read_weights(model, self.stored)

    def engine(self, rows: int, tokens: int) -> "CpuEngine":
        """See `EnginePool.engine`. In a forked process the weights are there, the engines' threads are not."""
        if self._owner != os.getpid():
            self.engines, self._owner = {}, os.getpid()
        engine: CpuEngine = super().engine(rows, tokens)
        return engine

    def _build(self, batch: int, context: int) -> "CpuEngine":
        from dejavu_train.engine.cpu import CpuEngine

        engine = CpuEngine(self.weights, self._rules or self.bundle, batch=batch, context=context)
        self._rules = engine.rules
        return engine

    def logits(self, *_: Any) -> Tensor:
        """Whole rows are scored by ``gather``: the engine keeps no logits of all positions."""
        raise Unsupported(
            "a forward pass over whole rows is not for the CPU engine",
            "model(ids) scores whole rows in plain torch; a model with backend='mask' does it fastest, with gradients",
        )
