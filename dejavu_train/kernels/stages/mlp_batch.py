"""The MLP of 2 to 32 batch rows over the union of what they selected, on the tensor cores, of matrices of numbers.

    values[k, b] = h[i, b] where row b selected i = ids[k], else 0        (`up_batch`), h as in `stages.mlp`
    out[b, j] = residual[b, j] + bias[j] + sum_k values[k, b] down[ids[k], j]        (`down_batch`)

x (B, d) in the weights' dtype, up, gate and down (n, d), values in the weights' dtype, sums in fp32. A square of 256 or
more is no fp16 number: values of a squared ReLU in fp16 are stored times `kept_unit`.

A program of the first kernel takes an even, contiguous share of the list. Up to ROWS gathered rows are M, and the
padded batch lies along the columns. Behind a gate it then reads the rows of up whose gate is open in one batch row. A
list entry that is zero in every batch row gets the id -1, and its row of down is not read.

In the second kernel STRIPE columns are M, the batch is N, and list entries are K. Programs share the entries. The last
one of a stripe to arrive adds the partial sums in their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_numbers, check_tensor, require
from dejavu_train.kernels.common.launch import list_slots_wide, n_sms, padded_batch, programmatic, wait_for_predecessor
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.stages.mlp import ActivationFunction, NeuronRows, hidden_reference

SPLITS = 4


@dataclass(frozen=True)
class BatchActivations:
    """ids (n) int32 and values (n, padded batch) below count (1) int32. Scratch of the second
    kernel: partials (splits, B, d) fp32,
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


