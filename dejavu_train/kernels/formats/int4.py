"""4-bit weights as the kernels read them: rows of int32 words, eight codes a word, fp16 scales for groups of columns.

    weight[r, j] = code[r, j] * scale[r, j // group],   code in -8..7, stored as code + 8

Columns 8 w .. 8 w + 7 of a row are word w. Column 8 w + 2 i + s lies in the nibble at bit 4 i + 16 s. A mask of
0x000F000F over the word, shifted by 4 i, leaves two neighbouring columns in the two halves of a register. So products
of fp16 pairs want them. The scale may be negative, so that code -8 falls on whichever extreme is larger. This module
imports torch alone: `dejavu_train.models.int4`, which loads such models, has its rows from here.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dejavu_train.kernels.formats.format import Format

COLUMNS_PER_WORD = 8
SHIFTS = tuple(4 * (column // 2) + 16 * (column % 2) for column in range(COLUMNS_PER_WORD))


@dataclass(frozen=True)
class Int4Rows:
    """A matrix (n, d) in 4 bits: words (n, d / 8) int32, scales (n, groups) fp16. Kernels take it in place of a tensor.

    Leading dimensions may be more than one, as those of q/k/v's (h, 3, head_dim, d).
    """

    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "Int4Rows":
        """Pack codes (n, d) in -8..7 with scales (n, groups), which must be fp16 numbers."""
        return cls(pack_int4(codes), scales.half())

    @property
    def format(self) -> Literal[Format.INT4]:
        return Format.INT4

    @property
    def codes(self) -> Tensor:
        """(n, d) int8 of rows with one leading dimension."""
        return unpack_int4(self.words)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return (*self.words.shape[:-1], self.words.shape[-1] * COLUMNS_PER_WORD)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // max(1, self.scales.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def __getitem__(self, index: int) -> "Int4Rows":
        """One of the leading dimension."""
        return Int4Rows(self.words[index], self.scales[index])

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrix."""
        return self.words, self.scales

    def view(self, *shape: int) -> "Int4Rows":
        """The same rows under other leading dimensions. Shape ends with the columns."""
        return Int4Rows(self.words.view(*shape[:-1], -1), self.scales.view(*shape[:-1], -1))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in plain torch: exact in fp32 and fp64."""
        words, scales = self.words.flatten(0, -2), self.scales.flatten(0, -2)
        return dequantise(words, scales).to(dtype).view(self.shape)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes (n, d) in -8..7 -> words (n, d / 8) int32.

    Raises:
        ValueError: d is no multiple of 8, or a code lies outside -8..7.

    >>> hex(pack_int4(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]])).item())
    '0x75316420'
    """
    n, d = codes.shape
    if d % COLUMNS_PER_WORD:
        raise ValueError(f"codes have {d} columns, expected a multiple of {COLUMNS_PER_WORD}")
    raised = codes.to(torch.int32) + 8
    if bool(((raised < 0) | (raised > 15)).any()):
        raise ValueError("codes must lie in -8..7")
    words = torch.zeros(n, d // COLUMNS_PER_WORD, dtype=torch.int32, device=codes.device)
    for column, shift in enumerate(SHIFTS):
        words |= raised[:, column::COLUMNS_PER_WORD] << shift
    return words


def unpack_int4(words: Tensor) -> Tensor:
    """Words (n, d / 8) int32 -> codes (n, d) int8 in -8..7, the inverse of :func:`pack_int4`."""
    column = torch.arange(COLUMNS_PER_WORD, dtype=torch.int32, device=words.device)  # no copy: a graph may hold this
    shifts = 4 * (column // 2) + 16 * (column % 2)
    return ((words[..., None] >> shifts & 15) - 8).to(torch.int8).flatten(1)


def dequantise(words: Tensor, scales: Tensor) -> Tensor:
    """Words (n, d / 8) int32 and scales (n, groups) fp16 -> weights (n, d) fp32, exactly code * scale."""
    codes = unpack_int4(words)
    n, d = codes.shape
    group = d // scales.shape[1]
    if group * scales.shape[1] != d:
        raise ValueError(f"{scales.shape[1]} groups do not divide {d} columns")
    return (codes.view(n, -1, group) * scales.float()[..., None]).view(n, d)
