"""What layers are made of: a matrix of either format with its bias."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.formats.int4 import Int4Rows

Matrix: TypeAlias = Tensor | Int4Rows


def numbers(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix in plain torch, in this dtype."""
    return matrix.dequantised(dtype) if isinstance(matrix, Int4Rows) else matrix.to(dtype)


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b: weight (..., d) and bias (...), leading dimensions as the kernel that reads it says."""

    weight: Matrix
    bias: Tensor


@dataclass(frozen=True)
class MlpWeights:
    """Both layers of an MLP, with a neuron as a row of either weight, (n, d). The biases are (n) and (d)."""

    fc1: Linear
    fc2: Linear
