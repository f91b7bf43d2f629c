"""Routed experts of a mixture, which are no target: they stand beside its shared expert."""

from typing import Any

from torch import Tensor, nn


class RoutedExperts(nn.Module):
    """Sum of a mixture of Nemotron-H without its shared expert, by the mixture's own modules."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.router, self.experts = mixture.gate, mixture.experts
        self.into, self.out_of = mixture.fc1_latent_proj, mixture.fc2_latent_proj

    def forward(self, mlp_in: Tensor) -> Tensor:
        """(..., d) for mlp_in (..., d)."""
        _, weights, chosen = self.router(mlp_in)
        added: Tensor = self.out_of(self.experts(self.into(mlp_in.flatten(0, -2)), chosen, weights))
        return added.view_as(mlp_in)
