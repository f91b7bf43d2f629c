"""The predictor's second product for 2 to 32 rows, on the tensor cores, and what every selecting kernel shares.

logits[b, i] = sum_r up[i, r] z[b, r] + bias[i] with the threshold: see select.py, whose wrapper checks the inputs and
whose reference this must equal.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.common.row_state import by_state


@triton.jit
def saturated(z, TYPE: tl.constexpr):
    """fp32 z in TYPE. Beyond fp16's range its largest value, where a plain conversion gives an infinity."""
    if TYPE == tl.float16:
        bounded = tl.clamp(z, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)  # two instructions, keeps a NaN
    else:
        bounded = z
    return bounded.to(TYPE)


@triton.jit
def store_selection(chosen, rows, pid, ids_ptr, counts_ptr, BLOCK: tl.constexpr):
    """chosen (BLOCK,) int32 0/1: the ids of the ones, packed to the front of the block's slots."""
    place = pid * BLOCK + tl.cumsum(chosen, 0) - 1
    tl.store(ids_ptr + place, rows, mask=chosen != 0)
    tl.store(counts_ptr + pid, tl.sum(chosen, 0))


@triton.jit
def store_chosen(
    logits, limit, state, rows, inside, block_number, ids_ptr, counts_ptr, row_bits_ptr, BLOCK: tl.constexpr
):
    """Bits and list of the neurons `rows` (BLOCK,), those `inside`, of one batch row by their logits. state: the row's,
    or None: one that is decoded sparsely."""
    chosen = (logits > limit) & inside  # False for NaN
    if state is not None:
        chosen = by_state(chosen, state, inside)
    bits = chosen.to(tl.int32)
    tl.store(row_bits_ptr + rows, bits, mask=inside)
    store_selection(bits, rows, block_number, ids_ptr, counts_ptr, BLOCK)


@triton.jit
def store_chosen_rows(
    logits, limit, state, b, rows, pid, ids_ptr, counts_ptr, row_bits_ptr, logits_ptr, n, batch, BLOCK: tl.constexpr
):
    """The same of several batch rows b by their logits (BLOCK, rows), which are stored unless logits_ptr is None.

    state: (1, rows) or None. Returns which neurons any row selects: (BLOCK,) int32 0/1."""
    inside = rows < n
    valid = inside[:, None] & (b < batch)[None, :]
    if logits_ptr is not None:
        tl.store(logits_ptr + b[None, :].to(tl.int64) * n + rows[:, None], logits, mask=valid)
    chosen = (logits > limit) & valid  # False for NaN
    if state is not None:
        chosen = by_state(chosen, state, valid)
    bits = tl.sum(chosen.to(tl.int32) << b[None, :], 1)
    tl.store(row_bits_ptr + rows, bits, mask=inside)
    some = (bits != 0).to(tl.int32)
    store_selection(some, rows, pid, ids_ptr, counts_ptr, BLOCK)
    return some


@triton.jit(do_not_specialize=["n", "batch"])
def select_batch_kernel(
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
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr)
    else:
        limit = threshold
    state = None
    if row_state_ptr is not None:
        state = tl.load(row_state_ptr + b, mask=b < batch, other=0)[None, :]
    store_chosen_rows(
        logits, limit, state, b, rows, pid, ids_ptr, counts_ptr, row_bits_ptr, logits_ptr, n, batch, BLOCK
    )
