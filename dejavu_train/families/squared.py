"""Scaling that squared ReLU needs in fp16, whose largest number is less than 256 squared."""

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ReLUSquaredActivation


class WideSquare(torch.nn.Module):
    """Squared ReLU whose squares are fp32 where x is fp16: 256 squared is more than fp16 holds."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        return (x.float() if x.dtype == torch.float16 else x).square()


def widened(activate: Any) -> Any:
    """The activation of a layer, with squares that fp16 does not bound. One of another class stays as it is."""
    return WideSquare() if type(activate) is ReLUSquaredActivation else activate
