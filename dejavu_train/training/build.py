"""Builds the predictors that a configuration asks for, and tries what it names by class_path before any long work."""

from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.data.text import import_text
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.checkpoint import build_predictor
from dejavu_train.predictors.custom import PredictorClass, import_predictor
from dejavu_train.predictors.losses import Batch, get_loss
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import SCALED
from dejavu_train.training.config import RunConfig


def make_predictor(config: RunConfig, job: UnitKey, d_in: int, n_out: int) -> nn.Module:
    """The predictor of a job, before its first values are set.

    int4 is trained through its rounding. int8 selects what fp32 selects.
    """
    layer, target = job
    metadata = config.predictor(target).describe(layer) | {"d_in": d_in, "n_out": n_out}
    predictor = build_predictor(metadata, predictor_classes(config), f"{target}.predictor")
    if isinstance(predictor, LowRankPredictor) and config.calibrate.dtype_of(target) == "int4":
        predictor.rounded_to = "int4"
    return predictor


def predictor_classes(config: RunConfig) -> dict[str, PredictorClass]:
    """The classes of the predictors of your own that ``config`` names, by their names.

    Raises:
        UserError: one cannot be imported, or is no ``torch.nn.Module``.
    """
    named = {target: config.predictor(target) for target in TARGETS}
    return {
        str(section.predictor.get("class_path")): import_predictor(section.predictor, f"{target}.predictor")
        for target, section in named.items()
        if section.enabled and section.predictor is not None
    }


def check_low_rank_only(config: RunConfig) -> None:
    """Refuse what is made for low-rank predictors only, where a target has a predictor of another class.

    Raises:
        UserError: such a setting, by name.
    """
    for target in TARGETS:
        section, mlp = config.predictor(target), target == Target.MLP
        if not section.enabled or section.predictor is None:
            continue
        name = f"{target}.predictor {section.predictor.get('class_path')}"
        dtype = config.calibrate.dtype_of(target)
        if dtype in SCALED:
            raise UserError(f"calibrate.dtype {dtype} is for low-rank predictors, not for {name}; use float16")
        if mlp and config.calibrate.cascade is not None:
            raise UserError(f"calibrate.cascade is for low-rank predictors, not for {name}; leave it out")
        if mlp and config.tune.steps:
            raise UserError(f"tune.steps tunes low-rank predictors, not {name}; set tune.steps to 0")


def check_classes(config: RunConfig, shape: ModelDims) -> None:
    """Import and try what the configuration names by class_path, before any long work.

    Raises:
        UserError: a class that cannot be imported or called so. A predictor whose logits have another shape than (...,
    n_out). A loss that gives no scalar with a gradient, or a setting for low-rank predictors only.
    """
    check_low_rank_only(config)
    if isinstance(config.text.source, dict):
        import_text(config.text.source)
    for target in TARGETS:
        section = config.predictor(target)
        if not section.enabled or (section.predictor is None and isinstance(section.loss, str)):
            continue
        predictor = make_predictor(config, UnitKey(0, target), shape.d_model, shape.units(target))
        check_loss(section.loss, f"{target}.loss", predictor, shape.d_model)


def check_loss(named: str | dict[str, Any], key: str, predictor: nn.Module, d_in: int) -> None:
    """Give the loss logits of two random rows: it must return a scalar through which gradients reach ``predictor``.

    Raises:
        UserError: it does not.
    """
    inputs = torch.randn(2, d_in, dtype=torch.float32)
    logits = predictor.eval()(inputs)
    active = torch.rand(logits.shape, dtype=torch.float32) < 0.5
    loss = get_loss(named, key)(logits, Batch(inputs, active, torch.rand(logits.shape, dtype=torch.float32) * active))
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
        got = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        got += " without a gradient" if got == "()" else ""
        name = named if isinstance(named, str) else named["class_path"]
        raise UserError(f"{key} {name} must return a scalar tensor that depends on the logits, got {got}")
