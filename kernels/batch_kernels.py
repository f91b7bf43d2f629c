"""Batches of 2 to 32 rows on the tensor cores: the kernels behind gather_gemv, scatter_gemv and select_rows for B > 1.

y[b, i] = act(sum_j w[i, j] x[b, j] + bias[i]) for listed rows i, and
logits[b, i] = sum_r up[i, r] z[b, r] + bias[i] with the threshold: see gather_gemv.py and select.py, whose wrappers
check the inputs and whose references these must equal.
"""

import triton
import triton.language as tl

from kernels.launch import list_slots_wide, wait_for_predecessor


@triton.jit
def saturated(z, TYPE: tl.constexpr):
    """fp32 z in TYPE; beyond fp16's range its largest value, where a plain conversion gives an infinity."""
    if TYPE == tl.float16:
        bounded = tl.where(tl.abs(z) > 65504.0, tl.where(z > 0, 65504.0, -65504.0), z)  # keeps a NaN
    else:
        bounded = z
    return bounded.to(TYPE)


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
        high = saturated(z, DOT)
        acc = tl.dot(tile, high, acc, input_precision="ieee")
        if DOT != tl.float32:
            acc = tl.dot(tile, saturated(z - high.to(tl.float32), DOT), acc)
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


@triton.jit(do_not_specialize=["n_blocks", "slots"])
def pack_list_kernel(
    ids_ptr,
    counts_ptr,
    total_ptr,
    list_ids_ptr,
    list_slots_ptr,
    n_blocks,
    slots,
    BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The list without gaps: ids, the slots they stand in, and their number. Program p packs WINDOW blocks."""
    wait_for_predecessor(PDL)
    low = tl.program_id(0) * WINDOW
    every = tl.arange(0, BLOCKS)
    all_counts = tl.load(counts_ptr + every, mask=every < n_blocks, other=0)
    at = tl.sum(tl.where(every < low, all_counts, 0), 0)
    if low == 0:
        tl.store(total_ptr, tl.sum(all_counts, 0))
    t = tl.arange(0, WINDOW * SLOTS)
    offset = t % SLOTS
    block = low + t // SLOTS
    counts = tl.load(counts_ptr + block, mask=block < n_blocks, other=0)
    most = tl.max(counts, 0)
    # Packed in the order (first slots of all blocks, next slots, ...): the order of a sum, the same in every run.
    for base in range(0, most, SLOTS):
        valid = base + offset < counts
        slot = block * slots + base + offset
        ids = tl.load(ids_ptr + slot, mask=valid, other=0)
        place = at + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(list_ids_ptr + place, ids, mask=valid)
        tl.store(list_slots_ptr + place, slot, mask=valid)
        at += tl.sum(valid.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n", "n_blocks", "batch"])
def scatter_dot_kernel(
    h_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    ids_ptr,
    counts_ptr,
    row_bits_ptr,
    slots_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    n,
    n_blocks,
    batch,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SEL_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LIVE: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """2 to 32 batch rows on the tensor cores: STRIPE columns are M, the padded batch is N, listed rows are K."""
    stripe = tl.program_id(0)
    split = tl.program_id(1)
    columns = stripe * STRIPE + tl.arange(0, STRIPE)
    inside = columns < D
    b = tl.arange(0, BATCH)
    in_batch = b < batch
    wait_for_predecessor(PDL)
    if LIVE:  # a packed list and its length
        total = tl.load(counts_ptr)
    elif ids_ptr is not None:
        index = tl.arange(0, BLOCKS)
        counts = tl.load(counts_ptr + index, mask=index < n_blocks, other=0)
        running = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0) * GROUP
    else:
        total = n
    first = (split.to(tl.int64) * total // SPLITS).to(tl.int32)
    last = ((split + 1).to(tl.int64) * total // SPLITS).to(tl.int32)
    acc = tl.zeros((STRIPE, BATCH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        items = start + tl.arange(0, ROWS)
        valid = items < last
        use = valid[:, None] & in_batch[None, :]
        if LIVE:
            slot = tl.load(slots_ptr + items, mask=valid, other=0)
            rows = tl.load(ids_ptr + items, mask=valid, other=0)
            h = tl.load(h_ptr + slot[:, None] * batch + b[None, :], mask=use, other=0.0)
        else:
            if ids_ptr is not None:
                slot = list_slots_wide(items // GROUP, running, SEL_BLOCK, BLOCKS)
                chosen = tl.load(ids_ptr + slot, mask=valid, other=0)
                rows = chosen * GROUP + items % GROUP
                bits = tl.load(row_bits_ptr + chosen, mask=valid, other=0)
                use = use & (((bits[:, None] >> b[None, :]) & 1) != 0)
            else:
                rows = items
            h = tl.load(h_ptr + b[None, :].to(tl.int64) * n + rows[:, None], mask=use, other=0.0)
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
        w = tl.load(w_ptrs, mask=valid[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(tl.trans(w.to(DOT)), h.to(DOT), acc, input_precision="ieee")
    place = b[None, :] * D + columns[:, None]
    store = inside[:, None] & in_batch[None, :]
    tl.store(partials_ptr + split * batch * D + place, acc, mask=store, cache_modifier=".cg")
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets_ptr + stripe, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        y = tl.zeros((STRIPE, BATCH), tl.float32)
        for s in tl.static_range(SPLITS):
            y += tl.load(partials_ptr + s * batch * D + place, mask=store, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        if residual_ptr is not None:
            y += tl.load(residual_ptr + place, mask=store, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=store)
        tl.store(tickets_ptr + stripe, 0)
