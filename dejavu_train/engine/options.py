"""The options of a decode engine."""

from dataclasses import dataclass

import torch

from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine.inputs import MAX_BATCH
from dejavu_train.families.dims import SILENT, Activation
from dejavu_train.ground.errors import UserError

LOOK_AHEADS = ("fused", "stream", "inline")
OPERATIONS = ("triton", "reference")
ZEROS = ("auto", "skip", "read")
CHOICES = (("look_ahead", LOOK_AHEADS), ("ops", OPERATIONS), ("zeros", ZEROS))


@dataclass(frozen=True)
class EngineOptions:
    """How a `DecodeEngine` is built.

    Args:
        batch: rows, at most 32. Fewer prompts may be given. The graph always runs all rows.
        context: tokens a row can hold, prompt included. None = the model's limit.
        dtype: of weights and caches. The residual stream and all sums are fp32. None = the model's, or float16 for
            4-bit weights with Triton.
        device: None = the model's.
        ops: "triton", or "reference" for plain torch on any device.
        graph: capture the step in a CUDA graph (Triton on a GPU only).
        pdl: launch kernels as programmatic dependents of each other.
        look_ahead: where predictors of earlier sites run. "fused": in the grids of other kernels where possible, else
            on a second stream. "stream": always on a second stream. "inline": between the other kernels.
            `DecodeEngine.describe` prints what each layer got.
        crossover: compute a layer whole and mask it where that was measured to be faster. What is selected stays the
            same. Only on a GPU, where it was measured. False = read the selected units only, everywhere.
        release: take the layers out of the given `DecodeWeights`, which is left without.
        guard: every N-th step is dense and moves thresholds: settings, or the state that several engines share.
        screen: find the greedy token of one row through an int8 screen of the LM head. It is the token that all logits
            give, for half of the bytes. The screen takes as many beside the LM head. None = on a GPU where it fits.
            True = also under the interpreter.
        zeros: what becomes of rows of neurons that are exactly zero, where a layer selects nothing. "skip": they are
            not read. "read": they are. "auto": they are left out where that was measured to be no slower. The output is
            the same.
        one_kernel: run all layers of a step as one kernel, where there is one for this model and GPU. None = where it
            was timed: with predictors in all layers or in none. False = never.
    Raises:
        UserError: a value that is not allowed.
    """

    batch: int = 1
    context: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    ops: str = "triton"
    graph: bool = True
    pdl: bool = True
    look_ahead: str = "fused"
    crossover: bool = True
    release: bool = False
    guard: Guard | GuardState | None = None
    screen: bool | None = None
    zeros: str = "auto"
    one_kernel: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES:
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise UserError(f"the engine decodes 1 to {MAX_BATCH} rows at once, got a batch of {self.batch}")

    @property
    def guarded(self) -> bool:
        return self.guard is not None and not (isinstance(self.guard, Guard) and not self.guard.every)


def check_zeros(asked: str, activation: Activation) -> None:
    """Raise UserError for rows of zeros that are to be skipped where an activation makes no neuron zero."""
    if asked == "skip" and activation not in SILENT:
        raise UserError(
            f"zeros='skip' needs an activation that gives exact zeros ({', '.join(SILENT)}), and this model has"
            f" {activation}; leave zeros out"
        )
