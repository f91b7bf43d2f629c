"""A low-rank predictor: its two matrices, and with them what decides and what is filled."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.mlp.predict import norm_sums


@dataclass(frozen=True)
class PredictorWeights:
    """down (rank, d), up (n, rank), bias (n) or None. In fp32, fp16, bf16, or int8 / fp8 e4m3 with fp32 row scales.

    For up to eight rows also as nibbles, uint8 (rank, ceil(d / 2)) and (n, ceil(rank / 2)), see `codes`. For several
    rows of fp16 and of widths that `limits.takes_nibbles`.

    sums: of down with the LayerNorm in front of it, where that is known (`with_norm`): a shorter kernel for one row.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None = None
    down_scale: Tensor | None = None
    up_scale: Tensor | None = None
    relu: bool = False
    sums: tuple[Tensor, Tensor] | None = None

    def with_norm(self, ln: LayerNormWeights) -> "PredictorWeights":
        """For inputs that `ln` normalises: `predict_select` must then be called with this LayerNorm."""
        return replace(self, sums=norm_sums(self.down, ln))

    def quantized(self, dtype: torch.dtype) -> "PredictorWeights":
        """A copy in int8 or float8_e4m3fn with one scale per row."""
        down, down_scale = quantize_rows(self.down, dtype)
        up, up_scale = quantize_rows(self.up, dtype)
        return PredictorWeights(down, up, self.bias, down_scale, up_scale, self.relu)


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight (n, d) -> (n, d) int8 or float8_e4m3fn, scales (n,) fp32, weight ~ quantized * scale[:, None]."""
    limit = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}.get(dtype)
    if limit is None:
        raise ValueError(f"rows are quantised to int8 or float8_e4m3fn, not {dtype}")
    largest = weight.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    scaled = weight.float() / scale[:, None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


@dataclass(frozen=True)
class Predictor:
    """A predictor in use: which rows it selects, and where it says so.

    threshold: (1,) fp32 on the device, a row is selected where its logit is larger.
    selection: receives the selected rows.
    hidden: (B, rank) fp32, scratch between the two products.
    top_k: select exactly that many per row instead (ties to the lower index) by a sort: exact, and slow.
    listed: ids (n) and count (1) int32, or None. They receive the list without gaps as well, in no particular order.
        `select.lists` says where kernels can leave it.
    """

    weights: PredictorWeights
    threshold: Tensor
    selection: Selection
    hidden: Tensor
    top_k: int | None = None
    listed: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        weights: PredictorWeights,
        threshold: float | Tensor,
        selection: Selection,
        batch: int = 1,
        top_k: int | None = None,
        listed: tuple[Tensor, Tensor] | None = None,
    ) -> "Predictor":
        """With scratch of its own, for `batch` rows."""
        device = weights.down.device
        hidden = torch.zeros(batch, len(weights.down), dtype=torch.float32, device=device)
        if not isinstance(threshold, Tensor):
            threshold = torch.tensor([threshold], dtype=torch.float32, device=device)
        return cls(weights, threshold, selection, hidden, top_k, listed)
