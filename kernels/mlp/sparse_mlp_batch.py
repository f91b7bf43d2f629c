"""fc1 and fc2 of 2 to 32 batch rows over the union of what they selected, on the tensor cores.

    values[k, b] = relu(sum_j w[i, j] x[b, j] + bias[i]) where row b selected i = ids[k], else 0     (`fc1_batch`)
    out[b, j] = residual[b, j] + bias[j] + sum_k values[k, b] w_t[ids[k], j]                        (`fc2_batch`)

x (B, d) in the weights' dtype, w and w_t (n, d), values in the weights' dtype, sums in fp32. A program of fc1 takes an
even, contiguous share of the list, up to ROWS gathered rows as M, the padded batch as N. A list entry that is zero in
every batch row gets the id -1, and fc2 does not read its row. In fc2 STRIPE columns are M, the batch is N, list entries
are K. Programs share the entries, and the last one of a stripe to arrive adds the partial sums in their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_numbers, check_tensor, require
from dejavu_train.kernels.common.launch import (
    list_slots_wide,
    n_sms,
    next_power_of_two,
    padded_batch,
    programmatic,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.matrix import Matrix


@dataclass(frozen=True)
class BatchActivations:
    """ids (n) int32 and values (n, padded batch) below count (1) int32. Scratch of fc2: partials (splits, B, d) fp32,
    tickets (stripes) int32, zero between calls."""

    ids: Tensor
    values: Tensor
    count: Tensor
    partials: Tensor
    tickets: Tensor

    @classmethod
    def empty(cls, n: int, batch: int, d: int, dtype: torch.dtype, device: torch.device | str) -> "BatchActivations":
        ids, count = (torch.zeros(size, dtype=torch.int32, device=device) for size in (n, 1))
        values = torch.zeros(n, padded_batch(batch), dtype=dtype, device=device)
        tickets = torch.zeros(-(-d // 16), dtype=torch.int32, device=device)
        return cls(ids, values, count, torch.zeros(SPLITS, batch, d, device=device, dtype=torch.float32), tickets)

    def to_dense(self, batch: int) -> Tensor:
        """(B, n) fp32 with zeros elsewhere. Synchronises with the host: for tests."""
        count = int(self.count)
        ids, values = self.ids[:count].long(), self.values[:count, :batch].float()
        dense = torch.zeros(batch, len(self.ids), device=self.ids.device, dtype=torch.float32)
        dense[:, ids[ids >= 0]] = values[ids >= 0].T
        return dense


SPLITS = 4


@triton.jit(do_not_specialize=["n_blocks", "batch"])
def _fc1_batch_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    ids_ptr,
    counts_ptr,
    row_bits_ptr,
    values_ptr,
    out_ids_ptr,
    count_ptr,
    n_blocks,
    batch,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SEL_BLOCKS: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    k = tl.arange(0, BLOCK)
    b = tl.arange(0, BATCH)
    there = (b < batch)[None, :]
    wait_for_predecessor(PDL)
    every = tl.arange(0, SEL_BLOCKS)
    counts = tl.load(counts_ptr + every, mask=every < n_blocks, other=0)
    running = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    first = pid * total // programs
    last = (pid + 1) * total // programs
    if pid == 0:
        tl.store(count_ptr, total)
    for start in range(first, last, ROWS):
        items = start + tl.arange(0, ROWS)
        valid = items < last
        slots = list_slots_wide(items, running, SEL_BLOCK, SEL_BLOCKS)
        rows = tl.load(ids_ptr + slots, mask=valid, other=0)
        bits = tl.load(row_bits_ptr + rows, mask=valid, other=0)
        offset = tl.load(bias_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        row_ptrs = w_ptr + rows.to(tl.int64)[:, None] * D + k[None, :]
        x_ptrs = x_ptr + b[None, :] * D + k[:, None]
        acc = tl.zeros((ROWS, BATCH), tl.float32)
        for column in tl.range(0, D, BLOCK, num_stages=STAGES):
            if D % BLOCK == 0:
                w = tl.load(row_ptrs + column, mask=valid[:, None], other=0.0)
                x = tl.load(x_ptrs + column, mask=there, other=0.0)
            else:
                inside = k + column < D
                w = tl.load(row_ptrs + column, mask=valid[:, None] & inside[None, :], other=0.0)
                x = tl.load(x_ptrs + column, mask=there & inside[:, None], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        y = acc + offset[:, None]
        y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
        y = tl.where((((bits[:, None] >> b[None, :]) & 1) != 0) & there, y, 0.0)
        y = y.to(values_ptr.dtype.element_ty)
        live = tl.sum((y != 0).to(tl.int32), 1) > 0
        tl.store(out_ids_ptr + items, tl.where(live, rows, -1), mask=valid)
        tl.store(values_ptr + items[:, None] * BATCH + b[None, :], y, mask=valid[:, None])


@triton.jit(do_not_specialize=["batch"])
def _fc2_batch_kernel(
    values_ptr,
    ids_ptr,
    count_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    batch,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    stripe = tl.program_id(0)
    split = tl.program_id(1)
    columns = stripe * STRIPE + tl.arange(0, STRIPE)
    b = tl.arange(0, BATCH)
    r = tl.arange(0, ROWS)
    wait_for_predecessor(PDL)
    total = tl.load(count_ptr)
    first = split * total // SPLITS
    last = (split + 1) * total // SPLITS
    acc = tl.zeros((STRIPE, BATCH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        items = start + r
        rows = tl.load(ids_ptr + items, mask=items < last, other=-1)
        h = tl.load(values_ptr + items[:, None] * BATCH + b[None, :], mask=(items < last)[:, None], other=0.0)
        at = w_ptr + tl.maximum(rows, 0).to(tl.int64)[:, None] * D + columns[None, :]
        if D % STRIPE == 0:
            w = tl.load(at, mask=(rows >= 0)[:, None], other=0.0)
        else:
            w = tl.load(at, mask=(rows >= 0)[:, None] & (columns < D)[None, :], other=0.0)
        acc = tl.dot(tl.trans(w), h, acc, input_precision="ieee")
    place = b[None, :] * D + columns[:, None]
    store = (columns < D)[:, None] & (b < batch)[None, :]
    tl.store(partials_ptr + split * batch * D + place, acc, mask=store, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's partial is stored before one thread releases the ticket
    arrived = tl.atomic_add(tickets_ptr + stripe, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        offset = tl.load(bias_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        y = tl.load(residual_ptr + place, mask=store, other=0.0) + offset[:, None]
        for s in tl.static_range(SPLITS):
            y += tl.load(partials_ptr + s * batch * D + place, mask=store, other=0.0, cache_modifier=".cg")
        tl.store(out_ptr + place, y, mask=store)
        tl.store(tickets_ptr + stripe, 0)


@dataclass(frozen=True)
class UpSettings(Settings, stage="up_batch"):
    """programs: of a multiprocessor. block: columns of a step, at most. rows: of a tile. stages: of its pipeline."""

    programs: int
    block: int
    rows: int
    stages: int


@dataclass(frozen=True)
class DownSettings(Settings, stage="down_batch"):
    """stripe: columns of a program. rows: list entries of a step. stages: of its pipeline."""

    stripe: int
    rows: int
    stages: int


def fc1_batch(
    x: Tensor,
    weight: Matrix,
    bias: Tensor,
    selection: Selection,
    out: BatchActivations,
    pdl: bool = False,
) -> None:
    """x (B, d), B > 1, weight (n, d) and bias (n). x and weight of one dtype. Errors: shapes, dtypes."""
    batch, d = check_input("x", x)
    n = weight.shape[0]
    require(batch > 1, "one batch row has a kernel of its own: stages.mlp")
    numbers = check_numbers("weight", weight, n, d)
    check_tensor("weight", numbers, (n, d), FLOAT_TYPES, x)
    check_tensor("x", x, (batch, d), (numbers.dtype,), x)
    check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    check_tensor("out.values", out.values, (n, padded_batch(batch)), (numbers.dtype,), x)
    require(selection.n == n, f"a selection of {selection.n} rows does not fit a weight of {n}")
    settings = UpSettings.find(weight.format, x.device, d=d)
    blocks = selection.counts.numel()
    has_pdl, use_pdl = programmatic(x, pdl)
    _fc1_batch_kernel[(min(settings.programs * n_sms(x.device), n),)](
        x,
        numbers,
        bias,
        selection.ids,
        selection.counts,
        selection.row_bits,
        out.values,
        out.ids,
        out.count,
        blocks,
        batch,
        D=d,
        BATCH=padded_batch(batch),
        BLOCK=min(settings.block, max(16, next_power_of_two(d))),
        ROWS=settings.rows,
        SEL_BLOCKS=next_power_of_two(max(2, blocks)),
        SEL_BLOCK=selection.block,
        STAGES=settings.stages,
        PDL=has_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


def fc2_batch(
    rows: BatchActivations,
    weight_t: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """weight_t (n, d), bias (d), residual and out (B, d) fp32. Bitwise deterministic. Errors: shapes, dtypes."""
    batch, d = check_input("residual", residual)
    n = weight_t.shape[0]
    numbers = check_numbers("weight_t", weight_t, n, d)
    check_tensor("weight_t", numbers, (n, d), FLOAT_TYPES, residual)
    check_tensor("rows.values", rows.values, (n, padded_batch(batch)), (numbers.dtype,), residual)
    check_tensor("rows.partials", rows.partials, (SPLITS, batch, d), (torch.float32,), residual)
    check_tensor("bias", bias, (d,), FLOAT_TYPES, residual)
    check_tensor("residual", residual, (batch, d), (torch.float32,), residual)
    check_tensor("out", out, (batch, d), (torch.float32,), residual)
    has_pdl, use_pdl = programmatic(residual, pdl)
    settings = DownSettings.find(weight_t.format, residual.device, bytes=numbers.element_size())
    _fc2_batch_kernel[(-(-d // settings.stripe), SPLITS)](
        rows.values,
        rows.ids,
        rows.count,
        numbers,
        bias,
        residual,
        out,
        rows.partials,
        rows.tickets,
        batch,
        D=d,
        BATCH=padded_batch(batch),
        STRIPE=settings.stripe,
        SPLITS=SPLITS,
        ROWS=settings.rows,
        STAGES=settings.stages,
        PDL=has_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


def fc1_batch_reference(x: Tensor, weight: Matrix, bias: Tensor, mask: Tensor) -> Tensor:
    """(B, n) fp32 in plain torch, zero where mask (B, n) is False."""
    y = (x.float() @ weight.dense().T + bias.float()).relu()
    return torch.where(mask, y, torch.zeros_like(y))


def fc2_batch_reference(h: Tensor, weight_t: Matrix, bias: Tensor, residual: Tensor) -> Tensor:
    """(B, d) fp32 in plain torch from dense h (B, n)."""
    return residual + bias.float() + h.float() @ weight_t.dense()
