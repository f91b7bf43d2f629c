"""Batches of 2 to 32 rows on the tensor cores: the kernels behind `gather_gemv` and `select_rows` for B > 1.

y[b, i] = act(sum_j w[i, j] x[b, j] + bias[i]) for listed rows i, and
logits[b, i] = sum_r up[i, r] z[b, r] + bias[i] with the threshold: see gather_gemv.py and select.py, whose wrappers
check the inputs and whose references these must equal.
"""

import triton
import triton.language as tl

from kernels.launch import list_slots_wide, wait_for_predecessor


@triton.jit
def store_selection(chosen, rows, pid, ids_ptr, counts_ptr, BLOCK: tl.constexpr):
    """chosen (BLOCK,) int32 0/1: the ids of the ones, packed to the front of the block's slots."""
    place = pid * BLOCK + tl.cumsum(chosen, 0) - 1
    tl.store(ids_ptr + place, rows, mask=chosen != 0)
    tl.store(counts_ptr + pid, tl.sum(chosen, 0))


@triton.jit(do_not_specialize=["n", "n_blocks", "slots", "batch"])
def gather_dot_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    ids_ptr,
    counts_ptr,
    row_bits_ptr,
    out_ptr,
    live_ids_ptr,
    live_counts_ptr,
    n,
    n_blocks,
    slots,
    batch,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SEL_BLOCKS: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    RELU: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """2 to 32 batch rows on the tensor cores: ROWS gathered weight rows are M, the padded batch is N."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    k = tl.arange(0, BLOCK)
    b = tl.arange(0, BATCH)
    wait_for_predecessor(PDL)
    if counts_ptr is not None:
        block_index = tl.arange(0, SEL_BLOCKS)
        counts = tl.load(counts_ptr + block_index, mask=block_index < n_blocks, other=0)
        running = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0) * GROUP
    else:
        total = n
    first = ((pid.to(tl.int64) * total) // programs).to(tl.int32)
    last = (((pid + 1).to(tl.int64) * total) // programs).to(tl.int32)
    written = 0
    for start in range(first, last, ROWS):
        items = start + tl.arange(0, ROWS)
        valid = items < last
        if ids_ptr is not None:
            slot = list_slots_wide(items // GROUP, running, SEL_BLOCK, SEL_BLOCKS)
            index = tl.load(ids_ptr + slot, mask=valid, other=0)
            rows = index * GROUP + items % GROUP
            bits = tl.load(row_bits_ptr + index, mask=valid, other=0)
        else:
            rows = items
        row_ptrs = w_ptr + rows.to(tl.int64)[:, None] * D + k[None, :]
        x_ptrs = x_ptr + b[None, :] * D + k[:, None]
        acc = tl.zeros((ROWS, BATCH), tl.float32)
        for column in tl.range(0, D, BLOCK, num_stages=STAGES):
            inside = k + column < D
            w = tl.load(row_ptrs + column, mask=valid[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptrs + column, mask=inside[:, None] & (b < batch)[None, :], other=0.0)
            acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
        y = acc
        if scale_ptr is not None:
            y = y * tl.load(scale_ptr + rows, mask=valid, other=0.0)[:, None]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
        if RELU:
            y = tl.where(y <= 0, 0.0, y)
        if ids_ptr is not None:
            y = tl.where(((bits[:, None] >> b[None, :]) & 1) != 0, y, 0.0)
        y = tl.where((b < batch)[None, :], y, 0.0)
        store = valid[:, None] & (b < batch)[None, :]
        if live_ids_ptr is not None:
            live = valid & (tl.sum((y != 0).to(tl.int32), 1) > 0)
            rank = written + tl.cumsum(live.to(tl.int32), 0) - 1
            tl.store(live_ids_ptr + pid * slots + rank, rows, mask=live)
            place = (pid * slots + rank)[:, None] * batch + b[None, :]
            tl.store(out_ptr + place, y, mask=store & live[:, None])
            written += tl.sum(live.to(tl.int32), 0)
        else:
            place = b[None, :].to(tl.int64) * n + rows[:, None]
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=store)
    if live_ids_ptr is not None:
        tl.store(live_counts_ptr + pid, written)


@triton.jit(do_not_specialize=["n", "batch"])
def select_dot_kernel(
    hidden_ptr,
    up_ptr,
    up_scale_ptr,
    bias_ptr,
    threshold_ptr,
    threshold,
    row_state_ptr,
    ids_ptr,
    counts_ptr,
    row_bits_ptr,
    logits_ptr,
    n,
    batch,
    RANK: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """2 to 32 batch rows. The fp32 hidden state enters the 16-bit product as two terms, so it is not rounded."""
    pid = tl.program_id(0)
    rows = pid * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    b = tl.arange(0, BATCH)
    r = tl.arange(0, CHUNK)
    wait_for_predecessor(PDL)
    acc = tl.zeros((BLOCK, BATCH), tl.float32)
    for first in tl.range(0, RANK, CHUNK):
        column = first + r
        tile_ptrs = up_ptr + rows.to(tl.int64)[:, None] * RANK + column[None, :]
        tile = tl.load(tile_ptrs, mask=inside[:, None] & (column < RANK)[None, :], other=0.0).to(DOT)
        z_ptrs = hidden_ptr + b[None, :] * RANK + column[:, None]
        z = tl.load(z_ptrs, mask=(column < RANK)[:, None] & (b < batch)[None, :], other=0.0)
        high = z.to(DOT)
        acc = tl.dot(tile, high, acc, input_precision="ieee")
        if DOT != tl.float32:
            acc = tl.dot(tile, (z - high.to(tl.float32)).to(DOT), acc)
    logits = acc
    if up_scale_ptr is not None:
        logits = logits * tl.load(up_scale_ptr + rows, mask=inside, other=0.0)[:, None]
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    valid = inside[:, None] & (b < batch)[None, :]
    if logits_ptr is not None:
        tl.store(logits_ptr + b[None, :].to(tl.int64) * n + rows[:, None], logits, mask=valid)
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr)
    else:
        limit = threshold
    chosen = (logits > limit) & valid
    if row_state_ptr is not None:
        state = tl.load(row_state_ptr + b, mask=b < batch, other=0)[None, :]
        chosen = (chosen & (state > 0)) | (valid & (state == 2))
    bits = tl.sum(chosen.to(tl.int32) << b[None, :], 1)
    tl.store(row_bits_ptr + rows, bits, mask=inside)
    store_selection((bits != 0).to(tl.int32), rows, pid, ids_ptr, counts_ptr, BLOCK)
