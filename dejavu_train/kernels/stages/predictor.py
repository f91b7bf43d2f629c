"""Predictors: their matrices, and with them what decides and what is filled."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_tensor, require
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.codes import CODE_TYPES, stored_width, unscaled

Sums: TypeAlias = tuple[Tensor, Tensor]


def norm_sums(weight: Tensor, ln: LayerNormWeights) -> Sums:
    """Sums of every row of weight (n, d) with the LayerNorm's weight and bias: (n,) fp32 each, without scales."""
    both = torch.stack(ln.folded, dim=1).float()
    # In parts: a wide copy of a whole fc1 may not fit beside the model.
    parts = (unscaled(part, None, torch.float32, len(both)) for part in weight.split(4096))
    gains, shifts = torch.cat([part @ both for part in parts]).T.contiguous()
    return gains, shifts


@dataclass(frozen=True)
class PredictorWeights:
    """down (rank, d), up (n, rank), bias (n) or None. In fp32, fp16, bf16, or int8 with fp32 row scales.

    For up to eight rows also as nibbles, uint8 (rank, ceil(d / 2)) and (n, ceil(rank / 2)), see `formats.codes`. For
    several rows of fp16 and of widths that `limits.takes_nibbles`.

    sums: of down with the LayerNorm in front of it, where that is known (`with_norm`), for the kernels of one row.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None = None
    down_scale: Tensor | None = None
    up_scale: Tensor | None = None
    relu: bool = False
    sums: Sums | None = None

    def with_norm(self, ln: LayerNormWeights) -> "PredictorWeights":
        """For inputs that `ln` normalises: kernels of one row must then be called with this LayerNorm."""
        return replace(self, sums=norm_sums(self.down, ln))


def down_reference(n: Tensor, predictor: PredictorWeights) -> Tensor:
    """The first half in plain torch: (B, rank) of normalised n (B, d), in its dtype."""
    hidden = n @ unscaled(predictor.down, predictor.down_scale, n.dtype, n.shape[1]).T
    return hidden.relu() if predictor.relu else hidden


@dataclass(frozen=True)
class Predictor:
    """A predictor in use: which rows it selects, and where it says so.

    threshold: (1,) fp32 on the device, a row is selected where its logit is larger.
    selection: receives the selected rows.
    hidden: (B, rank) fp32, scratch between the two products.
    products: how both matrices are multiplied.
    top_k: select exactly that many per row instead (ties to the lower index) by a sort: exact, and slow.
    listed: ids (n) and count (1) int32, or None. They receive the list without gaps as well, in no particular order.
        Only `Products.WORDS` with a threshold can leave it.
    """

    weights: PredictorWeights
    threshold: Tensor
    selection: Selection
    hidden: Tensor
    products: Products
    top_k: int | None = None
    listed: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        weights: PredictorWeights,
        threshold: float | Tensor,
        selection: Selection,
        products: Products,
        batch: int = 1,
        top_k: int | None = None,
        listed: tuple[Tensor, Tensor] | None = None,
    ) -> "Predictor":
        """With scratch of its own, for `batch` rows."""
        device = weights.down.device
        hidden = torch.zeros(batch, len(weights.down), dtype=torch.float32, device=device)
        if not isinstance(threshold, Tensor):
            threshold = torch.tensor([threshold], dtype=torch.float32, device=device)
        return cls(weights, threshold, selection, hidden, products, top_k, listed)


def check_matrix(name: str, weight: Tensor, scale: Tensor | None, shape: tuple[int, int], like: Tensor) -> None:
    """Raise ValueError where one of a predictor's matrices, numbers or codes, or its scales do not fit this shape."""
    n, columns = shape
    check_tensor(name, weight, (n, stored_width(weight, columns)), FLOAT_TYPES + CODE_TYPES, like)
    require(weight.dtype not in CODE_TYPES or scale is not None, f"a weight of {weight.dtype} needs a scale a row")
    if scale is not None:
        check_tensor(f"{name}_scale", scale, (n,), (torch.float32,), like)


def check_down(predictor: Predictor, batch: int, d: int) -> None:
    """Raise ValueError where a predictor's first half does not fit inputs (batch, d)."""
    own, hidden = predictor.weights, predictor.hidden
    check_tensor("hidden", hidden, (batch, len(own.down)), (torch.float32,), hidden)
    check_matrix("weight", own.down, own.down_scale, (len(own.down), d), hidden)


@dataclass(frozen=True)
class HeadPredictor:
    """A predictor of heads in one matrix, and what it fills.

    rows: (h, d). bias: (h,), threshold: (1,), both fp32. All three are None where the layer selects nothing itself.
    sums: of rows with the LayerNorm in front of them, where that is known.
    """

    rows: Tensor | None
    bias: Tensor | None
    threshold: Tensor | None
    selection: Selection
    sums: Sums | None = None

    def with_norm(self, ln: LayerNormWeights) -> "HeadPredictor":
        """For inputs that `ln` normalises."""
        return self if self.rows is None else replace(self, sums=norm_sums(self.rows, ln))


@dataclass(frozen=True)
class HeadSite:
    """A predictor of heads, and what it reads: outputs of the norm `ln`, for batch rows in row_state (B) int32.

    The states are those of `common.row_state`.
    """

    predictor: HeadPredictor
    ln: LayerNormWeights
    row_state: Tensor

    @classmethod
    def of(cls, predictor: HeadPredictor, ln: LayerNormWeights, row_state: Tensor) -> "HeadSite":
        """With the sums that fold the norm into the predictor's rows."""
        return cls(predictor.with_norm(ln), ln, row_state)


def head_selection(n_heads: int, device: torch.device | str) -> Selection:
    """An empty selection of heads, one id a block. Kernels write its row_bits alone."""
    selection = Selection.empty(n_heads, device, block=1)
    selection.ids.copy_(torch.arange(n_heads, dtype=torch.int32))
    return selection
