"""Has ``AutoConfig`` know the config.json that ``SparseCausalLM.save_pretrained`` writes.

Only when it is asked for one: the dense configuration may be half imported while this module is.
"""

import functools
from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig

_read = AutoConfig.from_pretrained.__func__


@functools.wraps(_read)
def _from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from dejavu_train.sparse.joint_config import register_types

    register_types()
    return _read(cls, *args, **kwargs)


AutoConfig.from_pretrained = classmethod(_from_pretrained)
