"""Things that a model runs through now: its bundle, a runtime for its weights, and gather where an engine refuses.

A call asks for the runtime when it begins, and goes on with it. Weights, a dtype or a device may change between calls.
"""

import logging
from collections.abc import Callable
from typing import Any

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.sparse.derived import DerivedCell, no_mode
from dejavu_train.sparse.forward import find_fault
from dejavu_train.sparse.runtime import Runtime, Settings

logger = logging.getLogger(__name__)


class ModelRuntime:
    """The bundle and the runtime of one model. A deep copy or a pickle has no runtime, and makes one for itself.

    Attributes:
        settings: what the user asked for when the model was made.
        bundle: None until one is set.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.bundle: Bundle | None = None
        self._held: DerivedCell[Runtime] = DerivedCell()
        self._logged: set[str] = set()

    def copied(self) -> "ModelRuntime":
        """For a shallow copy of the model: the same bundle, and a runtime of its own."""
        made = ModelRuntime(self.settings)
        made.bundle, made._logged = self.bundle, self._logged
        return made

    @property
    def made(self) -> Runtime | None:
        """The runtime as it is. Nothing is made."""
        return self._held.value

    def set_bundle(self, model: Any, bundle: Bundle) -> None:
        """Run with another bundle. Where that is refused nothing changes."""
        with self._held.lock, no_mode(model.device):
            runtime = self._run_with(model, bundle)
            self.bundle, self._held.value = bundle, runtime

    def runtime(self, model: Any) -> Runtime:
        """For a call that begins now. Made anew where weights, dtype or device have changed since."""
        with self._held.lock, no_mode(model.device):
            if self._held.value is None or not self._held.value.fits(model):
                self._held.value = self._run_with(model, model.bundle)
            return self._held.value

    def forget(self) -> None:
        """Give up what was derived. The next call derives it anew."""
        with self._held.lock:
            self._held.value = None

    def judge(self, model: Any, dense_forward: Callable[..., Any], refusal: UserError, runtime: Runtime) -> None:
        """Return where gather may stand in for an engine that refuses, else raise. A fault by the layer's name."""
        if ranks_of(model) is not None:
            raise (refusal.among_ranks() if isinstance(refusal, Unsupported) else refusal) from None
        if isinstance(refusal, Unsupported) and self.settings.auto:
            return self._log_refusal(refusal)
        if refusal.tokens is not None:
            find_fault(model, dense_forward, runtime, refusal.tokens)
        raise refusal

    def log(self, line: str, level: int = logging.WARNING) -> None:
        """Log a line, once a model."""
        if line not in self._logged:
            self._logged.add(line)
            logger.log(level, line)

    def _run_with(self, model: Any, bundle: Bundle) -> Runtime:
        runtime = Runtime(model, bundle, self.settings, self._held.value)
        if runtime.refusal is not None:
            self._log_refusal(runtime.refusal)
        return runtime

    def _log_refusal(self, refusal: UserError) -> None:
        """One line for each reason why gather runs in place of the engine."""
        if isinstance(refusal, Unsupported) and refusal.expected:
            return self.log(refusal.expected, logging.INFO)
        text = str(refusal).removesuffix("; use backend='gather'")
        self.log(f"{text}: the backend gather runs instead, some 50 times slower for a small model")
