"""Ways for the output of half a layer: the residual stream itself, or a part of it that other ranks add to.

    one GPU     out = x + bias + W y
    rank 0      part = x + bias + W_0 y_0          out = part_0 + part_1 + ..., on all ranks
    rank r > 0  part = 0 + W_r y_r

Kernels are the same: what they take for the residual stream is zero on later ranks. Logits are added up too. Each is
made on one rank, and is zero on the others, so a sum changes no bit. So all ranks choose the same token.
"""

import torch
from torch import Tensor

from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.engine.ranks.sums import Sums


class Join:
    """Join on one GPU: nothing is left to add.

    Attributes:
        number: of this rank.
    """

    number = 0

    def base(self, x: Tensor) -> Tensor:
        """(B, d), what a half begins with that goes on from x."""
        return x

    def part(self, out: Tensor) -> Tensor:
        """(B, d), what a half writes that is to become out."""
        return out

    def close(self, out: Tensor) -> None:
        """out = the sum of what was written into its parts."""

    def total(self, x: Tensor) -> Tensor:
        """Sum of x on all ranks, without the residual stream, for many tokens."""
        return x

    def head(self, logits: Tensor) -> Tensor:
        """(B, rows), what the LM head writes that is to become logits (B, V)."""
        return logits

    def close_head(self, logits: Tensor) -> None:
        """logits = those of all ranks."""


class RankJoin(Join):
    """Join on one of several ranks."""

    def __init__(self, shard: Shard, sums: Sums, batch: int, device: torch.device) -> None:
        d, vocab = shard.whole.d_model, shard.whole.vocab_size
        self.shard, self.sums, self.number = shard, sums, shard.rank
        self._zeros = torch.zeros(batch, d, device=device, dtype=torch.float32)
        self._part, self._logits = sums.buffer(batch, d), sums.buffer(batch, vocab)
        rows = shard.head_rows
        self._head = torch.zeros(batch, rows.stop - rows.start, device=device, dtype=torch.float32)

    def base(self, x: Tensor) -> Tensor:
        return x if self.shard.first else self._zeros

    def part(self, out: Tensor) -> Tensor:
        return self._part

    def close(self, out: Tensor) -> None:
        self.sums.add(self._part, out, pdl=True)

    def total(self, x: Tensor) -> Tensor:
        return self.sums.total(x.contiguous())

    def head(self, logits: Tensor) -> Tensor:
        return self._head

    def close_head(self, logits: Tensor) -> None:
        self._logits[:, self.shard.head_rows] = self._head
        self.sums.add(self._logits, logits)
