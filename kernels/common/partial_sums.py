"""Adds partial sums of rows in an order that the shape fixes, with bias and residual.

Many narrow programs read the sums at once, where a last arriver would read them alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import INTERPRET
from dejavu_train.kernels.common.launch import start_dependents_and_wait

MAX_SPLITS = 264  # rows of the scratch for partial sums


@triton.jit
def summed_partials(
    partials, columns, inside, SIZE: tl.constexpr, STRIPE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr
):
    """Sums (STRIPE,) of SPLITS partial sums of SIZE columns, CHUNK of them at a time."""
    s = tl.arange(0, CHUNK)
    y = tl.zeros((CHUNK, STRIPE), tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        at = partials + (first + s)[:, None] * SIZE + columns[None, :]
        y += tl.load(at, mask=(first + s < SPLITS)[:, None] & inside[None, :], other=0.0)
    return tl.sum(y, 0)


@triton.jit
def _add_kernel(
    partials,
    bias,
    residual,
    out,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = residual + bias + the sum of the partial sums, of SIZE / D rows."""
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    inside = columns < SIZE
    offset = tl.load(bias + columns % D, mask=inside, other=0.0).to(tl.float32)
    # Older than the launch before, and rewritten by every step: not out of the L1.
    base = tl.load(residual + columns, mask=inside, other=0.0, cache_modifier=".cg")
    # What comes next reads weights before its own wait.
    start_dependents_and_wait(PDL)
    y = summed_partials(partials, columns, inside, SIZE, STRIPE, SPLITS, CHUNK)
    tl.store(out + columns, y + offset + base, mask=inside)


def add_partials(partials: Tensor, splits: int, bias: Tensor, residual: Tensor, out: Tensor, pdl: bool) -> None:
    """out (B, d) = residual + bias + the first `splits` times B d partial sums. pdl as `use_pdl` gives it."""
    batch, d = out.shape
    stripe, chunk, warps = (32, 32, 4) if splits <= 132 else (64 // partials.element_size(), 64, 4)
    if INTERPRET:
        chunk = 4
    _add_kernel[(triton.cdiv(batch * d, stripe),)](
        partials,
        bias,
        residual,
        out,
        D=d,
        SIZE=batch * d,
        STRIPE=stripe,
        SPLITS=splits,
        CHUNK=chunk,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def partial_sums(d: int, device: torch.device | str) -> Tensor:
    """Scratch for every kernel that `add_partials` follows. Shared by calls that run one after another."""
    return torch.zeros(MAX_SPLITS, d, device=device, dtype=torch.float32)
