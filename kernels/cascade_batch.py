# mypy: disable-error-code="assignment"
"""Kernels of a cascade for several batch rows, and for lists of live rows: see cascade.py, whose wrapper calls them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cascade_parts import largest, level_products, levels, row_products, x_parts
from kernels.launch import wait_for_predecessor


@dataclass(frozen=True)
class InputLevels:
    """x rounded, as the test's kernel reads it: words (B, 2, W) int32, bytes of the columns that meet the even and the
    odd nibbles of a word; units (B, 2) fp32, unit and eight times the sum of all levels."""

    words: Tensor
    units: Tensor

    @classmethod
    def empty(cls, batch: int, d: int, device: torch.device | str) -> "InputLevels":
        words = torch.zeros(batch, 2, d // 8, dtype=torch.int32, device=device)
        return cls(words, torch.zeros(batch, 2, device=device))


@triton.jit
def levels_kernel(x, words, units, W: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """A program a batch row."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, TILE)
    wait_for_predecessor(PDL)
    xs = x_parts(x + row * (8 * W), w, W)
    top = largest(xs)
    top = tl.where(top > 0, top, 1.0)
    even, odd, total = levels(xs, 127 / top)
    at = words + row * (2 * W) + w
    tl.store(at, even, mask=w < W)
    tl.store(at + W, odd, mask=w < W)
    tl.store(units + 2 * row, top / 127)
    tl.store(units + 2 * row + 1, 8 * total)


@triton.jit(do_not_specialize=["batch", "block_rows", "share"])
def cascade_rows_kernel(
    x,
    levels,
    units,
    upper,
    rest,
    step,
    scale,
    bias,
    bar,
    row_state,
    ids,
    counts,
    row_bits,
    live_ids,
    live_values,
    live_counts,
    batch,
    block_rows,
    share,
    W: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    BATCH: tl.constexpr,
    SLOTS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    block = pid // share
    part = pid % share
    w0 = tl.arange(0, W0)
    w1 = w0
    if W1 > 0:
        w1 = W0 + tl.arange(0, W1)
    b = tl.arange(0, BATCH)
    wait_for_predecessor(PDL)
    # The id may be one beyond the count: then it is an old one, in range, and its row is not read.
    count = tl.load(counts + block, cache_modifier=".cg")
    row = tl.load(ids + block * block_rows + tl.minimum(part, block_rows - 1), cache_modifier=".cg")
    width = tl.where(part < count, W, 0)
    words0 = tl.load(upper + row.to(tl.int64) * W + w0, mask=w0 < width, other=0)
    words1 = words0
    if W1 > 0:
        words1 = tl.load(upper + row.to(tl.int64) * W + w1, mask=w1 < width, other=0)
    unit = tl.load(units + 2 * b, mask=b < batch, other=0.0)
    zero = tl.load(units + 2 * b + 1, mask=b < batch, other=0.0)
    dense = b < 0
    if row_state is not None:
        dense = tl.load(row_state + b, mask=b < batch, other=0) == 2
    if BATCH == 1:  # held for all candidates
        even0 = tl.load(levels + w0)
        odd0 = tl.load(levels + W + w0)
        even1 = even0
        odd1 = odd0
        if W1 > 0:
            even1 = tl.load(levels + w1, mask=w1 < W, other=0)
            odd1 = tl.load(levels + W + w1, mask=w1 < W, other=0)
    written = 0
    for item in range(part, count, share):
        ahead = item + share
        next_row = tl.load(ids + block * block_rows + tl.minimum(ahead, block_rows - 1), cache_modifier=".cg")
        width = tl.where(ahead < count, W, 0)
        next0 = tl.load(upper + next_row.to(tl.int64) * W + w0, mask=w0 < width, other=0)
        next1 = next0
        if W1 > 0:
            next1 = tl.load(upper + next_row.to(tl.int64) * W + w1, mask=w1 < width, other=0)
        row_step = tl.load(step + row)
        row_scale = tl.load(scale + row)
        row_bias = tl.load(bias + row)
        row_bar = tl.load(bar + row)
        bits = tl.load(row_bits + row)
        sums = tl.zeros((BATCH,), tl.float32)
        if BATCH == 1:
            found = tl.sum(level_products(words0, even0, odd0, ASM))
            if W1 > 0:
                found += tl.sum(level_products(words1, even1, odd1, ASM))
            sums += found.to(tl.float32)
        else:
            for one in range(batch):
                if ((bits >> one) & 1) != 0:
                    own = levels + one * (2 * W)
                    found = tl.sum(level_products(words0, tl.load(own + w0), tl.load(own + W + w0), ASM))
                    if W1 > 0:
                        even = tl.load(own + w1, mask=w1 < W, other=0)
                        odd = tl.load(own + W + w1, mask=w1 < W, other=0)
                        found += tl.sum(level_products(words1, even, odd, ASM))
                    sums = tl.where(b == one, found.to(tl.float32), sums)
        scores = (sums - zero) * row_step * unit + row_bias
        passed = (((bits >> b) & 1) != 0) & (b < batch) & ((scores > row_bar) | dense)
        bits = tl.sum(passed.to(tl.int32) << b)
        tl.store(row_bits + row, bits)
        if bits != 0:
            values = tl.zeros((BATCH,), tl.float32)
            start = rest + row.to(tl.int64) * (3 * W)
            for one in range(batch):
                if ((bits >> one) & 1) != 0:
                    own = x + one * (8 * W)
                    high, low = row_products(words0, start, own, w0, W)
                    if W1 > 0:
                        more_high, more_low = row_products(words1, start, own, w1, W)
                        high += more_high
                        low += more_low
                    values = tl.where(b == one, high * row_step + low * row_scale + row_bias, values)
            values = tl.where(passed & ~(values <= 0), values, 0.0)  # keeps a NaN
            slot = pid * SLOTS + written
            tl.store(live_ids + slot, row)
            tl.store(live_values + slot * batch + b, values, mask=b < batch)
            written += (tl.sum((values != 0).to(tl.int32)) > 0).to(tl.int32)
        row = next_row
        words0 = next0
        words1 = next1
    tl.store(live_counts + pid, written)
