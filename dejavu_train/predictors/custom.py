"""Your own predictor: a ``torch.nn.Module`` that a configuration or a caller names, see ``docs/guides/extend.md``.

It is built as ``MyPredictor(d_in=..., n_out=..., **init_args)`` and maps (..., d_in) to logits (..., n_out), one logit
per neuron or head. A bundle stores the entries of its ``state_dict`` and the name of its class. The class itself comes
from whoever reads the bundle.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.ground.class_path import bound_arguments, full_name, import_named
from dejavu_train.ground.errors import UserError

PredictorClass = type[nn.Module]
PREFIX = "predictor."  # of its tensors in a bundle, which has names of its own beside them


def import_predictor(value: Any, key: str) -> PredictorClass:
    """The class that ``value`` (``class_path``, ``init_args``) of the configuration's ``key`` names.

    Raises:
        UserError: it cannot be imported, or is no ``torch.nn.Module``.
    """
    kind = import_named(value, key)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UserError(f"{key}.class_path {value['class_path']} is no torch.nn.Module; name a class of one")
    return kind


def build_custom(kind: PredictorClass, value: dict[str, Any], d_in: int, n_out: int, key: str) -> nn.Module:
    """The predictor of one layer. One row is sent through it.

    Raises:
        UserError: ``init_args`` that the class does not take, or logits of another shape or dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # its class may name no dtype, and the program another default
    try:
        module = kind(**bound_arguments(kind, value, key, d_in=d_in, n_out=n_out))
    finally:
        torch.set_default_dtype(before)
    training = module.training
    module.eval()
    for leading in ((1,), (1, 1)):  # rows while training, (batch, positions) while selecting
        with torch.no_grad():
            logits = module(torch.zeros(*leading, d_in, dtype=torch.float32))
        expected = (*leading, n_out)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected or not logits.is_floating_point():
            got = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"{key}: {full_name(kind)} must map {(*leading, d_in)} to logits {expected}, one for each unit,"
                f" got {got}"
            )
    return module.train(training)


def custom_tensors(predictor: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Its ``state_dict`` as a bundle stores it, on the CPU: floating point in ``dtype``, anything else as it is."""
    return {
        PREFIX + name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in predictor.state_dict().items()
    }


def describe(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """[dtype, *shape] by name of the tensors of :func:`custom_tensors`."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }


def described_dtype(name: Any) -> torch.dtype:
    """The dtype that :func:`describe` called ``name``. Raises ``TypeError`` for no dtype."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def load_custom(predictor: nn.Module, tensors: Mapping[str, Tensor], where: str) -> nn.Module:
    """Set ``predictor`` to the tensors of :func:`custom_tensors`. Returns it.

    Raises:
        UserError: tensors that are not those of its class.
    """
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    try:
        predictor.load_state_dict(stored)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        name = type(predictor).__name__
        raise UserError(
            f"{where}: the stored tensors do not fit {name} ({reason}); pass the class that was trained"
        ) from None
    return predictor


def chosen_classes(
    named: set[str], given: PredictorClass | Mapping[str, PredictorClass] | None, where: str
) -> dict[str, PredictorClass]:
    """By name in the bundle the class that the caller gives for it. Nothing is imported by a name of the bundle.

    Args:
        named: the names that occur in the bundle.
        given: a class, where the bundle names one, or classes by those names.

    Raises:
        UserError: a class is missing.
    """
    if isinstance(given, type) and len(named) == 1:
        return {name: given for name in named}
    classes = dict(given) if isinstance(given, Mapping) else {}
    missing = sorted(named - set(classes))
    if missing:
        raise UserError(
            f"{where} holds predictors of the class {missing[0]}, which is not imported by its name: pass it,"
            f" predictor_class={{{missing[0]!r}: ...}} or --predictor.class_path={','.join(sorted(named))}"
        )
    return {name: classes[name] for name in named}
