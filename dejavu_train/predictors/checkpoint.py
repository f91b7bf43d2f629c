"""Reads a predictor as training left it, and gives its tensors as a bundle stores them.

Calibration scores the predictor through exactly these stored weights, so that a threshold means the same when deployed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.files import read_sealed, sha256_file
from dejavu_train.models.load import torch_dtype
from dejavu_train.predictors.custom import PredictorClass, build_custom, chosen_classes, custom_tensors, load_custom
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.quantization import SCALED, row_codes, stored_rows


class StoredPredictor(NamedTuple):
    """A finished predictor: the metadata of ``predictor.json``, and the predictor in fp32."""

    metadata: dict[str, Any]
    predictor: nn.Module


def check_predictor(folder: str | Path) -> dict[str, Any]:
    """The metadata of a finished predictor, after comparing it and the tensors with their digests.

    Raises:
        UserError: missing, damaged or changed.
    """
    folder = Path(folder)
    metadata = read_sealed(folder / "predictor.json", "a finished predictor")
    path = folder / "predictor.safetensors"
    if not path.is_file():
        raise UserError(f"the predictor in {folder} lacks {path.name}; delete the folder, and it is trained anew")
    if metadata.get("sha256") not in (None, sha256_file(path)):
        raise UserError(f"{path} was changed since it was written; delete the folder, and it is trained anew")
    return metadata


def read_predictor(folder: str | Path, classes: Mapping[str, PredictorClass] | None = None) -> StoredPredictor:
    """Read ``predictor.json`` and ``predictor.safetensors``.

    Args:
        classes: by name, of predictors that are no :class:`LowRankPredictor`.

    Raises:
        UserError: missing, damaged, or tensors that do not fit the metadata.
    """
    folder = Path(folder)
    metadata = check_predictor(folder)
    try:
        tensors = load_file(folder / "predictor.safetensors")
        predictor = build_predictor(metadata, classes or {}, f"the predictor in {folder}")
        predictor.load_state_dict(tensors)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the predictor in {folder} is damaged ({first_line(error)}); train it again") from None
    return StoredPredictor(metadata, predictor.requires_grad_(False).eval())


def build_predictor(metadata: Mapping[str, Any], classes: Mapping[str, PredictorClass], where: str) -> nn.Module:
    """A predictor of the kind that ``metadata`` (of a checkpoint or a bundle's spec) says, with first values."""
    if metadata["kind"] == "custom":
        name = metadata["class_path"]
        kind = chosen_classes({name}, classes, where)[name]
        return build_custom(kind, dict(metadata), metadata["d_in"], metadata["n_out"], where)
    sizes = (metadata["d_in"], metadata["rank"], metadata["n_out"])
    return LowRankPredictor(*sizes, metadata["nonlinearity"], metadata["bias"])


def stored_tensors(predictor: nn.Module, dtype: str) -> dict[str, Tensor]:
    """The tensors of a bundle spec on the CPU: ``down`` (rank, d_in), ``up`` (n_out, rank), ``bias`` (n_out).

    With ``int8`` and ``int4`` the matrices come with ``down_scale`` (rank) and ``up_scale`` (n_out), the bias in fp16.
    Of any other module those of :func:`custom_tensors`.
    """
    if not isinstance(predictor, LowRankPredictor):
        return custom_tensors(predictor, torch_dtype(dtype))
    tensors: dict[str, Tensor] = {}
    for name, parameter in predictor.named_parameters():
        weight = parameter.data.cpu()
        if dtype not in SCALED:
            tensors[name] = weight.to(torch_dtype(dtype))
        elif name == "bias":
            tensors[name] = weight.half()
        else:
            tensors[name], tensors[f"{name}_scale"] = stored_rows(weight, dtype)
    return tensors


@torch.no_grad()
def as_stored(predictor: nn.Module, tensors: Mapping[str, Tensor], where: str = "this bundle") -> nn.Module:
    """Set ``predictor`` to what ``tensors``, of :func:`stored_tensors`, read back as, in fp32. Returns it."""
    if not isinstance(predictor, LowRankPredictor):
        return load_custom(predictor, tensors, where)
    for name, parameter in predictor.named_parameters():
        scale = tensors.get(f"{name}_scale")
        if scale is None:
            parameter.copy_(tensors[name])
        else:
            parameter.copy_(row_codes(tensors[name], parameter.shape[1]) * scale.float()[:, None])
    return predictor
