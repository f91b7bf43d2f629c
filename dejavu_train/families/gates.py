"""Gates that transformers does not have: FATReLU and dReLU. Importing this lets ``hidden_act`` name them."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from dejavu_train.families.dims import Activation


class FATReLU(nn.Module):
    """x where it lies above ``threshold``, else 0."""

    def __init__(self, threshold: float = 0.01) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return F.threshold(x, self.threshold, 0.0)


class DReLU(nn.ReLU):
    """ReLU of a gate, where the other map's output gets one too."""


class _ActivatesUp:
    """Of an MLP: the forward pass with dReLU."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))
        return made


def with_gates(mlp: Any, kind: Activation, threshold: float) -> None:
    """Have an MLP of Llama or Mistral compute what ``kind`` says. A second call changes nothing."""
    if isinstance(mlp.act_fn, FATReLU):
        mlp.act_fn.threshold = threshold
    if kind == Activation.DRELU and not isinstance(mlp, _ActivatesUp):
        mlp.__class__ = type(f"DReLU{type(mlp).__name__}", (_ActivatesUp, type(mlp)), {"__module__": __name__})


ACT2FN.update({"fatrelu": FATReLU, "drelu": DReLU})