@triton.jit
def _products(
    x_ptr, rows, valid, there, matrix, D: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(ROWS, BATCH): valid rows of the matrix, with its bias, times the inputs that are there."""
    k = tl.arange(0, BLOCK)
    offset = tl.load(matrix.bias + rows, mask=valid, other=0.0).to(tl.float32)
    row_ptrs = matrix.parts[0] + rows.to(tl.int64)[:, None] * D + k[None, :]
    x_ptrs = x_ptr + tl.arange(0, BATCH)[None, :] * D + k[:, None]
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
    return acc + offset[:, None]


@triton.jit(do_not_specialize=["n_blocks", "batch"])
def _up_batch_kernel(
    x_ptr, gate, up, ids_ptr, counts_ptr, row_bits_ptr, values_ptr, out_ids_ptr, count_ptr, n_blocks, batch,
    act: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SEL_BLOCKS: tl.constexpr, SEL_BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
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
    for start in tl.range(first, last, ROWS, num_stages=1):  # the pipeliner knows no predicated product of warp groups
        items = start + tl.arange(0, ROWS)
        valid = items < last
        slots = list_slots_wide(items, running, SEL_BLOCK, SEL_BLOCKS)
        rows = tl.load(ids_ptr + slots, mask=valid, other=0)
        bits = tl.load(row_bits_ptr + rows, mask=valid, other=0)
        y = _products(x_ptr, rows, valid, there, up if gate is None else gate, D, BATCH, BLOCK, ROWS, STAGES)
        y = act.function(y, act.threshold)
        y = tl.where((((bits[:, None] >> b[None, :]) & 1) != 0) & there, y, 0.0)
        if gate is not None:
            opened = valid & (tl.sum((y != 0).to(tl.int32), 1) > 0)
            z = _products(x_ptr, rows, opened, there, up, D, BATCH, BLOCK, ROWS, STAGES)
            if act.both:
                z = act.function(z, act.threshold)
            y = tl.where(y == 0, 0.0, y * z)
        y = (y * UNIT).to(values_ptr.dtype.element_ty)
        live = tl.sum((y != 0).to(tl.int32), 1) > 0
        tl.store(out_ids_ptr + items, tl.where(live, rows, -1), mask=valid)
        tl.store(values_ptr + items[:, None] * BATCH + b[None, :], y, mask=valid[:, None])


@triton.jit(do_not_specialize=["batch"])
def _down_batch_kernel(
    values_ptr, ids_ptr, count_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, partials_ptr, tickets_ptr, batch,
    UNIT: tl.constexpr, D: tl.constexpr, BATCH: tl.constexpr, STRIPE: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    tl.store(partials_ptr + split * batch * D + place, acc * (1 / UNIT), mask=store, cache_modifier=".cg")
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
    """programs: of a multiprocessor. block: columns of a step. rows: of a step. stages: of the cp.async pipeline."""

    programs: int
    block: int
    rows: int
    stages: int


@dataclass(frozen=True)
class DownSettings(Settings, stage="down_batch"):
    """stripe: columns of a program. rows: list entries of a step. stages: of the cp.async pipeline."""

    stripe: int
    rows: int
    stages: int


def up_batch(x: Tensor, weights: MlpWeights, selection: Selection, out: BatchActivations, pdl: bool = False) -> None:
    """x (B, d), B > 1, in the dtype of up and gate (n, d), whose biases are (n). Errors: shapes, dtypes."""
    batch, d = check_input("x", x)
    n = weights.up.weight.shape[0]
    require(batch > 1, "one batch row has a kernel of its own: stages.mlp")
    require(selection.n == n, f"a selection of {selection.n} rows does not fit a weight of {n}")
    matrices: dict[str, NeuronRows] = {}
    for name, linear in weights.named():
        if name != "down":
            numbers = check_numbers(f"{name}.weight", linear.weight, n, d)
            check_tensor(f"{name}.weight", numbers, (n, d), FLOAT_TYPES, x)
            check_tensor("x", x, (batch, d), (numbers.dtype,), x)
            check_tensor(f"{name}.bias", linear.bias, (n,), FLOAT_TYPES, x)
            matrices[name] = NeuronRows((numbers,), linear.bias)
    check_tensor("out.values", out.values, (n, padded_batch(batch)), (x.dtype,), x)
    settings = UpSettings.find(weights.up.weight.format, x.device, d=d)
    blocks = selection.counts.numel()
    has_pdl, use_pdl = programmatic(x, pdl)
    _up_batch_kernel[(min(settings.programs * n_sms(x.device), n),)](
        x, matrices.get("gate"), matrices["up"], selection.ids, selection.counts, selection.row_bits, out.values,
        out.ids, out.count, blocks, batch, ActivationFunction.of(weights.hidden), UNIT=kept_unit(weights, x.dtype), D=d,
        BATCH=padded_batch(batch), BLOCK=min(settings.block, max(16, triton.next_power_of_2(d))), ROWS=settings.rows,
        SEL_BLOCKS=triton.next_power_of_2(max(2, blocks)), SEL_BLOCK=selection.block, STAGES=settings.stages,
        PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip


def down_batch(rows: BatchActivations, weights: MlpWeights, residual: Tensor, out: Tensor, pdl: bool = False) -> None:
    """Down (n, d) with its bias (d), residual and out (B, d) fp32. Bitwise deterministic. Errors: shapes, dtypes."""
    batch, d = check_input("residual", residual)
    n = weights.down.weight.shape[0]
    numbers = check_numbers("down.weight", weights.down.weight, n, d)
    check_tensor("down.weight", numbers, (n, d), FLOAT_TYPES, residual)
    check_tensor("rows.values", rows.values, (n, padded_batch(batch)), (numbers.dtype,), residual)
    check_tensor("rows.partials", rows.partials, (SPLITS, batch, d), (torch.float32,), residual)
    check_tensor("down.bias", weights.down.bias, (d,), FLOAT_TYPES, residual)
    for name, tensor in (("residual", residual), ("out", out)):
        check_tensor(name, tensor, (batch, d), (torch.float32,), residual)
    settings = DownSettings.find(weights.down.weight.format, residual.device, bytes=numbers.element_size())
    has_pdl, use_pdl = programmatic(residual, pdl)
    _down_batch_kernel[(-(-d // settings.stripe), SPLITS)](
        rows.values, rows.ids, rows.count, numbers, weights.down.bias, residual, out, rows.partials, rows.tickets,
        batch, UNIT=kept_unit(weights, numbers.dtype), D=d, BATCH=padded_batch(batch), STRIPE=settings.stripe,
        SPLITS=SPLITS, ROWS=settings.rows, STAGES=settings.stages, PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip


def up_batch_reference(x: Tensor, weights: MlpWeights, mask: Tensor) -> Tensor:
    """(B, n) fp32 in plain torch, zero where mask (B, n) is False."""
    return torch.where(mask, hidden_reference(x.float(), weights), 0.0)


def down_batch_reference(h: Tensor, weights: MlpWeights, residual: Tensor) -> Tensor:
    """(B, d) fp32 in plain torch from dense h (B, n)."""
    return residual + weights.down.bias.float() + h.float() @ weights.down.weight.dense()
