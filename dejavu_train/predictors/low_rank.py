"""The low-rank predictor: logits = up(act(down x)) + bias, one logit per neuron or head.

Its `down` (rank, d) comes first and its `up` (n, rank) second. Both are the predictor's own, not the MLP's.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.quantization import SCALED, as_trained

Nonlinearity = Literal["none", "relu"]


class LowRankPredictor(nn.Module):
    """Two thin matrices that say which units of a block matter for a token (Deja Vu, section 4.1).

    Args:
        d_in: width of the input site.
        rank: width of the bottleneck, at most ``d_in``.
        n_out: number of units (neurons or heads).
        nonlinearity: ``"none"`` (as the original) or ``"relu"`` between the two matrices.
        bias: one offset per unit. Without it the predictor cannot express how rare a unit is.

    Raises:
        UserError: a rank that does not fit, or an unknown nonlinearity.
    """

    def __init__(
        self, d_in: int, rank: int, n_out: int, nonlinearity: Nonlinearity = "none", bias: bool = True
    ) -> None:
        super().__init__()
        if not 1 <= rank <= d_in:
            raise UserError(f"predictor rank must lie between 1 and the input width {d_in}, got {rank}")
        if nonlinearity not in ("none", "relu"):
            raise UserError(f"predictor nonlinearity must be none or relu, got {nonlinearity}")
        self.nonlinearity = nonlinearity
        self.rounded_to: str | None = None
        """int8 or int4: the forward pass sees the weights as they will be stored, gradients pass through."""
        self.down = nn.Parameter(torch.empty(rank, d_in, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(n_out, rank, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(n_out, dtype=torch.float32)) if bias else None
        nn.init.normal_(self.down, std=d_in**-0.5)
        nn.init.normal_(self.up, std=rank**-0.5)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def project(self, x: Tensor) -> Tensor:
        """act(down x) (..., rank) of ``x`` (..., d_in), in the dtype of ``x``."""
        down = as_trained(self.down, self.rounded_to) if self.rounded_to in SCALED else self.down
        hidden = F.linear(x, down.to(x.dtype))
        return F.relu(hidden) if self.nonlinearity == "relu" else hidden

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., d_in) to logits (..., n_out), in the dtype of ``x``."""
        up = as_trained(self.up, self.rounded_to) if self.rounded_to in SCALED else self.up
        return F.linear(self.project(x), up.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@torch.no_grad()
def svd_init(
    predictor: LowRankPredictor, weight: Tensor, weight_bias: Tensor | None, covariance: Tensor | None = None
) -> None:
    """Start ``predictor`` at the best rank-r approximation of the pre-activations ``weight @ x + weight_bias``.

    Args:
        predictor: changed in place.
        weight: (n_out, d_in), for the MLP that of the map into its neurons.
        weight_bias: (n_out,) or None.
        covariance: (d_in, d_in) second moment of the inputs. With it the error is minimised over the inputs'
            distribution, ||(W - W_r) C^(1/2)||, instead of over all directions alike. Computed on the weight's device.
    """
    # By the eigenvectors of the small Gram matrix rather than an SVD of (n_out, d_in): a second instead of minutes at
    # d_in = 4096. Squaring costs no precision that matters in float64.
    weight = weight.detach().double()
    if covariance is None:
        root = inverse_root = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    else:
        eigenvalues, vectors = torch.linalg.eigh(covariance.to(weight))
        # Directions the data never takes would otherwise be divided by zero.
        eigenvalues = eigenvalues.clamp_min(eigenvalues.max() * 1e-6)
        root = vectors * eigenvalues.sqrt() @ vectors.T
        inverse_root = vectors / eigenvalues.sqrt() @ vectors.T
    whitened = weight @ root
    squares, right = torch.linalg.eigh(whitened.T @ whitened)
    squares, right = squares.flip(0)[: predictor.rank], right.flip(1)[:, : predictor.rank]
    # With fewer units than the rank there are directions without weight; their rows of `down` stay as they were.
    useful = squares > squares[0] * 1e-12
    scale = squares[useful].sqrt().sqrt()
    right = right[:, useful]
    predictor.down[useful.to(predictor.down.device)] = (scale[:, None] * (right.T @ inverse_root)).to(predictor.down)
    predictor.up.zero_()
    predictor.up[:, useful.to(predictor.up.device)] = (whitened @ right / scale).to(predictor.up)
    if predictor.bias is not None and weight_bias is not None:
        predictor.bias.copy_(weight_bias.detach())
