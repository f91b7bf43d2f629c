"""A weighted sum of listed rows: y[b, j] = residual[b, j] + bias[j] + sum_i h[b, i] w_t[i, j], i over the list.

h is a `LiveRows` list (fc2 after the gathered fc1: rows of zero activations are never read), or a dense (B, n) with the
rows of a selection (the out-projection after attention over selected heads), or with all rows. w_t (n, d), fp32 sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch_kernels import pack_list_kernel, scatter_dot_kernel
from kernels.gather_gemv import LiveRows
from kernels.launch import (
    FLOAT_TYPES,
    ScatterSettings,
    check_input,
    check_tensor,
    dot_type,
    next_power_of_two,
    padded_batch,
    programmatic,
    require,
    scatter_settings,
    wait_for_predecessor,
)
from kernels.select import Selection


@dataclass(frozen=True)
class ScatterScratch:
    """Partial sums (splits, B, d) fp32, one ticket per column stripe (int32, zero between calls), and room for a
    batch's packed list (int32)."""

    partials: Tensor
    tickets: Tensor
    listed: Tensor

    @classmethod
    def empty(
        cls, batch: int, d: int, device: torch.device | str, max_splits: int = 96, n: int | None = None
    ) -> "ScatterScratch":
        """For weights of up to n rows (4 d when not given)."""
        partials = torch.zeros(max_splits, batch, d, dtype=torch.float32, device=device)
        listed = torch.zeros(0 if batch == 1 else 2 * (n or 4 * d) + 16, dtype=torch.int32, device=device)
        return cls(partials, torch.zeros(-(-d // 64), dtype=torch.int32, device=device), listed)

    def packed(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """(length (1,), ids (n,), slots (n,)) of a batch's packed list."""
        if self.listed.numel() < 2 * n + 16:
            raise ValueError(
                f"the scratch holds {self.listed.numel()} list entries, a batch of {n} rows needs {2 * n + 16}"
            )
        return self.listed[:1], self.listed[16 : 16 + n], self.listed[16 + n : 16 + 2 * n]


def scatter_gemv_reference(
    h: Tensor, weight_t: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """(B, d) in plain torch from dense h (B, n); fp64 when h is fp64, else fp32."""
    wide = h.dtype if h.dtype == torch.float64 else torch.float32
    if mask is not None:
        h = torch.where(mask, h, torch.zeros_like(h))
    y = h.to(wide) @ weight_t.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y if residual is None else y + residual.to(wide)


@triton.jit(do_not_specialize=["n", "n_blocks", "slots"])
def _scatter_kernel(
    h_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    ids_ptr,
    counts_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    n,
    n_blocks,
    slots,
    D: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    LIVE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One batch row: program (stripe, split) sums its share of the listed rows over STRIPE columns.

    A share of a list is WINDOW of its blocks, SLOTS slots of each at a time; what the first slots hold is loaded beside
    the counts that say whether it is valid, so no load waits for a search of the list.
    """
    stripe = tl.program_id(0)
    split = tl.program_id(1)
    columns = stripe * STRIPE + tl.arange(0, STRIPE)
    inside = columns < D
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    if ids_ptr is not None:
        low = split * n_blocks // SPLITS
        high = (split + 1) * n_blocks // SPLITS
        t = tl.arange(0, WINDOW * SLOTS * GROUP_PAD)
        member = t % GROUP_PAD
        offset = (t // GROUP_PAD) % SLOTS
        block = low + t // (GROUP_PAD * SLOTS)
        listed = (block < high) & (member < GROUP)
        counts = tl.load(counts_ptr + block, mask=listed, other=0)
        slot = block * slots + offset
        index = tl.load(ids_ptr + slot, mask=listed & (offset < slots), other=0)
        if LIVE:
            h = tl.load(h_ptr + slot, mask=listed & (offset < slots), other=0.0).to(tl.float32)
        valid = offset < counts
        rows = index * GROUP + member
        if not LIVE:
            h = tl.load(h_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
        w = tl.load(w_ptrs, mask=valid[:, None] & inside[None, :], other=0.0)
        partial = tl.sum(w.to(tl.float32) * tl.where(valid, h, 0.0)[:, None], 0)
        for base in range(SLOTS, tl.max(counts, 0), SLOTS):
            valid = base + offset < counts
            index = tl.load(ids_ptr + slot + base, mask=valid, other=0)
            rows = index * GROUP + member
            if LIVE:
                h = tl.load(h_ptr + slot + base, mask=valid, other=0.0).to(tl.float32)
            else:
                h = tl.load(h_ptr + rows, mask=valid, other=0.0).to(tl.float32)
            w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
            w = tl.load(w_ptrs, mask=valid[:, None] & inside[None, :], other=0.0)
            partial += tl.sum(w.to(tl.float32) * h[:, None], 0)
    else:
        first = (split.to(tl.int64) * n // SPLITS).to(tl.int32)
        last = ((split + 1).to(tl.int64) * n // SPLITS).to(tl.int32)
        acc = tl.zeros((ROWS, STRIPE), tl.float32)
        for start in tl.range(first, last, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            here = row < last
            h = tl.load(h_ptr + row, mask=here, other=0.0).to(tl.float32)
            w_ptrs = w_ptr + row.to(tl.int64)[:, None] * D + columns[None, :]
            w = tl.load(w_ptrs, mask=here[:, None] & inside[None, :], other=0.0)
            acc += w.to(tl.float32) * h[:, None]
        partial = tl.sum(acc, 0)
    tl.store(partials_ptr + split * D + columns, partial, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's partial is stored before one thread releases the ticket
    arrived = tl.atomic_add(tickets_ptr + stripe, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        s = tl.arange(0, SPLITS_PAD)
        partial_ptrs = partials_ptr + s[:, None] * D + columns[None, :]
        parts = tl.load(partial_ptrs, mask=(s < SPLITS)[:, None] & inside[None, :], other=0.0, cache_modifier=".cg")
        y = tl.sum(parts, 0)
        if bias_ptr is not None:
            y += bias
        if residual_ptr is not None:
            y += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(tickets_ptr + stripe, 0)


def scatter_gemv(
    h: Tensor | LiveRows,
    weight_t: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    selection: Selection | None,
    out: Tensor,
    rows_per_id: int = 1,
    scratch: ScatterScratch | None = None,
    pdl: bool = False,
    settings: ScatterSettings | None = None,
) -> None:
    """Sum the listed rows of weight_t (n, d) into out (B, d), bitwise deterministic.

    h: `LiveRows` (selection None), or (B, n) fp32/fp16/bf16 with a selection of n / rows_per_id ids (rows that batch
    row b did not select count as zero for it; with B = 1 the list itself says so), or with selection None: all n rows.
    residual: (B, d) or None; out: (B, d) and may be the residual itself; both fp32/fp16/bf16. For B > 1, h is rounded
    to the dtype of the weight. scratch: shared by calls that run one after another; without it the call makes one.
    """
    values = h.values if isinstance(h, LiveRows) else h
    if isinstance(h, LiveRows):
        require(selection is None, "LiveRows are a list already; they take no selection")
        batch = h.values.shape[1]
        check_input("h.values", h.values.view(batch, -1))
        n_listed = h.n
    else:
        batch, n_listed = check_input("h", h)
    n, d = weight_t.shape
    require(n == n_listed, f"h has {n_listed} rows, the weight {n}")
    check_tensor("weight_t", weight_t, (n, d), FLOAT_TYPES, values)
    check_tensor("out", out, (batch, d), FLOAT_TYPES, values)
    if bias is not None:
        check_tensor("bias", bias, (d,), FLOAT_TYPES, values)
    if residual is not None:
        check_tensor("residual", residual, (batch, d), FLOAT_TYPES, values)
    ids = counts = row_bits = None
    n_blocks, sel_block, slots = 0, 1, 0
    if isinstance(h, LiveRows):
        listed, capacity = h.counts.numel(), h.slots
    else:
        listed, capacity = (0, 0) if selection is None else (selection.counts.numel(), selection.block)
    settings = settings or scatter_settings(d, batch, listed, rows_per_id, capacity)
    splits, blocks = settings.splits, 2
    if isinstance(h, LiveRows):
        ids, counts, slots = h.ids, h.counts, h.slots
        n_blocks = counts.numel()
    elif selection is not None:
        require(
            selection.n * rows_per_id == n,
            f"a selection of {selection.n} ids of {rows_per_id} rows does not fit a weight of {n} rows",
        )
        ids, counts, row_bits, sel_block = selection.ids, selection.counts, selection.row_bits, selection.block
        n_blocks = counts.numel()
        blocks = next_power_of_two(max(2, n_blocks))
    stripes = -(-d // settings.stripe)
    if scratch is None:
        scratch = ScatterScratch.empty(batch, d, values.device, splits, n)
    require(
        scratch.partials.numel() >= splits * batch * d,
        f"the scratch holds {scratch.partials.numel()} partial sums, {splits} splits of {batch} x {d} are needed",
    )
    require(scratch.tickets.numel() >= stripes, f"the scratch holds {scratch.tickets.numel()} tickets of {stripes}")
    has_pdl, use_pdl = programmatic(values, pdl)
    if batch == 1:
        group_pad = next_power_of_two(rows_per_id)
        _scatter_kernel[(stripes, splits)](
            values, weight_t, bias, residual, ids, counts, out, scratch.partials, scratch.tickets, n, n_blocks,
            slots if isinstance(h, LiveRows) else sel_block, D=d, STRIPE=settings.stripe, SPLITS=splits,
            SPLITS_PAD=next_power_of_two(splits), ROWS=settings.rows, WINDOW=next_power_of_two(-(-n_blocks // splits)),
            SLOTS=min(settings.slots, next_power_of_two(slots if isinstance(h, LiveRows) else sel_block)),
            GROUP=rows_per_id, GROUP_PAD=group_pad, LIVE=isinstance(h, LiveRows), STAGES=settings.stages,
            PDL=has_pdl, num_warps=settings.warps, launch_pdl=use_pdl,
        )  # fmt: skip
    else:
        list_slots = None
        if isinstance(h, LiveRows):
            total, ids, list_slots = scratch.packed(n)
            pack_list_kernel[(-(-n_blocks // 32),)](
                h.ids, h.counts, total, ids, list_slots, n_blocks, slots, BLOCKS=next_power_of_two(n_blocks),
                WINDOW=32, SLOTS=8, PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
            )  # fmt: skip
            counts, blocks = total, 2
        scatter_dot_kernel[(stripes, splits)](
            values, weight_t, bias, residual, ids, counts, row_bits, list_slots, out, scratch.partials,
            scratch.tickets, n, n_blocks, batch, D=d, BATCH=padded_batch(batch), STRIPE=settings.stripe,
            SPLITS=splits, ROWS=settings.rows, BLOCKS=blocks, SEL_BLOCK=sel_block, GROUP=rows_per_id,
            LIVE=isinstance(h, LiveRows), STAGES=settings.stages, DOT=dot_type(weight_t.dtype), PDL=has_pdl,
            num_warps=settings.warps, launch_pdl=use_pdl,
        )  # fmt: skip
