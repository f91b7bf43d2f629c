"""Has ``AutoModelForCausalLM`` load a model and its bundle, saved together, as the sparse model that they are."""

import functools
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

_load = AutoModelForCausalLM.from_pretrained.__func__


@functools.wraps(_load)
def _from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
    if (Path(str(pretrained_model_name_or_path)) / "predictors" / "bundle.json").is_file():
        from dejavu_train.sparse.model import SparseOPTForCausalLM  # only now: it loads torch and much of transformers

        return SparseOPTForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    return _load(cls, pretrained_model_name_or_path, *args, **kwargs)


AutoModelForCausalLM.from_pretrained = classmethod(_from_pretrained)
