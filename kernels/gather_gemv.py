"""Rows of a matrix times a vector: y[b, i] = act(sum_j w[i, j] x[b, j] + bias[i]) for the selected rows i, or for all.

x (B, d), optionally normalised on the way in; w (n, d) row-major; sums in fp32. With a selection the non-zero results
come out as `LiveRows`, the list that `scatter_gemv` reads, or at their own place of a dense (B, n) output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layer_norm import LayerNormWeights, layer_norm_reference
from kernels.select import Selection


@dataclass(frozen=True)
class LiveRows:
    """Rows with a non-zero value in any batch row, as ranges: program p owns slots [p * slots, p * slots + counts[p]).

    ids: (programs * slots,) int32; values: (programs * slots, B) fp32; counts: (programs,) int32. Nothing beyond a
    count is defined.
    """

    n: int
    slots: int
    ids: Tensor
    values: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, n: int, batch: int, device: torch.device | str, programs: int = 528) -> "LiveRows":
        """Fresh buffers for up to n rows."""
        slots = -(-n // programs)
        ids = torch.zeros(programs * slots, dtype=torch.int32, device=device)
        values = torch.zeros(programs * slots, batch, dtype=torch.float32, device=device)
        return cls(n, slots, ids, values, torch.zeros(programs, dtype=torch.int32, device=device))

    def set_dense(self, h: Tensor) -> None:
        """Fill from h (B, n), for tests and references."""
        live = (h != 0).any(0)
        ids = live.nonzero().flatten()
        programs = self.counts.numel()
        bounds = [p * ids.numel() // programs for p in range(programs + 1)]
        for p in range(programs):
            mine = ids[bounds[p] : bounds[p + 1]]
            self.counts[p] = mine.numel()
            self.ids[p * self.slots : p * self.slots + mine.numel()] = mine.int()
            self.values[p * self.slots : p * self.slots + mine.numel()] = h[:, mine].T.float()

    def to_dense(self) -> Tensor:
        """(B, n) fp32 with zeros elsewhere. Synchronises with the host: for tests and references."""
        slots = torch.arange(self.slots, device=self.ids.device)
        valid = (slots[None, :] < self.counts[:, None]).flatten()
        dense = torch.zeros(self.values.shape[1], self.n, dtype=torch.float32, device=self.ids.device)
        dense[:, self.ids[valid].long()] = self.values[valid].T
        return dense


def gather_gemv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    activation: str = "none",
    ln: LayerNormWeights | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """(B, n) in plain torch with zeros where mask (B, n) is False; fp64 when x is fp64, else fp32."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if ln is not None:
        x = layer_norm_reference(x, ln, wide)
    y = x.to(wide) @ weight.to(wide).T
    if scale is not None:
        y = y * scale.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "relu":
        y = y.relu()
    return y if mask is None else torch.where(mask, y, torch.zeros_like(y))


def gather_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection: Selection | None,
    activation: str,
    out: Tensor | LiveRows,
    ln: LayerNormWeights | None = None,
    scale: Tensor | None = None,
    rows_per_id: int = 1,
    normalised_out: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Selected rows of `weight` times x; selection None = all rows (a dense GEMV).

    x: (B, d) fp32/fp16/bf16, B <= 32; weight: (n, d) fp32/fp16/bf16, or int8/fp8 with scale (n,) fp32; bias: (n,).
    activation: "none" or "relu". ln normalises x first (in fp32, then rounded to the weight's dtype).
    out: `LiveRows` (needs a selection), or (B, n) fp32/fp16/bf16; then rows that no batch row selected are left
    untouched. For B > 1 a row that batch row b did not select is 0 there. rows_per_id: every selected id stands for this
    many consecutive rows (a head). normalised_out: (B, d), receives LN(x).
    """
    batch, n = x.shape[0], weight.shape[0]
    mask = None
    if selection is not None:
        mask = selection.to_mask(batch).repeat_interleave(rows_per_id, dim=1)
    if ln is not None:
        x = layer_norm_reference(x, ln, weight.dtype if weight.is_floating_point() and scale is None else torch.float32)
        if normalised_out is not None:
            normalised_out.copy_(x)
    y = gather_gemv_reference(x, weight, bias, mask, activation, None, scale)
    if isinstance(out, LiveRows):
        out.set_dense(y)
    elif mask is None:
        out.copy_(y)
    else:
        union = mask.any(0)
        out[:, union] = y[:, union].to(out.dtype)
    assert n == y.shape[1]
