"""Memory of one layer's attention from token to token, and what its stages share in a step."""

from dataclasses import dataclass

from torch import Tensor

from dejavu_train.kernels.common.positions import Alibi, Rotary
from dejavu_train.kernels.common.selection import Selection


@dataclass(frozen=True)
class KvCache:
    """Keys and values of B rows, h heads and T positions, and what is needed to compute skipped ones later.

    k, v: (B, h, T, head_dim).
    attn_in: (B, T, d), inputs that are kept. T is 0 where none are.
    watermark: (B, h) int32, K/V are there below it. None means that those of all heads are there.
    positions: what k is turned by before it is kept, or what is added to scores with it. None: neither.
    """

    k: Tensor
    v: Tensor
    attn_in: Tensor
    watermark: Tensor | None = None
    positions: Rotary | Alibi | None = None

    @property
    def turning(self) -> Rotary | None:
        """Table by which q/k/v turn q and k, or None."""
        return self.positions if isinstance(self.positions, Rotary) and not self.positions.later else None

    @property
    def capacity(self) -> int:
        """Positions, T."""
        return self.k.shape[2]


@dataclass(frozen=True)
class HeadStep:
    """State that stages of attention share: where q lies, what is kept of K and V, and which heads a step's rows need.

    q: (B, h r, head_dim), r heads of which share K and V. position: (B) int32, the rows' present ones.
    selection: of the h groups, or None: all.
    """

    q: Tensor
    cache: KvCache
    position: Tensor
    selection: Selection | None = None
