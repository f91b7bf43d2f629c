"""The second stage of a cascade for several batch rows: candidates are tested, and the list keeps those that pass.

    s[b, i] = step[i] unit[b] sum_j u[i, j] r[b, j] + bias[i]
    passed[b, i] = candidate[b, i] and (s[b, i] > stage2_threshold[i] or row b is dense)

r, unit, u, step and threshold as in cascade.py. u and r are whole numbers of at most 7 and 127, exact in fp16, and a
tensor core's sums of their products are exact in fp32 up to widths of 18,000, so every backend finds the same set. One
kernel rounds x. In the other a program owns a block of the selection, multiplies the upper planes of its candidates
with all rows at once, and rewrites the block's list. What passed is then computed by `fc1_batch` from whole rows of
fc1."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_input, check_tensor, require
from kernels.common.launch import next_power_of_two, padded_batch, programmatic, wait_for_predecessor
from kernels.mlp.cascade import CascadeWeights, second_stage
from kernels.mlp.cascade_parts import ROUND
from kernels.mlp.selection import Selection


@dataclass(frozen=True)
class InputLevels:
    """x rounded: r (B, d) fp16, whole numbers in -127..127, and unit (B,) fp32, so that x is about unit r."""

    levels: Tensor
    units: Tensor

    @classmethod
    def empty(cls, batch: int, d: int, device: torch.device | str) -> "InputLevels":
        levels = torch.zeros(batch, d, dtype=torch.float16, device=device)
        return cls(levels, torch.zeros(batch, device=device, dtype=torch.float32))


@triton.jit
def _levels_kernel(x, levels, units, D: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """A program a batch row."""
    row = tl.program_id(0)
    c = tl.arange(0, TILE)
    wait_for_predecessor(PDL)
    values = tl.load(x + row * D + c, mask=c < D, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(values), 0)
    top = tl.where(top > 0, top, 1.0)
    level = (values * (127 / top) + ROUND) - ROUND
    tl.store(levels + row * D + c, level.to(tl.float16), mask=c < D)
    tl.store(units + row, top / 127)


@triton.jit(do_not_specialize=["batch"])
def _test_kernel(
    levels,
    units,
    upper,
    step,
    bias,
    stage2_threshold,
    row_state,
    ids,
    counts,
    row_bits,
    batch,
    W: tl.constexpr,
    BATCH: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The candidates (SLOTS,) of one block of the selection against all rows, WORDS words of their planes a step."""
    block = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    b = tl.arange(0, BATCH)
    w = tl.arange(0, WORDS)
    there = b < batch
    wait_for_predecessor(PDL)
    count = tl.load(counts + block)
    valid = slot < count
    rows = tl.load(ids + block * SLOTS + slot, mask=valid, other=0)
    bits = tl.load(row_bits + rows, mask=valid, other=0)
    sums = tl.zeros((SLOTS, BATCH), tl.float32)
    for first in range(0, tl.where(count > 0, W, 0), WORDS):
        inside = first + w < W
        at = upper + rows.to(tl.int64)[:, None] * W + (first + w)[None, :]
        words = tl.load(at, mask=valid[:, None] & inside[None, :], other=0)
        for k in tl.static_range(8):
            codes = ((words >> (4 * k)) & 15) - 8
            place = b[None, :] * (8 * W) + k * W + (first + w)[:, None]
            r = tl.load(levels + place, mask=there[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(codes.to(tl.float16), r, sums)
    steps = tl.load(step + rows, mask=valid, other=0.0)[:, None]
    unit = tl.load(units + b, mask=there, other=0.0)[None, :]
    scores = sums * steps * unit + tl.load(bias + rows, mask=valid, other=0.0)[:, None]
    dense = tl.load(row_state + b, mask=there, other=0) == 2
    passed = (scores > tl.load(stage2_threshold + rows, mask=valid, other=0.0)[:, None]) | dense[None, :]
    passed = passed & (((bits[:, None] >> b[None, :]) & 1) != 0) & there[None, :]
    bits = tl.sum(passed.to(tl.int32) << b[None, :], 1)
    tl.store(row_bits + rows, bits, mask=valid)
    kept = (valid & (bits != 0)).to(tl.int32)
    tl.debug_barrier()  # every id of the block is read before the first is overwritten
    tl.store(ids + block * SLOTS + tl.cumsum(kept, 0) - 1, rows, mask=kept != 0)
    tl.store(counts + block, tl.sum(kept, 0))


def cascade_test(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    row_state: Tensor,
    scratch: InputLevels,
    pdl: bool = False,
) -> None:
    """Take out of `selection`, its list included, what does not pass the second stage in any row.

    x (B, d), B > 1, fp32 or 16 bits, as fc1 reads it. weights.rest is not read. row_state (B,) int32: 2 = a dense row,
    which is not tested. Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    require(batch > 1, "one batch row has a kernel of its own: cascade")
    n, blocks = selection.n, selection.counts.numel()
    check_tensor("weights.upper", weights.upper, (n, d // 8), (torch.int32,), x)
    for name in ("step", "bias", "stage2_threshold"):
        check_tensor(f"weights.{name}", getattr(weights, name), (n,), (torch.float32,), x)
    check_tensor("row_state", row_state, (batch,), (torch.int32,), x)
    check_tensor("scratch.levels", scratch.levels, (batch, d), (torch.float16,), x)
    slots = selection.block
    require(slots >= 16 and slots & (slots - 1) == 0, f"a block of {slots} candidates is no power of two from 16 on")
    has_pdl, use_pdl = programmatic(x, pdl)
    _levels_kernel[(batch,)](
        x, scratch.levels, scratch.units, D=d, TILE=next_power_of_two(d), PDL=has_pdl, num_warps=8, launch_pdl=use_pdl
    )
    _test_kernel[(blocks,)](
        scratch.levels,
        scratch.units,
        weights.upper,
        weights.step,
        weights.bias,
        weights.stage2_threshold,
        row_state,
        selection.ids,
        selection.counts,
        selection.row_bits,
        batch,
        W=d // 8,
        BATCH=padded_batch(batch),
        SLOTS=slots,
        WORDS=16 if INTERPRET or d < 512 else 64,
        PDL=has_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


def cascade_test_reference(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    row_state: Tensor,
    scratch: InputLevels | None = None,
    pdl: bool = False,
) -> None:
    """Plain torch, in place."""
    selection.set_mask(second_stage(x, weights, selection.to_mask(len(x)), row_state))
