"""Has ``AutoModelForCausalLM`` load a model and its bundle, saved together, as the sparse model that they are."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from dejavu_train.families.base import SAVED_TOGETHER
from dejavu_train.models.hub import KEYWORDS, looks_local

_load = AutoModelForCausalLM.from_pretrained.__func__


@functools.wraps(_load)
def _from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
    if _holds_bundle(str(pretrained_model_name_or_path), kwargs):
        from dejavu_train.sparse.model import SparseCausalLM  # only now: it loads torch and much of transformers

        return SparseCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    return _load(cls, pretrained_model_name_or_path, *args, **kwargs)


def _holds_bundle(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a folder has a bundle in it, or a model the type of those that were saved with one, or without any."""
    subfolder = kwargs.get("subfolder") or ""
    if (Path(name) / subfolder / "predictors" / "bundle.json").is_file():
        return True
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config.model_type.startswith(SAVED_TOGETHER)
    if not Path(name).is_dir() and looks_local(name):
        return False
    hub = {key: kwargs[key] for key in (*KEYWORDS, "subfolder") if kwargs.get(key) is not None}
    try:
        values, _ = PreTrainedConfig.get_config_dict(name, **hub)
    except (OSError, ValueError):
        return False  # transformers says what is wrong
    return str(values.get("model_type")).startswith(SAVED_TOGETHER)


AutoModelForCausalLM.from_pretrained = classmethod(_from_pretrained)
