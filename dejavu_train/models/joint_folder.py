"""Has ``AutoModelForCausalLM`` say where it takes a model and its bundle, saved together, for the dense model alone."""

import functools
import logging
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

BUNDLE = "predictors/bundle.json"  # as SparseOPTForCausalLM.save_pretrained writes it

logger = logging.getLogger(__name__)
_load = AutoModelForCausalLM.from_pretrained.__func__


@functools.wraps(_load)
def _from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
    model = _load(cls, pretrained_model_name_or_path, *args, **kwargs)
    if (Path(str(pretrained_model_name_or_path)) / BUNDLE).is_file():
        logger.warning(
            "%s is loaded as the dense OPT: AutoModelForCausalLM does not read the bundle in its folder predictors;"
            " dejavu_train.SparseOPTForCausalLM.from_pretrained does",
            pretrained_model_name_or_path,
        )
    return model


AutoModelForCausalLM.from_pretrained = classmethod(_from_pretrained)
