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
    made, usual = mlp.__init__, mlp.forward

    @functools.wraps(made)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        made(self, config, *args, **kwargs)
        if isinstance(self.act_fn, FATReLU):
            self.act_fn.threshold = LlamaFamily().threshold(config.to_dict())

    @functools.wraps(usual)
    def forward(self: Any, x: Tensor) -> Tensor:
        if not isinstance(self.act_fn, DReLU):
            return usual(self, x)  # type: ignore[no-any-return]
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))
        return out

    mlp.__init__, mlp.forward = __init__, forward


ACT2FN.update({"fatrelu": FATReLU, "drelu": DReLU})
