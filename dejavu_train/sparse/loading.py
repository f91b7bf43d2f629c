"""Finds a model and its bundle by what ``from_pretrained`` is given, compares them, and loads the dense model.

:func:`adopt` makes a model of another class of a loaded one.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import METADATA, PREDICTORS_FOLDER
from dejavu_train.engine.ranks.group import group_of_launcher, launched
from dejavu_train.engine.ranks.part import RANKS
from dejavu_train.families import dims_of
from dejavu_train.families.base import dense_type
from dejavu_train.families.plain import exchanged_forward
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_values
from dejavu_train.models.hub import model_folder
from dejavu_train.models.load import load_with_info, weight_hash
from dejavu_train.models.stored import stored_files
from dejavu_train.predictors.custom import PredictorClass
from dejavu_train.sparse.keywords import check_config, hub_keywords, refuse_keywords, sort_keywords

logger = logging.getLogger(__name__)

Classes = PredictorClass | Mapping[str, PredictorClass] | None


@dataclasses.dataclass(frozen=True)
class LoadedParts:
    """The dense model, its bundle, and what transformers says of the loading."""

    dense: PreTrainedModel
    bundle: Bundle
    info: dict[str, Any]


def load_together(
    name: str,
    predictors: Bundle | str | Path | None,
    dtype: str | torch.dtype | None,
    device: str | int | torch.device | None,
    device_map: Any,
    revision: str | None,
    classes: Classes,
    keywords: Mapping[str, Any],
    caller: str,
) -> LoadedParts:
    """As ``SparseCausalLM.from_pretrained``, which has the parameters' meaning.

    Args:
        keywords: of transformers, see ``keywords.py``.
        caller: the class, to show.
    Raises:
        UserError: no such model or bundle, a bundle that is not the model's, a keyword that is unknown or refused.
    """
    refuse_keywords(keywords, caller)
    hub = {"revision": revision, **hub_keywords(keywords)}
    folder = model_folder(name, str(keywords.get("subfolder") or ""), **hub)
    values = read_values(str(folder))
    kind = dense_type(values["model_type"])
    check_config(keywords.get("config"), dims_of(values, str(folder)), name, kind)
    asked = sort_keywords(keywords, caller, kind)
    bundle = _find_bundle(predictors, name, folder, classes, asked.hub)
    stored_files(name, asked.subfolder, **hub)  # fetched from the hub, where they are not there yet
    bundle.check_model(str(folder))
    info: dict[str, Any] = {}
    if launched():
        if device_map is not None or asked.attributes or asked.options:
            raise UserError(
                f"under torchrun {caller}.from_pretrained takes name, predictors, backend, sparse_from, dtype"
                " and hub keywords alone; leave the others out"
            )
        from dejavu_train.engine.ranks.load import load_rank  # imports triton

        dense = load_rank(str(folder), bundle, dtype, group_of_launcher(None if device == "cpu" else device))
    else:
        dense, info = load_with_info(str(folder), dtype, device, device_map, None, asked.attributes, **asked.options)
    dense.config.name_or_path = name
    return LoadedParts(dense, bundle, info)


def _find_bundle(
    predictors: Bundle | str | Path | None,
    name: str,
    folder: Path,
    classes: Classes,
    hub: Mapping[str, Any],
) -> Bundle:
    """The bundle that was given, or the one in the model's folder. One without predictors where there is none."""
    if isinstance(predictors, Bundle):
        return predictors
    if predictors is not None:
        return Bundle.from_pretrained(predictors, predictor_class=classes, **hub)
    if not (folder / PREDICTORS_FOLDER / METADATA).is_file():
        logger.info("%s holds no predictors: all units are computed, and rows of silent neurons are not read", name)
        return Bundle.exact(name, dims_of(read_values(str(folder)), str(folder)), weight_hash(str(folder)))
    bundle = Bundle.from_pretrained(folder / PREDICTORS_FOLDER, predictor_class=classes)
    return bundle if Path(name).is_dir() else dataclasses.replace(bundle, model=name)


def wrapped_class(cls: Any, model: Any) -> type[PreTrainedModel]:
    """The dense class of a model that ``cls``, a sparse class, may wrap.

    Raises:
        UserError: no model of that class, or one with a ``forward`` of its own.
    """
    dense = cls.dense_class or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(getattr(model, "config", None)), None)
    if dense is None or not isinstance(model, dense):
        wanted = "a causal language model of transformers" if dense is None else f"an {dense.__name__}"
        family = type(getattr(model, "config", None)) in MODEL_FOR_CAUSAL_LM_MAPPING
        other = "SparseCausalLM takes every family" if family else "from_pretrained loads one by its name"
        raise UserError(
            f"{cls.__name__} takes {wanted}, got a {type(model).__name__}; {other}, and of a model that wraps one give"
            " the one inside"
        )
    if type(model).forward not in (dense.forward, cls.forward) or exchanged_forward(model):
        raise UserError(
            f"{cls.__name__}.from_model takes the layers and the head of a model, and this {type(model).__name__}"
            " has a forward of its own around them; put that into a module inside, or into a hook"
        )
    return dense


def adopt(cls: type[PreTrainedModel], model: PreTrainedModel) -> Any:
    """A model of class ``cls`` with the modules of ``model``: nothing is copied, nothing initialised."""
    with torch.device("meta"):
        adopted = cls(model.config)
    for name, module in model.named_children():
        setattr(adopted, name, module)
    adopted.generation_config = model.generation_config
    for name, hooks in vars(model).items():
        if name.startswith("_forward_"):
            setattr(adopted, name, hooks)  # the same, so that a handle removes them from both
    kept = ["hf_device_map", "loaded_from", RANKS]
    if getattr(model, "hf_quantizer", None) is not None:  # 4-bit weights are saved under the names they were read by
        kept += ["hf_quantizer", "_weight_conversions"]
    for name in kept:
        if hasattr(model, name):
            setattr(adopted, name, getattr(model, name))
    return adopted
