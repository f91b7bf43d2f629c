"""fc2 over the live rows of one token: out[j] = residual[j] + bias[j] + sum_k h[k] w_t[ids[k], j] over a packed list.

`pack` closes the gaps of a `LiveRows` list in one small kernel, in the list's order. `packed_rows` gives every program
a narrow stripe of columns and the whole list: an output has one owner, so there are no partial sums to meet through
memory, and the order of the sum is fixed. The next rows are always on their way before the present ones are used. All
programs walk the list together, so neighbouring stripes find a row's memory page open. w_t (n, d), h fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import check_device, check_shape, start_dependents, use_pdl
from kernels.gather_gemv import LiveRows

RANGES = 64  # of the list, for a program of `pack`


@dataclass(frozen=True)
class PackedRows:
    """ids (n) int32 and values (n) fp32, valid below count (1) int32."""

    ids: Tensor
    values: Tensor
    count: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str) -> "PackedRows":
        ids, count = (torch.zeros(size, dtype=torch.int32, device=device) for size in (n, 1))
        return cls(ids, torch.zeros(n, device=device), count)


@triton.jit
def _pack_kernel(
    ids,
    values,
    counts,
    packed_ids,
    packed_values,
    packed_count,
    n_ranges,
    SLOTS: tl.constexpr,
    ALL: tl.constexpr,
    RANGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    low = tl.program_id(0) * RANGES
    every = tl.arange(0, ALL)
    number = tl.load(counts + every, mask=every < n_ranges, other=0)
    own = low + tl.arange(0, RANGES)
    mine = tl.load(counts + own, mask=own < n_ranges, other=0)
    start = tl.sum(tl.where(every < low, number, 0)) + tl.cumsum(mine, 0) - mine
    for s in range(0, tl.max(mine, 0)):
        valid = s < mine
        row = tl.load(ids + own * SLOTS + s, mask=valid, other=0)
        value = tl.load(values + own * SLOTS + s, mask=valid, other=0.0)
        tl.store(packed_ids + start + s, row, mask=valid)
        tl.store(packed_values + start + s, value, mask=valid)
    if low == 0:
        tl.store(packed_count, tl.sum(number))


def pack(rows: LiveRows, out: PackedRows, pdl: bool = False) -> None:
    """Close the gaps of a list of one batch row."""
    check_device("rows.ids", rows.ids)
    check_shape("rows.values", rows.values, len(rows.ids), 1)
    n_ranges = rows.counts.numel()
    pdl = use_pdl(pdl, rows.ids.device)
    _pack_kernel[(triton.cdiv(n_ranges, RANGES),)](
        rows.ids,
        rows.values,
        rows.counts,
        out.ids,
        out.values,
        out.count,
        n_ranges,
        SLOTS=rows.slots,
        ALL=triton.next_power_of_2(n_ranges),
        RANGES=RANGES,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def _packed_kernel(
    ids,
    values,
    count,
    weight,
    bias,
    residual,
    out,
    D: tl.constexpr,
    STRIPE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    inside = columns < D
    offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    start_dependents(PDL)
    k = tl.arange(0, ROWS)
    n = tl.load(count)
    # An entry behind the end is an old one, in range; its row is not read.
    row = tl.load(ids + k, mask=k < n, other=0)
    h = tl.load(values + k, mask=k < n, other=0.0)
    limit = tl.where(k < n, D, 0)[:, None]
    w = tl.load(weight + row.to(tl.int64)[:, None] * D + columns[None, :], mask=columns[None, :] < limit, other=0.0)
    row = tl.load(ids + ROWS + k, mask=ROWS + k < n, other=0)
    acc = tl.zeros((ROWS, STRIPE), tl.float32)
    for first in range(0, n, ROWS):
        ahead = first + ROWS + k
        limit = tl.where(ahead < n, D, 0)[:, None]
        at = weight + row.to(tl.int64)[:, None] * D + columns[None, :]
        next_w = tl.load(at, mask=columns[None, :] < limit, other=0.0)
        next_h = tl.load(values + ahead, mask=ahead < n, other=0.0)
        row = tl.load(ids + ROWS + ahead, mask=ROWS + ahead < n, other=0)
        acc += w.to(tl.float32) * h[:, None]
        w = next_w
        h = next_h
    value = tl.sum(acc, 0) + offset + tl.load(residual + columns, mask=inside, other=0.0)
    tl.store(out + columns, value, mask=inside)


def packed_settings(d: int) -> tuple[int, int, int]:
    """(columns of a program, rows of a step, warps) by width."""
    return (32, 256, 8) if d <= 4096 else (32, 128, 4)


def packed_rows(
    rows: PackedRows,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    pdl: bool = False,
    settings: tuple[int, int, int] | None = None,
) -> None:
    """weight (n, d), bias (d), residual and out (1, d) fp32. Errors: shapes, a CPU tensor."""
    check_device("rows.ids", rows.ids)
    n, d = weight.shape
    check_shape("rows.ids", rows.ids, n)
    check_shape("residual", residual, 1, d)
    check_shape("out", out, 1, d)
    stripe, step, warps = settings or packed_settings(d)
    pdl = use_pdl(pdl, out.device)
    _packed_kernel[(triton.cdiv(d, stripe),)](
        rows.ids,
        rows.values,
        rows.count,
        weight,
        bias,
        residual,
        out,
        D=d,
        STRIPE=stripe,
        ROWS=step,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def packed_rows_reference(h: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, out: Tensor, pdl=False) -> None:
    """Plain torch from dense h (B, n)."""
    out.copy_(h.float() @ weight.float() + bias.float() + residual)
