"""Which rows of a matrix a predictor selected, on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Selected rows of n, as block-local ranges on the device.

    ids: (n_blocks * block,) int32, slots beyond a block's count are undefined. counts: (n_blocks,) int32.
    row_bits: (n,) int32, bit b = selected by batch row b (defined for every i, also skipped ones).
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
        """Fill from mask (B, n) bool. torch operations without a host synchronisation, so it can be captured."""
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
class PackedSelection:
    """ids (n) int32, defined below count (1) int32, old ones beyond it. every: these are all rows, always."""

    ids: Tensor
    count: Tensor
    every: bool = False

    @classmethod
    def empty(cls, n: int, device: torch.device | str) -> "PackedSelection":
        ids, count = (torch.zeros(size, dtype=torch.int32, device=device) for size in (n, 1))
        return cls(ids, count)

    @classmethod
    def of_all(cls, n: int, device: torch.device | str) -> "PackedSelection":
        numbers = torch.arange(n, dtype=torch.int32, device=device)
        return cls(numbers, torch.full((1,), n, dtype=torch.int32, device=device), every=True)
