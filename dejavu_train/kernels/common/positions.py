"""Positions that q/k/v and attention know of: none, a rotation of q and k, a slope for each head.

    (x, y) -> (x cos - y sin, y cos + x sin)      rotary: pairs of a head's dimensions turn with the position
    score  -> score - slope[j] distance           ALiBi: of head j

The rows of q and k lie so that the two of a pair are neighbours (`pair_order`): tiles of rows hold whole pairs. Scores
do not change when q and k have the same order. The table holds what the model's own rotary module gives, so scaled
angles and factors come with it. A pair that is not turned has cosine 1 and sine 0.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """table: (T, head_dim / 2, 2) fp32, cosine and sine of each position and pair.

    later: q and k are normed first, and then turned, by `stages.norm`. Else q/k/v turn them.
    """

    table: Tensor
    later: bool = False

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, head_dim: int, later: bool = False) -> "Rotary":
        """Read cos and sin (T, turned dimensions), as a model's rotary module gives them: both halves are alike.

        Raises:
            ValueError: the halves differ, or more dimensions turn than a head has.
        """
        half = cos.shape[-1] // 2
        if cos.shape != sin.shape or 2 * half != cos.shape[-1] or 2 * half > head_dim:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} turn no heads of {head_dim} columns")
        if not all(torch.equal(each[:, :half], each[:, half:]) for each in (cos, sin)):
            raise ValueError("the two halves of cos or sin differ")
        table = torch.zeros(len(cos), head_dim // 2, 2, dtype=torch.float32, device=cos.device)
        table[..., 0] = 1
        table[:, :half, 0], table[:, :half, 1] = cos[:, :half].float(), sin[:, :half].float()
        return cls(table, later)

    def fitting(self, k: Tensor) -> Tensor:
        """The table for a cache k (B, h, T, head_dim). Raises ValueError where it is of other heads, or too short."""
        capacity, head_dim = k.shape[2:]
        if self.table.shape[1:] != (head_dim // 2, 2) or self.table.dtype != torch.float32:
            raise ValueError(f"a table of positions {tuple(self.table.shape)} does not fit heads of {head_dim} columns")
        if len(self.table) < capacity:
            raise ValueError(f"the table of positions has {len(self.table)}, the cache {capacity}")
        return self.table


@dataclass(frozen=True)
class Alibi:
    """slopes: (h,) fp32, one a head."""

    slopes: Tensor

    @classmethod
    def of(cls, n_heads: int, device: torch.device | str) -> "Alibi":
        """Powers of one number. Heads beyond a power of two take every other one of twice as many."""

        def powers(heads: int) -> list[float]:
            return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]

        whole = 1 << int(math.log2(n_heads))
        slopes = powers(whole) + powers(2 * whole)[::2][: n_heads - whole]
        return cls(torch.tensor(slopes, dtype=torch.float32, device=device))


def pair_order(head_dim: int, turned: int) -> Tensor:
    """(head_dim,) int64: which dimension of the model's heads each row of q and k is. turned: how many turn.

    Models pair dimension i with i + turned / 2.

    >>> pair_order(8, 4).tolist()
    [0, 2, 1, 3, 4, 5, 6, 7]
    """
    first = torch.arange(turned // 2)
    return torch.cat([torch.stack([first, first + turned // 2], 1).flatten(), torch.arange(turned, head_dim)])


def turned_reference(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Plain torch: x (..., head_dim) in the order of pairs, at positions (...), turned."""
    cos, sin = rotary.table.to(x.dtype)[positions.long()].unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


@triton.jit
def angles(table, columns, p, turns, HEAD_DIM: tl.constexpr):
    """(cosines, signed sines) for columns of a head at positions p, which broadcast. turns: or not."""
    at = table + p * HEAD_DIM + columns // 2 * 2
    sin = tl.load(at + 1, mask=turns, other=0.0)
    return tl.load(at, mask=turns, other=1.0), tl.where(columns % 2 == 0, -sin, sin)


@triton.jit
def turned(values, by):
    """values (R,) or (R, N) of neighbouring columns, an even number of them, turned by `angles`."""
    HALF: tl.constexpr = values.shape[0] // 2
    if len(values.shape) == 1:
        x, y = tl.split(tl.reshape(values, (HALF, 2)))
        swapped = tl.reshape(tl.join(y, x), (2 * HALF,))
    else:
        N: tl.constexpr = values.shape[1]
        x, y = tl.split(tl.permute(tl.reshape(values, (HALF, 2, N)), (0, 2, 1)))
        swapped = tl.reshape(tl.permute(tl.join(y, x), (0, 2, 1)), (2 * HALF, N))
    return values * by[0] + swapped * by[1]


@triton.jit
def no_bias(scores, slopes, head, distance):
    return scores


@triton.jit
def alibi_bias(scores, slopes, head, distance):
    """scores (POSITIONS,) of a head at positions `distance` (at most 0) from the present one."""
    return scores + tl.load(slopes + head) * distance.to(tl.float32)
