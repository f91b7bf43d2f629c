# mypy: disable-error-code="assignment"
"""The weighted row sum of `scatter_gemv` for one batch row and a `LiveRows` list, as an unbroken stream of rows.

    y[j] = residual[j] + bias[j] + sum_k h[k] w_t[ids[k], j] over the list

A program owns a stripe of columns and a window of the list's blocks. It first packs its window into a list without gaps
(in a scratch of its own), then reads row after row with ROWS of them always on their way and one accumulator a column:
nothing is reduced, searched or waited for inside the loop. A second kernel adds the windows' partial sums.
"""

import triton
import triton.language as tl

from kernels.launch import wait_for_predecessor


@triton.jit
def _pack(ids, values, valid, at, list_ids_ptr, list_values_ptr):
    """Append the valid entries; returns the new length."""
    place = at + tl.cumsum(valid.to(tl.int32), 0) - 1
    tl.store(list_ids_ptr + place, ids, mask=valid)
    tl.store(list_values_ptr + place, values, mask=valid)
    return at + tl.sum(valid.to(tl.int32), 0)


@triton.jit
def _load_stripe(w_ptr, ids, first, count, columns, D: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows (ids (ROWS,), of which those numbered below count - first exist) as a tuple of tiles (STRIPE,)."""
    pick = tl.arange(0, ROWS)
    tiles = ()
    for k in tl.static_range(ROWS):
        row = tl.sum(tl.where(pick == k, ids, 0), 0).to(tl.int64)
        limit = tl.where(first + k < count, D, 0)
        tiles = tiles + (tl.load(w_ptr + row * D + columns, mask=columns < limit, other=0.0),)
    return tiles


@triton.jit(do_not_specialize=["n_blocks", "slots"])
def scatter_rows_kernel(
    h_ptr,
    w_ptr,
    bias_ptr,
    ids_ptr,
    counts_ptr,
    out_ptr,
    partials_ptr,
    list_ids_ptr,
    list_values_ptr,
    n_blocks,
    slots,
    D: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    ATOMIC: tl.constexpr,
    PDL: tl.constexpr,
):
    stripe = tl.program_id(0)
    split = tl.program_id(1)
    columns = stripe * STRIPE + tl.arange(0, STRIPE)
    inside = columns < D
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)

    # What the first slots hold is loaded beside the counts that say whether it is valid.
    low = split * n_blocks // SPLITS
    high = (split + 1) * n_blocks // SPLITS
    t = tl.arange(0, WINDOW * SLOTS)
    offset = t % SLOTS
    block = low + t // SLOTS
    listed = block < high
    slot = block * slots + offset
    counts = tl.load(counts_ptr + block, mask=listed, other=0)
    ids = tl.load(ids_ptr + slot, mask=listed & (offset < slots), other=0)
    values = tl.load(h_ptr + slot, mask=listed & (offset < slots), other=0.0)
    private = stripe * n_blocks * slots + low * slots
    list_ids_ptr += private
    list_values_ptr += private
    total = _pack(ids, values, offset < counts, 0, list_ids_ptr, list_values_ptr)
    for base in range(SLOTS, tl.max(counts, 0), SLOTS):
        valid = base + offset < counts
        ids = tl.load(ids_ptr + slot + base, mask=valid, other=0)
        values = tl.load(h_ptr + slot + base, mask=valid, other=0.0)
        total = _pack(ids, values, valid, total, list_ids_ptr, list_values_ptr)
    tl.debug_barrier()  # the packed list is read by other threads than wrote it

    pick = tl.arange(0, ROWS)
    acc = tl.zeros((STRIPE,), tl.float32)
    h_now = tl.load(list_values_ptr + pick, mask=pick < total, other=0.0)
    ids_next = tl.load(list_ids_ptr + ROWS + pick, mask=ROWS + pick < total, other=0)
    tiles = _load_stripe(w_ptr, tl.load(list_ids_ptr + pick, mask=pick < total, other=0), 0, total, columns, D, ROWS)
    for first in range(0, total, ROWS):
        after = first + 2 * ROWS + pick
        coming = _load_stripe(w_ptr, ids_next, first + ROWS, total, columns, D, ROWS)
        ids_next = tl.load(list_ids_ptr + after, mask=after < total, other=0)
        h_next = tl.load(list_values_ptr + after - ROWS, mask=after - ROWS < total, other=0.0)
        for k in tl.static_range(ROWS):
            acc += tiles[k].to(tl.float32) * tl.sum(tl.where(pick == k, h_now, 0.0), 0)
        tiles = coming
        h_now = h_next

    if ATOMIC:
        if bias_ptr is not None:
            acc += tl.where(split == 0, bias, 0.0)
        tl.atomic_add(out_ptr + columns, acc, mask=inside, sem="relaxed")
    else:
        tl.store(partials_ptr + split * D + columns, acc, mask=inside)


@triton.jit
def add_partials_kernel(
    partials_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    D: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = residual + bias + the sum of the partial sums, in an order that the shape fixes.

    A kernel of its own and not the last arriver's task: many narrow programs read all partial sums at once, where the
    last program of each wide stripe would read them alone, a few at a time.
    """
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    inside = columns < D
    s = tl.arange(0, SPLITS_PAD)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    part_ptrs = partials_ptr + s[:, None] * D + columns[None, :]
    y = tl.sum(tl.load(part_ptrs, mask=(s < SPLITS)[:, None] & inside[None, :], other=0.0), 0)
    if bias_ptr is not None:
        y += bias
    if residual_ptr is not None:
        y += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


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
