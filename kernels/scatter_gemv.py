"""Rows of a transposed matrix summed by weight: y[b, j] = residual[b, j] + bias[j] + sum_i h[b, i] w_t[i, j] over listed i.

h is a `LiveRows` list (fc2 after the gathered fc1: rows of zero activations are never read), or a dense (B, n) with the rows
of a selection (the out-projection after attention over selected heads), or with all rows. w_t (n, d), sums in fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gather_gemv import LiveRows
from kernels.select import Selection


@dataclass(frozen=True)
class ScatterScratch:
    """Partial sums (splits, B, d) fp32 and one ticket per column stripe (int32, zero between calls)."""

    partials: Tensor
    tickets: Tensor

    @classmethod
    def empty(cls, batch: int, d: int, device: torch.device | str, max_splits: int = 64) -> "ScatterScratch":
        partials = torch.zeros(max_splits, batch, d, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(-(-d // 64), dtype=torch.int32, device=device))


def scatter_gemv_reference(
    h: Tensor, weight_t: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """(B, d) in plain torch from dense h (B, n); fp64 when h is fp64, else fp32."""
    wide = h.dtype if h.dtype == torch.float64 else torch.float32
    if mask is not None:
        h = torch.where(mask, h, torch.zeros_like(h))
    y = h.to(wide) @ weight_t.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y if residual is None else y + residual.to(wide)


def scatter_gemv(
    h: Tensor | LiveRows,
    weight_t: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    selection: Selection | None,
    out: Tensor,
    rows_per_id: int = 1,
    scratch: ScatterScratch | None = None,
    pdl: bool = False,
) -> None:
    """Sum the listed rows of weight_t (n, d) into out (B, d), one kernel, bitwise deterministic.

    h: `LiveRows` (selection None), or (B, n) fp32/fp16/bf16 with a selection of n / rows_per_id ids (rows that batch row b did not
    select count as zero for it), or with selection None: all n rows. residual: (B, d) fp32 or None; out: (B, d)
    fp32/fp16/bf16 and may be the residual itself. scratch: shared by calls that run one after another; without it
    one is made for the call.
    """
    if isinstance(h, LiveRows):
        dense, mask = h.to_dense(), None
    else:
        dense = h
        mask = None if selection is None else selection.to_mask(h.shape[0]).repeat_interleave(rows_per_id, dim=1)
    out.copy_(scatter_gemv_reference(dense, weight_t, bias, residual, mask))
