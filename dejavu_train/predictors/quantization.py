"""Rounds weights to int8 or int4 with one scale per row, packs nibbles, and trains through the rounding.

int4 codes lie in -7..7. Byte j of a row holds column j in its low half, and column j + ceil(columns / 2) in its high
half, each as code + 8. A kernel then multiplies two contiguous halves of its input, and nothing is interleaved. The
scale of int4 is the one of a few clipped ranges whose squared error is least. It is kept in fp16, where int8 has fp32,
because half a byte a weight makes four bytes a row count.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CLIPS = (1.0, 0.88, 0.76, 0.64, 0.52)
SCALED = ("int8", "int4")


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (n, d) -> (n, d) int8 and scales (n,) fp32, so that weight is about quantised * scale[:, None].

    >>> quantise_rows(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    (tensor([[127, -64],
            [  0,   0]], dtype=torch.int8), tensor([0.0079, 1.0000]))
    """
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def int4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (n, d) -> codes (n, d) int8 in -7..7 and scales (n,) fp16 of least squared error."""
    weight = weight.float()
    # Below it fp16 has no scale; a row of zeros gets codes of zero with any.
    peak = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-5)
    best = torch.full_like(peak, torch.inf)
    codes, scales = torch.zeros_like(weight), peak
    for clip in CLIPS:
        scale = (peak * clip / 7).half().float()
        tried = (weight / scale).round_().clamp_(-7, 7)
        error = torch.addcmul(weight, tried, scale, value=-1).square_().sum(dim=1, keepdim=True)
        better = error < best
        codes, scales = torch.where(better, tried, codes), torch.where(better, scale, scales)
        best = torch.minimum(error, best)
    return codes.to(torch.int8), scales[:, 0].half()


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes (n, c) in -8..7 -> (n, ceil(c / 2)) uint8.

    >>> pack_nibbles(torch.tensor([[-8, 7, 0]]))
    tensor([[128, 143]], dtype=torch.uint8)
    """
    raised = codes.to(torch.int16) + 8
    half = (codes.shape[1] + 1) // 2
    low, high = raised[:, :half], raised[:, half:]
    if high.shape[1] < half:
        high = torch.cat([high, high.new_full((len(high), 1), 8)], dim=1)
    return (low | high << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """packed (n, ceil(columns / 2)) uint8 -> codes (n, columns) int8, the inverse of :func:`pack_nibbles`."""
    wide = packed.to(torch.int16)
    return (torch.cat([wide & 15, wide >> 4], dim=1)[:, :columns] - 8).to(torch.int8)


def stored_rows(weight: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Stored form of weight (n, d): int8 with scales (n,) fp32, or packed int4 with scales (n,) fp16."""
    if dtype == "int8":
        return quantise_rows(weight)
    codes, scale = int4_rows(weight)
    return pack_nibbles(codes), scale


def row_codes(stored: Tensor, columns: int) -> Tensor:
    """The int8 codes (n, columns) of what :func:`stored_rows` made."""
    return unpack_nibbles(stored, columns) if stored.dtype == torch.uint8 else stored


def as_trained(weight: Tensor, dtype: str) -> Tensor:
    """weight (n, d) as it reads back from ``dtype`` (int8, int4). Gradients pass as if nothing had been rounded."""
    with torch.no_grad():
        rounded: Callable[[Tensor], tuple[Tensor, Tensor]] = quantise_rows if dtype == "int8" else int4_rows
        codes, scale = rounded(weight)
        difference = codes * scale.float()[:, None] - weight
    return weight + difference
