"""A matrix in any format, and what layers are made of: matrices with their biases."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows

FloatFormat: TypeAlias = Literal[Format.FP64, Format.FP32, Format.FP16, Format.BF16]
_FORMATS: dict[torch.dtype, FloatFormat] = {getattr(torch, name): name for name in get_args(FloatFormat)}


@dataclass(frozen=True)
class Rows:
    """A matrix (..., d) as numbers."""

    numbers: Tensor

    @property
    def format(self) -> FloatFormat:
        return _FORMATS[self.numbers.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def __getitem__(self, index: int) -> "Rows":
        """One of the leading dimension."""
        return Rows(self.numbers[index])

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrix."""
        return (self.numbers,)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in plain torch."""
        return self.numbers.to(dtype)


Matrix: TypeAlias = Rows | Int4Rows
"""Told apart by `format`: mypy then knows which of the two it is."""


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b: weight (..., d) and bias (...), leading dimensions as the kernel that reads it says."""

    weight: Matrix
    bias: Tensor

    @classmethod
    def of(cls, numbers: Tensor, bias: Tensor) -> "Linear":
        """Take a weight that is stored as numbers."""
        return cls(Rows(numbers), bias)


@dataclass(frozen=True)
class Hidden:
    """Function of a neuron's products: act(up), behind a gate act(gate) up, or act(gate) act(up) where `both`.

    activation: of `common.activation`, a ReLU with this threshold.
    """

    activation: str = "relu"
    threshold: float = 0.0
    both: bool = False


@dataclass(frozen=True)
class MlpWeights:
    """The layers of an MLP, with a neuron as a row of each weight, (n, d). The biases are (n), of down (d).

    gate: of a gated MLP.
    """

    up: Linear
    down: Linear
    gate: Linear | None = None
    hidden: Hidden = Hidden()

    def named(self) -> list[tuple[str, Linear]]:
        """The layers that there are, with their names."""
        every = (("up", self.up), ("down", self.down), ("gate", self.gate))
        return [(name, linear) for name, linear in every if linear is not None]
