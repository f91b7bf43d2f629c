"""fc1 of a cascade: candidates are tested on four bits of their row, and only what passes is read whole.

    r[b, j] = round(x[b, j] / unit[b]),  unit[b] = max_j |x[b, j]| / 127
    s[b, i] = step[i] unit[b] sum_j u[i, j] r[b, j] + bias[i]
    passed[b, i] = candidate[b, i] and (s[b, i] > stage2_threshold[i] or row b is dense)
    h[b, i] = relu(sum_j (step[i] u[i, j] + scale[i] l[i, j]) x[b, j] + bias[i]) where passed, else 0

x (B, d), normalised already. h as a list of its live rows. A weight is step u + scale l with u in -7..7 and l in
-2048..2047. The test is in integers: products of eight nibbles take five instructions, and every backend finds the same
sums. What passes is computed with x and the weight as they are. Planes of words of 32 bits, W = d / 8: nibble k of
upper[i, w] is u + 8 of column k W + w. rest[i] is W words of the upper nibbles of l + 2048 in the same order, then 2 W
words of its low bytes, byte k of word w being that of column k W + w and, in the second W words, of column
(4 + k) W + w. So a thread's 16 bytes of any plane meet the same few contiguous parts of x.
Program p takes entries p, p + P, ... of a packed list, rounds x for itself while the list arrives, tests all its
candidates, and then reads what passed, its lines asked of the L2 beforehand. row_bits is set to what passed, so that
the selection says afterwards what was used. One batch row. Several are tested by cascade_batch.py.
Half the bytes of whole candidate rows, but not less time yet: docs/notes/sparse-mlp.md.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_input, check_tensor, require
from kernels.common.launch import next_power_of_two, prefetch_l2, two_tiles, use_pdl, wait_for_predecessor
from kernels.mlp.cascade_parts import largest, level_products, levels, plane_words, row_products, x_parts
from kernels.mlp.selection import Selection
from kernels.mlp.sparse_fc2 import PackedSelection


@dataclass(frozen=True)
class CascadeWeights:
    """upper (n, d / 8) int32, rest (n, 3 d / 8) int32 (no rows where only the second stage reads this). step, scale,
    bias, stage2_threshold (n,) fp32."""

    upper: Tensor
    rest: Tensor
    step: Tensor
    scale: Tensor
    bias: Tensor
    stage2_threshold: Tensor

    def parts(self) -> tuple[Tensor, Tensor]:
        """step u and scale l, (n, d) fp32 each, in plain torch."""
        words = self.upper.shape[1]
        low = torch.cat([self.rest[:, (1 + k // 4) * words :][:, :words] >> 8 * (k % 4) & 255 for k in range(8)], 1)
        middle = torch.cat([self.rest[:, :words] >> 4 * k & 15 for k in range(8)], dim=1)
        upper = torch.cat([self.upper >> 4 * k & 15 for k in range(8)], dim=1) - 8
        return upper * self.step[:, None], ((middle << 8 | low) - 2048) * self.scale[:, None]


def input_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """r (B, d) as floats and unit (B, 1), fp32, in plain torch."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (x * (127 / largest)).round(), largest / 127


def second_stage(x: Tensor, weights: CascadeWeights, candidates: Tensor, row_state: Tensor | None = None) -> Tensor:
    """passed (B, n) bool in plain torch, from candidates (B, n) bool."""
    words = weights.upper
    codes = torch.cat([words >> 4 * k & 15 for k in range(8)], dim=1) - 8
    levels, unit = input_levels(x)
    sums = levels @ codes.float().T  # integers below 2^24: exact
    passed = sums * weights.step * unit + weights.bias > weights.stage2_threshold
    if row_state is not None:
        passed = passed | (row_state[:, None] == 2)
    return passed & candidates


