"""A program's list of neurons, in memory of the GPU: a part of it that no other program has."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_device, check_dtype, require

MOST_TOKENS = 64


@dataclass(frozen=True)
class RowsSettings:
    """own: neurons of a program. rows, block: rows and columns of a step. stages: of its pipeline."""

    own: int
    rows: int
    block: int
    warps: int = 4
    stages: int = 3


@triton.jit
def write_numbers(listed, numbers, wanted):
    """How many of the neurons ``numbers`` (N,) are ``wanted``. Their numbers go to the list, in order."""
    flags = wanted.to(tl.int32)
    tl.store(listed + tl.cumsum(flags, 0) - flags, numbers, mask=wanted)
    tl.debug_barrier()  # the program's other threads read them
    return tl.sum(flags)


def check_tokens(name: str, x: Tensor, columns: int) -> int:
    """Tokens of x (B, columns). Refuses other shapes and dtypes, more than 64 tokens, and rows that are apart."""
    check_device(name, x)
    check_dtype(name, x, FLOAT_TYPES)
    require(x.dim() == 2 and x.shape[1] == columns, f"{name}: expected (B, {columns}), got {tuple(x.shape)}")
    require(x.stride(1) == 1, f"{name}: expected columns side by side, got strides {x.stride()}")
    require(1 <= len(x) <= MOST_TOKENS, f"{name}: {len(x)} tokens, expected 1 to {MOST_TOKENS}")
    return len(x)


def check_matrix(name: str, weight: Tensor, shape: tuple[int, int], x: Tensor) -> None:
    """Refuses another shape, dtype or device than that of x, and a matrix that is not contiguous."""
    found = (tuple(weight.shape), weight.dtype, weight.device, weight.is_contiguous())
    wanted = (shape, x.dtype, x.device, True)
    require(found == wanted, f"{name}: expected (shape, dtype, device, contiguous) {wanted}, got {found}")


def padded_tokens(tokens: int) -> int:
    """Columns that products have for so many tokens: one, or a power of two from 16 on."""
    return 1 if tokens == 1 else max(16, triton.next_power_of_2(tokens))


def list_of(n: int, device: torch.device) -> Tensor:
    """Memory for lists of n neurons in all."""
    return torch.empty(n, dtype=torch.int32, device=device)
