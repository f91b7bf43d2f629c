"""Modules of Llama's whose outputs are multiplied with a number, as MiniCPM has them. Engines read the product."""

from typing import Any

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """Rows of ``weight``, each multiplied with ``factor``."""

    def __init__(self, *sizes: Any, factor: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        """Rows (..., d) of ids (...)."""
        return super().forward(ids) * self.factor


class ScaledRMSNorm(nn.Module):
    """Llama's RMSNorm over d columns, multiplied with ``factor``."""

    def __init__(self, columns: int, eps: float, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns, dtype=torch.get_default_dtype()))
        self.variance_epsilon, self.factor = eps, factor

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d), normed in fp32, in its own dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * self.factor * normed.to(x.dtype)
