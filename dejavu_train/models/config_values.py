"""Values of a model's config.json, read without loading torch: what can be checked of a run at once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.families import ModelDims, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hub import model_folder

INT4 = "dejavu_int4"  # quant_method of a config.json whose weights lie as 4-bit rows, see int4.py
VLLM = "dejavu"  # quant_method of a model beside its predictors, as vLLM reads them: the weights are numbers
CONVERTED = ("gptq", "awq", "compressed-tensors", "bitsandbytes")  # quant_methods that `quantize` reads


def read_dims(name: str, revision: str | None = None) -> ModelDims:
    """The sizes of the model ``name``, a folder or hub id.

    Raises:
        UserError: nothing there, or as :func:`dejavu_train.families.dims_of`.
    """
    return dims_of(read_values(name, revision), name)


def read_values(name: str, revision: str | None = None) -> dict[str, Any]:
    """Read the config.json of the model ``name``, a folder or hub id.

    Raises:
        UserError: nothing there, or no model type in it.
    """
    values = config_values(model_folder(name, revision=revision))
    if "model_type" not in values:
        raise UserError(f"the config.json of {name} names no model_type; give the config that belongs to the weights")
    return values


def quant_method(values: Mapping[str, Any]) -> str | None:
    """By what method the weights of a config.json are quantised. None: they are not."""
    quantization = values.get("quantization_config")
    method = str(quantization.get("quant_method", "unknown")) if isinstance(quantization, dict) else VLLM
    return None if method == VLLM else method


def refuse_foreign(values: Mapping[str, Any], name: str) -> None:
    """Raise :class:`UserError` for weights that were quantised by another method than this package's, or in a width of
    codes that it does not write."""
    method = quant_method(values)
    if method in CONVERTED:
        raise UserError(
            f"the weights of {name} are quantised by {method}; convert them first: python -m dejavu_train.quantize"
            f" --model {name} --output FOLDER --quantizer rtn"
        )
    refuse_unread(values, name)


def refuse_unread(values: Mapping[str, Any], name: str) -> None:
    """The same for weights that ``quantize`` does not convert either."""
    method = quant_method(values)
    if method not in (None, INT4, *CONVERTED):
        raise UserError(
            f"the weights of {name} are quantised by {method}, which is not read here; give the model that they were"
            f" made of, or one quantised by {', '.join(CONVERTED)}"
        )
    bits = values["quantization_config"].get("bits", 4) if method == INT4 else 4
    if bits != 4:
        raise UserError(
            f"config.json of {name} says {bits} bits under quantization_config, {INT4} has 4; take that file from where"
            " the weights are from"
        )


def _number(found: dict[str, Any]) -> Any:
    """The number that transformers writes as a mapping, such as infinity. Any other mapping stays one."""
    named = found.get("__float__") if len(found) == 1 else None
    return float(named) if named in ("Infinity", "-Infinity", "NaN") else found


def config_values(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read the config of {folder} ({error}); fetch it again, or save the model again"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"config.json of {folder} must hold keys and values, got {values}; fetch it again")
    return values
