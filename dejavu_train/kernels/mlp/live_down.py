"""The map out of the neurons over those that are not zero, for one to eight tokens, of matrices of numbers:

    out[b, j] = residual[b, j] + bias[j] + sum_i h[b, i] w[i, j]        over i with h[b, i] != 0 for some b

h (B, n), behind the activation. w (n, d), a row a neuron, of which columns are outputs. A row is read where one token's
h is not zero. NaN is not zero, so it is never left out. Of 4-bit rows: `int4_fc2`.

A program owns a block of columns and a range of neurons. It numbers those that are live, and adds their rows one by
one, in the order of the neurons. A row that only other tokens need adds zero, which changes no bit. So a token's sum
has the same bits whatever its neighbours are, and the same as where no row is left out (`every`).
`partial_sums.add_partials` then adds up the ranges, in an order that the shape fixes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    check_device,
    check_numbers,
    check_shape,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.launch import n_sms, sums_together, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS, tokens_at_once
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.matrix import Matrix

FEWEST_OWN, MOST_OWN = 32, 1024  # neurons of a program


@dataclass(frozen=True)
class LiveDownSettings(Settings, stage="live_down"):
    """block: columns of a program, at most. rows: of a step, at most 16. programs: of a multiprocessor, about."""

    block: int
    rows: int
    warps: int
    programs: int


def live_down_reference(
    h: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    unit: float = 1.0,
    every: bool = False,
) -> None:
    """Plain torch, any batch, in the dtype of out."""
    out.copy_(h.to(out.dtype) / unit @ weight.dense(out.dtype) + bias.to(out.dtype) + residual)


@triton.jit
def _row_numbers(rank, own, entry, R: tl.constexpr):
    """The neurons with the places entry .. entry + R - 1 in the list, as scalars. Beyond its end 0."""
    places = ()
    for r in tl.static_range(R):
        places = places + (tl.where(rank == entry + r, own, 0),)
    return sums_together(places, R)


@triton.jit
def _rows_of(weight, numbers, entry, count, columns, D: tl.constexpr, R: tl.constexpr):
    """Rows of the matrix in this program's columns. Those beyond the list's end are not read."""
    rows = ()
    for r in tl.static_range(R):
        limit = tl.where(entry + r < count, D, 0)
        at = weight + numbers[r].to(tl.int64) * D + columns
        rows = rows + (tl.load(at, mask=columns < limit, other=0.0, eviction_policy="evict_first"),)
    return rows


@triton.jit(do_not_specialize=["n", "batch"])
def _live_down_kernel(
    h, weight, partials, n, batch, D: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, UNIT: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(1) * OWN
    own = tl.arange(0, OWN)
    inside = begin + own < n
    weight += begin.to(tl.int64) * D
    h += begin
    wait_for_predecessor(PDL)
    live = inside
    if not EVERY:
        for b in tl.static_range(TOKENS):
            wanted = tl.load(h + tl.minimum(b, batch - 1) * n + own, mask=inside, other=0.0) != 0
            live = wanted if b == 0 else live | wanted
    flags = live.to(tl.int32)
    rank = tl.where(live, tl.cumsum(flags, 0) - flags, -1)
    count = tl.sum(flags)
    acc = ()
    for _ in tl.static_range(TOKENS):
        acc = acc + (tl.zeros((BLOCK,), tl.float32),)
    numbers = _row_numbers(rank, own, 0, R)
    rows = _rows_of(weight, numbers, 0, count, columns, D, R)
    for entry in range(0, count, R):
        coming = _row_numbers(rank, own, entry + R, R)
        ahead = _rows_of(weight, coming, entry + R, count, columns, D, R)
        for r in tl.static_range(R):
            row = rows[r].to(tl.float32)
            sums = ()
            for b in tl.static_range(TOKENS):
                value = tl.load(h + tl.minimum(b, batch - 1) * n + numbers[r]).to(tl.float32)
                sums = sums + (acc[b] + row * tl.where(entry + r < count, value, 0.0),)
            acc = sums
        rows = ahead
        numbers = coming
    for b in tl.static_range(TOKENS):
        at = partials + (tl.program_id(1) * batch + b) * D + columns
        tl.store(at, acc[b] * (1 / UNIT), mask=(columns < D) & (tl.zeros_like(columns) + b < batch))


def live_down(
    h: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
    unit: float = 1.0,
    every: bool = False,
) -> None:
    """h (B, n) of any float dtype, B from 1 to 8. weight (n, d), bias (d), residual and out (B, d) fp32.

    h is stored times unit. every: no row is left out. Bitwise deterministic, see the module's docstring.

    Errors: shapes, dtypes, more than eight tokens, a CPU tensor.
    """
    check_device("h", h)
    batch, n = h.shape
    d = weight.shape[1]
    require(1 <= batch <= MOST_TOKENS, f"{batch} tokens, expected 1 to {MOST_TOKENS}")
    check_tensor("h", h, (batch, n), FLOAT_TYPES, h)
    numbers = check_numbers("weight", weight, n, d)
    check_tensor("bias", bias, (d,), FLOAT_TYPES, h)
    for name, tensor in (("residual", residual), ("out", out)):
        check_tensor(name, tensor, (batch, d), (torch.float32,), h)
    tokens = tokens_at_once(batch)
    settings = LiveDownSettings.find(weight.format, h.device, d=d, tokens=tokens)
    block = min(settings.block, max(16, triton.next_power_of_2(d)))
    stripes, most = triton.cdiv(d, block), most_splits(out.device)
    splits = max(1, min(most // tokens, settings.programs * n_sms(h.device) // stripes))
    own = min(MOST_OWN, max(FEWEST_OWN, triton.next_power_of_2(triton.cdiv(n, splits))))
    splits = triton.cdiv(n, own)
    require(splits * batch <= most, f"{n} neurons of {batch} tokens, expected at most {most // batch * MOST_OWN}")
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, most, d)
    pdl = use_pdl(pdl, out.device)
    _live_down_kernel[(stripes, splits)](
        h, numbers, partials, n, batch, D=d, OWN=own, BLOCK=block, R=settings.rows, TOKENS=tokens, UNIT=unit,
        EVERY=every, PDL=pdl, num_warps=min(settings.warps, max(1, block // 32)), launch_pdl=pdl,
    )  # fmt: skip
    add_partials(partials, splits, bias, residual, out, pdl)
