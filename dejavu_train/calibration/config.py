"""The keys of a calibration, readable without torch."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal, get_args

from dejavu_train.bundle.allocation import parse_budget
from dejavu_train.families import TARGETS, ModelDims, Target
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, SHARE, check_ranges

logger = logging.getLogger(__name__)

PredictorDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
PASSES = 0.999  # of the contribution, through a second stage that is auto

LEAST_DENSITY = {Target.MLP: 0.001, Target.HEADS: 1 / 48}  # where the curves begin


def check_reachable(density: float, key: str, target: Target, dense_layers: tuple[int, ...], shape: ModelDims) -> None:
    """Refuse a mean density of a target's layers that no choice of theirs can have.

    Raises:
        UserError: it lies below what curves are measured for, or below what the dense layers alone are.
    """
    least = LEAST_DENSITY[target]
    if density < least:
        raise UserError(f"{key} must be at least {least:.3g}, where calibration curves begin, got {density:g}")
    layers = shape.layers_of(target)
    dense = len(set(dense_layers) & set(layers)) / len(layers)
    if density < 1 and dense > density:
        raise UserError(
            f"{key} {density:g} cannot be met: the {len(set(dense_layers))} calibrate.dense_layers of"
            f" {len(layers)} alone are {dense:.3g} in the mean; raise it, or keep fewer layers dense"
        )


def second_stage_refusal(shape: ModelDims) -> str | None:
    """Why a model's neurons cannot be tested a second time. None: they can."""
    if shape.gated:
        return "tests a neuron by its one map, and this model's MLP is gated"
    if shape.d_model % 8:
        return f"needs a model width that is a multiple of 8, got {shape.d_model}"
    return None


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """How thresholds are set."""

    mlp_density: float = 0.10
    """Mean share of the neurons that the predictors select, over all layers. With a cascade these are its candidates,
    without one they are what is read. 1 keeps every MLP dense."""
    head_density: float = 1.0
    """Mean share of the heads that are selected, over all layers. 1 keeps all."""
    retained_mass: float | None = None
    """Instead of mlp_density: the share of the neurons' contribution that every layer keeps."""
    budget: str | None = None
    """Instead of densities: bytes of blocks and predictors read per token (600kB), or a perplexity allowance (1%).
    Weights count in the format in which the model is stored."""
    selection: Literal["threshold", "top_k"] = "threshold"
    """A logit threshold (counts follow the token), or the same number of units for every token."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense, their heads too."""
    dtype: PredictorDtype = "float16"
    """Predictor weights as deployed. int8 and int4 have a scale per row. int4 is for neurons (heads are int8 then) and
    is trained through its rounding, so set it before training."""
    cascade: float | Literal["auto"] | None = None
    """A second stage: what the MLP's predictor selects are candidates, and are tested on the upper four bits of their
    weights. This share of the contribution passes, and only what passes is read whole. auto: 0.999 where the model can
    have a second stage. null: no second stage."""
    rows: int = 20_000
    """Rows of the calibration set that set the thresholds."""
    sensitivity_tokens: int = 2048
    """Tokens of the calibration set on which each layer's loss is measured. 0 shares out by true density instead."""
    head_loss_tokens: int = 16_384
    """Tokens of the calibration set on which heads' predictors learn, after training, what loss a skipped head costs.
    0, or no sensitivity_tokens, leaves them as trained. Custom predictors stay as trained."""
    batch_size: int = 1
    """Sequences decoded together: a budget then counts the union of their selections."""

    def dtype_of(self, target: Target) -> str:
        """The dtype of one target. A head predictor is a few rows: half a byte a weight would save nothing."""
        return "int8" if self.dtype == "int4" and target == Target.HEADS else self.dtype

    def settled(self, shape: ModelDims, low_rank: bool = True) -> "CalibrateConfig":
        """The same with a number or None for a ``cascade`` that is auto. None is said in a line of the log.

        Args:
            low_rank: whether the neurons' predictors are, which alone have a second stage.
        """
        if self.cascade != "auto":
            return self
        refusal = second_stage_refusal(shape) or (None if low_rank else "is for low-rank predictors")
        if refusal is not None:
            logger.info("calibrating without a second stage: calibrate.cascade %s", refusal)
        return dataclasses.replace(self, cascade=PASSES if refusal is None else None)

    def check(self, shape: ModelDims, targets: Sequence[Target] = TARGETS) -> None:
        """Raise :class:`UserError` for a value that cannot be meant. ``targets`` are those that have predictors."""
        second_stage = self.cascade not in (None, "auto")  # one that was asked for
        named = ("mlp_density", "head_density", "retained_mass", *(["cascade"] if second_stage else []))
        shares = dict.fromkeys(named, SHARE)
        counts = {"rows": COUNT, "batch_size": COUNT, "sensitivity_tokens": NUMBER, "head_loss_tokens": NUMBER}
        check_ranges(self, "calibrate.", shares | counts)
        for layer in self.dense_layers:
            if not 0 <= layer < shape.n_layers:
                raise UserError(f"calibrate.dense_layers: the model has layers 0 to {shape.n_layers - 1}, got {layer}")
        if self.budget is None:
            densities = {Target.MLP: self.mlp_density, Target.HEADS: self.head_density}
            for target in targets:
                if target == Target.HEADS or self.retained_mass is None:
                    key = f"calibrate.{'mlp' if target == 'mlp' else 'head'}_density"
                    check_reachable(densities[target], key, target, self.dense_layers, shape)
        if second_stage and (refusal := second_stage_refusal(shape)) is not None:
            raise UserError(f"calibrate.cascade {refusal}; pass --calibrate.cascade null")
        if self.selection not in ("threshold", "top_k"):
            raise UserError(f"calibrate.selection must be threshold or top_k, got {self.selection}")
        if self.budget is not None:
            parse_budget(self.budget)
            if self.sensitivity_tokens == 0:
                raise UserError("calibrate.budget needs sensitivities; set calibrate.sensitivity_tokens above 0")
        if self.dtype not in get_args(PredictorDtype):
            raise UserError(f"calibrate.dtype must be one of {', '.join(get_args(PredictorDtype))}, got {self.dtype}")
