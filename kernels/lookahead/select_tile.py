# mypy: disable-error-code="assignment"
"""The second half of an MLP predictor whose rows are numbers or codes, on the tensor cores.

    logits[i] = up[i] . hidden + bias[i],   hidden (rank,) fp32, up (n, rank) as `select` takes it

A tile of `up` times hidden, whose 16-bit parts (high, low) are columns of one product, which loses nothing to their
rounding. In fp16 two parts hold up to 131008: a larger hidden value counts as that. Codes and nibbles become fp16
numbers, exactly. Nibbles whose rows are whole words are multiplied with fewer instructions by `select_nibbles`.

In plain torch: `select.predict_select_reference`.
"""

import triton
import triton.language as tl

from kernels.mlp.codes import nibble_halves
from kernels.mlp.select_batch import saturated

TERMS = {tl.float32: 1, tl.float16: 2, tl.bfloat16: 3}  # of a hidden value, as columns of a product


@triton.jit
def _terms(hidden, place, n, TYPE: tl.constexpr, TERMS: tl.constexpr):
    """Hidden values at `place` (CHUNK,), zero from n on, as TERMS columns (CHUNK, 8) whose sum they are.

    Past the L1, where they may lie as an earlier layer left them.
    """
    part = tl.arange(0, 8)
    z = tl.load(hidden + place, mask=place < n, other=0.0, cache_modifier=".cg")
    high = saturated(z, TYPE)
    columns = tl.where((part == 0)[None, :], high.to(tl.float32)[:, None], 0.0)
    if TERMS > 1:
        rest = z - high.to(tl.float32)
        middle = saturated(rest, TYPE)
        columns = tl.where((part == 1)[None, :], middle.to(tl.float32)[:, None], columns)
    if TERMS > 2:
        columns = tl.where((part == 2)[None, :], (rest - middle.to(tl.float32))[:, None], columns)
    return columns.to(TYPE)


@triton.jit
def tile_logits(
    block_number,
    hidden,
    up,
    up_scale,
    bias,
    n,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Logits of neurons block_number * BLOCK .. + BLOCK - 1, (BLOCK,) fp32. Nothing is waited for."""
    NIBBLES: tl.constexpr = up.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = (RANK + 1) // 2 if NIBBLES else RANK  # elements of a row
    rows = block_number * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    k = tl.arange(0, CHUNK)
    scale = 1.0
    if up_scale is not None:
        scale = tl.load(up_scale + rows, mask=inside, other=0.0)
    offset = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    w_ptrs = up + rows.to(tl.int64)[:, None] * WIDTH + k[None, :]
    sums = tl.zeros((BLOCK, 8), tl.float32)
    for column in tl.range(0, WIDTH, CHUNK, num_stages=STAGES):
        if WIDTH % CHUNK == 0:
            w = tl.load(w_ptrs + column, mask=inside[:, None], other=0)
        else:
            w = tl.load(w_ptrs + column, mask=inside[:, None] & (column + k < WIDTH)[None, :], other=0)
        z = _terms(hidden, column + k, WIDTH, TYPE, TERMS)
        if NIBBLES:
            low, high = nibble_halves(w)
            sums = tl.dot(low, z, sums, input_precision="ieee")
            more = _terms(hidden, WIDTH + column + k, RANK, TYPE, TERMS)
            sums = tl.dot(high, more, sums, input_precision="ieee")
        else:
            sums = tl.dot(w.to(TYPE), z, sums, input_precision="ieee")
    return tl.sum(sums, 1) * scale + offset
