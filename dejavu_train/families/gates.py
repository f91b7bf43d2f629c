"""Gates that transformers does not have: FATReLU and dReLU. Importing this lets ``hidden_act`` name them.

Whatever loads such a model, its MLPs compute what its config.json says: ``llama_gates`` and ``mistral_gates`` see to it
as soon as transformers has the classes.
"""

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from dejavu_train.families.llama import LlamaFamily


class FATReLU(nn.Module):
    """x where it lies above ``threshold``, else 0."""

    def __init__(self, threshold: float = 0.01) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return F.threshold(x, self.threshold, 0.0)


class DReLU(nn.ReLU):
    """ReLU of a gate, where the other map's output gets one too."""


def compute_gates(mlp: Any) -> None:
    """Have a class of MLPs, of Llama or of one that is called as it, compute these gates too."""
    made = mlp.__init__

    @functools.wraps(made)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        made(self, config, *args, **kwargs)
        if isinstance(self.act_fn, FATReLU):
            self.act_fn.threshold = LlamaFamily().threshold(config.to_dict())
        if isinstance(self.act_fn, DReLU):
            activate_both(self)

    mlp.__init__ = __init__


def activate_both(mlp: Any) -> None:
    """Have a gated MLP activate both maps' outputs. Its class is one whose source says so, since vLLM reads that."""
    mlp.act_fn = DReLU()
    kind: Any = type(mlp)
    mlp.__class__ = _class_of_both(kind)


@functools.cache
def _class_of_both(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"forward": _forward_of_both, "__reduce_ex__": _reduced})


def _reduced(self: Any, _protocol: Any) -> tuple[Any, ...]:
    return _empty_of_both, (type(self).__base__,), self.__dict__


def _empty_of_both(kind: Any) -> Any:
    made = _class_of_both(kind)
    return made.__new__(made)


def _forward_of_both(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))  # type: ignore[no-any-return]


ACT2FN.update({"fatrelu": FATReLU, "drelu": DReLU})
