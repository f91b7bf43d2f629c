"""Adds partial sums of rows in an order that the shape fixes, with bias and residual.

Many narrow programs read the sums at once, where a last arriver would read them alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.launch import n_sms, start_dependents_and_wait
from dejavu_train.kernels.common.settings import Settings

PER_MULTIPROCESSOR = 4  # rows of the scratch for partial sums, which eight rows of a batch share
FEWEST_MULTIPROCESSORS = 128  # that the scratch has room for: rows of a batch share it


@dataclass(frozen=True)
class SumSettings(Settings, stage="sums"):
    """stripe: columns of a program. chunk: partial sums that it reads at a time."""

    stripe: int
    chunk: int
    warps: int

    @classmethod
    def of(cls, partials: Tensor, splits: int) -> "SumSettings":
        """By the sums of each multiprocessor, and the bytes of a number."""
        waves = triton.cdiv(splits, n_sms(partials.device))
        return cls.find("float", partials.device, waves=waves, bytes=partials.element_size())


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
    partials, bias, residual, out, D: tl.constexpr, SIZE: tl.constexpr, STRIPE: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    settings = SumSettings.of(partials, splits)
    _add_kernel[(triton.cdiv(batch * d, settings.stripe),)](
        partials, bias, residual, out, D=d, SIZE=batch * d, STRIPE=settings.stripe, SPLITS=splits, CHUNK=settings.chunk,
        PDL=pdl, num_warps=settings.warps, launch_pdl=pdl,
    )  # fmt: skip


def most_splits(device: torch.device) -> int:
    """Rows of the scratch for partial sums."""
    return PER_MULTIPROCESSOR * max(FEWEST_MULTIPROCESSORS, n_sms(device))


def partial_sums(d: int, device: torch.device | str) -> Tensor:
    """Scratch for every kernel that `add_partials` follows. Shared by calls that run one after another."""
    return torch.zeros(most_splits(torch.device(device)), d, device=device, dtype=torch.float32)
