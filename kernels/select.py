"""Predict and select: logits = up @ act(down @ x) + bias; a row of weights is selected where logit > threshold.

x (B, d); down (rank, d); up (n, rank); bias (n). A NaN logit is never selected. The result is a list of ids on the
device, made without sorting, atomics or a host synchronisation: block p owns rows [p * block, (p + 1) * block), writes its
selected ids in ascending order to slots [p * block, p * block + counts[p]) and its count. Consumers sum the counts
themselves. For B > 1 the list is the union of the batch's sets; bit b of row_bits[i] says that row b selected i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layer_norm import LayerNormWeights, layer_norm_reference


@dataclass(frozen=True)
class Selection:
    """Selected rows of n, as block-local ranges on the device.

    ids: (n_blocks * block,) int32, slots beyond a block's count are undefined; counts: (n_blocks,) int32;
    row_bits: (n,) int32, bit b = selected by batch row b (defined for every i, also unselected ones).
    """

    n: int
    block: int
    ids: Tensor
    counts: Tensor
    row_bits: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str, block: int = 64) -> "Selection":
        """An empty selection of n rows with fresh buffers."""
        n_blocks = -(-n // block)
        ids = torch.zeros(n_blocks * block, dtype=torch.int32, device=device)
        counts = torch.zeros(n_blocks, dtype=torch.int32, device=device)
        return cls(n, block, ids, counts, torch.zeros(n, dtype=torch.int32, device=device))

    @classmethod
    def from_mask(cls, mask: Tensor, block: int = 64) -> "Selection":
        """mask: (B, n) bool with B <= 32."""
        selection = cls.empty(mask.shape[1], mask.device, block)
        selection.set_mask(mask)
        return selection

    def set_mask(self, mask: Tensor) -> None:
        """Fill from mask (B, n) bool; torch operations without a host synchronisation, so it can be captured."""
        batch, n = mask.shape
        if n != self.n:
            raise ValueError(f"the mask has {n} columns, the selection {self.n} rows")
        if batch > 32:
            raise ValueError(f"a selection holds at most 32 batch rows, got {batch}")
        shifts = torch.arange(batch, device=mask.device, dtype=torch.int64)
        bits = (mask.to(torch.int64) << shifts[:, None]).sum(0)
        self.row_bits.copy_(torch.where(bits >= 2**31, bits - 2**32, bits))
        n_blocks = self.counts.numel()
        wide = torch.zeros(n_blocks * self.block, dtype=torch.bool, device=mask.device)
        wide[:n] = mask.any(0)
        blocks = wide.view(n_blocks, self.block)
        self.counts.copy_(blocks.sum(1))
        # A stable sort of "not selected" moves the selected columns to the front in ascending order.
        order = torch.sort((~blocks).to(torch.int8), dim=1, stable=True).indices
        first = torch.arange(n_blocks, device=mask.device)[:, None] * self.block
        self.ids.copy_((order + first).flatten())

    def indices(self) -> Tensor:
        """The selected rows, (count,) int64 ascending. Synchronises with the host: for tests and references."""
        slots = torch.arange(self.block, device=self.ids.device)
        valid = slots[None, :] < self.counts[:, None]
        return self.ids.view(-1, self.block)[valid].long()

    def to_mask(self, batch: int) -> Tensor:
        """(B, n) bool, from row_bits."""
        shifts = torch.arange(batch, device=self.row_bits.device)
        return ((self.row_bits.long()[None, :] >> shifts[:, None]) & 1).bool()


@dataclass(frozen=True)
class PredictorWeights:
    """down (rank, d), up (n, rank), bias (n) fp32 or None; fp32, fp16, bf16, or int8 / fp8 e4m3 with fp32 scales per row."""

    down: Tensor
    up: Tensor
    bias: Tensor | None = None
    down_scale: Tensor | None = None
    up_scale: Tensor | None = None
    relu: bool = False

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


def predict_reference(x: Tensor, predictor: PredictorWeights, ln: LayerNormWeights | None = None) -> Tensor:
    """Logits (B, n) in plain torch; fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if ln is not None:
        x = layer_norm_reference(x, ln, wide)
    down = (
        predictor.down.to(wide)
        if predictor.down_scale is None
        else (predictor.down.to(wide) * predictor.down_scale[:, None].to(wide))
    )
    up = (
        predictor.up.to(wide)
        if predictor.up_scale is None
        else (predictor.up.to(wide) * predictor.up_scale[:, None].to(wide))
    )
    hidden = x.to(wide) @ down.T
    if predictor.relu:
        hidden = hidden.relu()
    logits = hidden @ up.T
    return logits if predictor.bias is None else logits + predictor.bias.to(wide)


def predict_select_reference(
    x: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """The selection as a mask (B, n) bool in plain torch."""
    logits = predict_reference(x, predictor, ln)
    if top_k is None:
        mask = logits > threshold
    else:
        order = torch.sort(logits.nan_to_num(nan=float("-inf")), dim=1, descending=True, stable=True).indices
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order[:, :top_k], True) & ~logits.isnan()
    if row_state is not None:
        mask = (mask & (row_state[:, None] > 0)) | (row_state[:, None] == 2)
    return mask


def predict_select(
    x: Tensor,
    predictor: PredictorWeights,
    threshold: float | Tensor,
    out: Selection,
    ln: LayerNormWeights | None = None,
    row_state: Tensor | None = None,
    top_k: int | None = None,
    hidden: Tensor | None = None,
    normalised_out: Tensor | None = None,
    logits_out: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Run the predictor on x (B, d) and write the selected rows to `out`; two kernels.

    threshold: a number, or a (1,) fp32 tensor on the device. row_state: (B,) int32 on the device, 0 = the row selects
    nothing (finished), 1 = by its logits, 2 = everything (a dense position). hidden: (B, rank) fp32 scratch.
    normalised_out: (B, d), receives LN(x), so that fc1 need not normalise again. logits_out: (B, n) fp32.
    top_k selects exactly that many per row (ties to the lower index) by a sort: exact, and slow.
    pdl: launch as programmatic dependents of the kernels before.
    """
    out.set_mask(predict_select_reference(x, predictor, threshold, ln, row_state, top_k))
    if normalised_out is not None:
        normalised_out.copy_(layer_norm_reference(x, ln) if ln is not None else x)
    if logits_out is not None:
        logits_out.copy_(predict_reference(x, predictor, ln))