def cascade_reference(
    x: Tensor, weights: CascadeWeights, candidates: Tensor, row_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h (B, n) and passed (B, n) bool in plain torch, from candidates (B, n) bool. h in fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    upper, lower = weights.parts()
    passed = second_stage(x, weights, candidates, row_state)
    h = x.to(wide) @ upper.to(wide).add_(lower.to(wide)).T + weights.bias.to(wide)
    return torch.where(passed, h.relu(), 0.0), passed


@triton.jit
def _cascade_kernel(
    x,
    upper,
    rest,
    step,
    scale,
    bias,
    stage2_threshold,
    row_state,
    ids,
    count,
    row_bits,
    values,
    W: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    CAP: tl.constexpr,
    LINES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One batch row, a packed list: program p takes entries p, p + P, ..., CAP of them at a time.

    Ids and what belongs to their rows arrive together, and x is rounded meanwhile, by every program for itself. Then
    all upper planes, two on their way ahead of the one that is summed. Then the rows of what passed, one ahead.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    w0 = tl.arange(0, W0)
    w1 = w0
    if W1 > 0:
        w1 = W0 + tl.arange(0, W1)
    k = tl.arange(0, CAP)
    wait_for_predecessor(PDL)
    number = tl.load(count, cache_modifier=".cg")
    entries = pid + programs * k
    rows = tl.load(ids + entries, mask=entries < number, other=0, cache_modifier=".cg")
    xs0 = x_parts(x, w0, W)
    top = largest(xs0)
    if W1 > 0:
        xs1 = x_parts(x, w1, W)
        top = tl.maximum(top, largest(xs1))
    top = tl.where(top > 0, top, 1.0)
    even0, odd0, total = levels(xs0, 127 / top)
    if W1 > 0:
        even1, odd1, more = levels(xs1, 127 / top)
        total += more
    dense = False
    if row_state is not None:
        dense = tl.load(row_state) == 2
    for first in range(0, number, programs * CAP):
        entries = first + pid + programs * k
        valid = entries < number
        if first > 0:
            rows = tl.load(ids + entries, mask=valid, other=0, cache_modifier=".cg")
        steps = tl.load(step + rows, mask=valid, other=0.0)
        biases = tl.load(bias + rows, mask=valid, other=0.0)
        stage2_thresholds = tl.load(stage2_threshold + rows, mask=valid, other=0.0)
        scales = tl.load(scale + rows, mask=valid, other=0.0)
        mine = tl.sum(valid.to(tl.int32), 0)
        row = tl.sum(tl.where(k == 0, rows, 0), 0)
        here0 = plane_words(upper, row, 0 < mine, w0, W, W)
        here1 = plane_words(upper, row, 0 < mine, w1, W, W) if W1 > 0 else here0
        row = tl.sum(tl.where(k == 1, rows, 0), 0)
        next0 = plane_words(upper, row, 1 < mine, w0, W, W)
        next1 = plane_words(upper, row, 1 < mine, w1, W, W) if W1 > 0 else next0
        sums = tl.zeros((CAP,), tl.int32)
        for i in range(0, mine):
            row = tl.sum(tl.where(k == i + 2, rows, 0), 0)
            coming0 = plane_words(upper, row, i + 2 < mine, w0, W, W)
            coming1 = plane_words(upper, row, i + 2 < mine, w1, W, W) if W1 > 0 else coming0
            found = tl.sum(level_products(here0, even0, odd0, ASM), 0)
            if W1 > 0:
                found += tl.sum(level_products(here1, even1, odd1, ASM), 0)
            sums = tl.where(k == i, found, sums)
            here0 = next0
            here1 = next1
            next0 = coming0
            next1 = coming1
        scores = (sums.to(tl.float32) - 8 * total) * steps * (top / 127) + biases
        passed = valid & ((scores > stage2_thresholds) | dense)
        tl.store(row_bits + rows, passed.to(tl.int32), mask=valid)
        place = tl.cumsum(passed.to(tl.int32), 0) - 1
        y = tl.zeros((CAP,), tl.float32)
        passing = tl.sum(passed.to(tl.int32), 0)
        if ASM:  # all of what passed is asked of the L2 at once
            line = 32 * tl.arange(0, LINES)
            for j in range(0, passing):
                row = tl.sum(tl.where(passed & (place == j), rows, 0), 0)
                prefetch_l2(rest + row.to(tl.int64) * (3 * W), line, line < 3 * W)
        for j in range(0, passing):
            own = passed & (place == j)
            row = tl.sum(tl.where(own, rows, 0), 0)
            start = rest + row.to(tl.int64) * (3 * W)
            high, low = row_products(plane_words(upper, row, True, w0, W, W), start, x, w0, W)
            if W1 > 0:
                more_high, more_low = row_products(plane_words(upper, row, True, w1, W, W), start, x, w1, W)
                high += more_high
                low += more_low
            y = tl.where(own, high * steps + low * scales + biases, y)
        tl.store(values + entries, tl.where(y <= 0, 0.0, y), mask=valid)  # keeps a NaN


def cascade_settings(d: int) -> tuple[int, int]:
    """(programs, warps) by width."""
    if d <= 2048:
        return 528, 1
    return 528 if d <= 5120 else 396, 4


def cascade(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    out: PackedSelection,
    row_state: Tensor | None = None,
    pdl: bool = False,
    warps: int | None = None,
    programs: int | None = None,
) -> None:
    """Test the candidates in `selection` and compute what passes, for one batch row.

    x: (1, d) fp32/fp16/bf16. selection.row_bits becomes what passed. Its list stays that of the candidates. out: the
    packed list of the candidates (`pack`), whose values become h, zero where a candidate fails. row_state: (1,) int32,
    2 = a dense row, which is not tested. warps, programs: launch settings. Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    n = selection.n
    require(batch == 1 and len(out.ids) == n, f"a packed list is for one batch row of {n} rows, got {batch}")
    require(d % 8 == 0, f"planes hold 8 columns a word; a width of {d} is no multiple of that")
    check_tensor("weights.upper", weights.upper, (n, d // 8), (torch.int32,), x)
    check_tensor("weights.rest", weights.rest, (n, 3 * d // 8), (torch.int32,), x)
    for name in ("step", "scale", "bias", "stage2_threshold"):
        check_tensor(f"weights.{name}", getattr(weights, name), (n,), (torch.float32,), x)
    if row_state is not None:
        check_tensor("row_state", row_state, (batch,), (torch.int32,), x)
    words = d // 8
    first, second = two_tiles(words)
    # Threads beyond the columns would write a sum twice to one place.
    warps = min(warps or cascade_settings(d)[1], max(1, first // 32))
    pdl = use_pdl(pdl, x.device)
    planes = (weights.upper, weights.rest, weights.step, weights.scale, weights.bias, weights.stage2_threshold)
    _cascade_kernel[(min(n, programs or cascade_settings(d)[0]),)](
        x, *planes, row_state, out.ids, out.count, selection.row_bits, out.values, W=words, W0=first, W1=second,
        CAP=2 if INTERPRET else 16, LINES=next_power_of_two(-(-3 * words // 32)), ASM=not INTERPRET, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
