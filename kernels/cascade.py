# mypy: disable-error-code="assignment"
"""fc1 of a cascade: candidates are tested on four bits of their row, and only what passes is read whole.

    r[b, j] = round(x[b, j] / unit[b]),  unit[b] = max_j |x[b, j]| / 127
    s[b, i] = step[i] unit[b] sum_j u[i, j] r[b, j] + bias[i]
    passed[b, i] = candidate[b, i] and (s[b, i] > bar[i] or row b is dense)
    h[b, i] = relu(sum_j (step[i] u[i, j] + scale[i] l[i, j]) x[b, j] + bias[i]) where passed, else 0

x (B, d), normalised already; h as a list of its live rows. A weight is step u + scale l with u in -7..7 and l in
-2048..2047. The test is in integers: products of eight nibbles take five instructions, and every backend finds the same
sums. What passes is computed with x and the weight as they are. Planes of words of 32 bits, W = d / 8: nibble k of
upper[i, w] is u + 8 of column k W + w; rest[i] is W words of the upper nibbles of l + 2048 in the same order, then 2 W
words of its low bytes, byte k of word w being that of column k W + w and, in the second W words, of column
(4 + k) W + w. So a thread's 16 bytes of any plane meet the same few contiguous parts of x.
Two kernels: one rounds x, once for all programs; in the other program p takes candidates p, p + P, ... of a packed
list, or of one block of a selection, the next one's upper plane on its way while the present one is summed.
row_bits is set to what passed, so that the selection says afterwards what was used.
Several batch rows share the weights they read, and x comes from the L1 for each: exact, and for what passes slower than
a product on tensor cores from about four rows on.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import INTERPRET, start_dependents, two_tiles, use_pdl
from kernels.gather_gemv import LiveRows
from kernels.launch import FLOAT_TYPES, check_input, check_tensor, next_power_of_two, require
from kernels.packed_rows import PackedRows
from kernels.select import Selection

# Bits in the upper mantissa of 1.0 are a float 1 + code / 2^bits without a conversion, of which an SM does few; what
# the ones add is taken off the sum.
ONE = tl.constexpr(0x3F800000)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


@dataclass(frozen=True)
class CascadeWeights:
    """upper (n, d / 8) int32, rest (n, 3 d / 8) int32; step, scale, bias, bar (n,) fp32."""

    upper: Tensor
    rest: Tensor
    step: Tensor
    scale: Tensor
    bias: Tensor
    bar: Tensor

    def parts(self) -> tuple[Tensor, Tensor]:
        """step u and scale l, (n, d) fp32 each, in plain torch."""
        words = self.upper.shape[1]
        low = torch.cat([self.rest[:, (1 + k // 4) * words :][:, :words] >> 8 * (k % 4) & 255 for k in range(8)], 1)
        middle = torch.cat([self.rest[:, :words] >> 4 * k & 15 for k in range(8)], dim=1)
        upper = torch.cat([self.upper >> 4 * k & 15 for k in range(8)], dim=1) - 8
        return upper * self.step[:, None], ((middle << 8 | low) - 2048) * self.scale[:, None]


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


def input_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """r (B, d) as floats and unit (B, 1), fp32, in plain torch."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (x * (127 / largest)).round(), largest / 127


def cascade_reference(
    x: Tensor, weights: CascadeWeights, candidates: Tensor, row_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h (B, n) and passed (B, n) bool in plain torch, from candidates (B, n) bool; h in fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    upper, lower = weights.parts()
    levels, unit = input_levels(x)
    sums = levels @ (upper / weights.step[:, None]).round().T  # integers below 2^24: exact
    passed = sums * weights.step * unit + weights.bias > weights.bar
    if row_state is not None:
        passed = passed | (row_state[:, None] == 2)
    passed = passed & candidates
    h = x.to(wide) @ upper.to(wide).add_(lower.to(wide)).T + weights.bias.to(wide)
    return torch.where(passed, h.relu(), 0.0), passed


@triton.jit
def _levels_kernel(x, words, units, W: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """A program a batch row."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, TILE)
    start_dependents(PDL)
    xs = _x_parts(x + row * (8 * W), w, W)
    largest = tl.abs(xs[0])
    for k in tl.static_range(1, 8):
        largest = tl.maximum(largest, tl.abs(xs[k]))
    top = tl.max(largest, 0)
    top = tl.where(top > 0, top, 1.0)
    factor = 127 / top
    total = tl.zeros((TILE,), tl.float32)
    even = tl.zeros((TILE,), tl.int32)
    odd = tl.zeros((TILE,), tl.int32)
    for k in tl.static_range(8):
        level = (xs[k] * factor + ROUND) - ROUND
        total += level
        byte = (level.to(tl.int32) & 255) << (8 * (k // 2))
        if k % 2 == 0:
            even |= byte
        else:
            odd |= byte
    at = words + row * (2 * W) + w
    tl.store(at, even, mask=w < W)
    tl.store(at + W, odd, mask=w < W)
    tl.store(units + 2 * row, top / 127)
    tl.store(units + 2 * row + 1, 8 * tl.sum(total, 0))


@triton.jit
def _x_parts(x, w, W: tl.constexpr):
    """Eight tiles of x: columns k W + w."""
    parts = ()
    for k in tl.static_range(8):
        parts = parts + (tl.load(x + k * W + w, mask=w < W, other=0.0).to(tl.float32),)
    return parts


@triton.jit
def _level_products(words, even, odd, ASM: tl.constexpr):
    """Sums over the eight columns of each word of (u + 8) r, int32."""
    if ASM:
        sums = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; and.b32 a, $1, 0x0F0F0F0F; shr.u32 b, $1, 4; and.b32 b, b, 0x0F0F0F0F;"
            " dp4a.u32.s32 a, a, $2, 0; dp4a.u32.s32 $0, b, $3, a; }",
            "=r,r,r,r",
            [words, even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        sums = tl.zeros(words.shape, tl.int32)
        for k in tl.static_range(8):
            level = even
            if k % 2 == 1:
                level = odd
            sums += ((words >> (4 * k)) & 15) * ((level << (24 - 8 * (k // 2))) >> 24)
    return sums


@triton.jit
def _row_products(words, rest, x, w, W: tl.constexpr):
    """Sums of u x and of l x over tile w of a row: words are its upper plane, rest points to the other one."""
    middle = tl.load(rest + w, mask=w < W, other=0)
    low0 = tl.load(rest + W + w, mask=w < W, other=0)
    low1 = tl.load(rest + 2 * W + w, mask=w < W, other=0)
    xs = _x_parts(x, w, W)
    upper = tl.zeros(words.shape, tl.float32)
    lower = tl.zeros(words.shape, tl.float32)
    total = tl.zeros(words.shape, tl.float32)
    for k in tl.static_range(8):
        code = _shifted(words, 19 - 4 * k) & 0x00780000 | ONE
        upper += code.to(tl.float32, bitcast=True) * xs[k]
        low = low0
        if k >= 4:
            low = low1
        code = _shifted(middle, 19 - 4 * k) & 0x00780000 | _shifted(low, 11 - 8 * (k % 4)) & 0x0007F800 | ONE
        lower += code.to(tl.float32, bitcast=True) * xs[k]
        total += xs[k]
    # 1 + (u + 8) / 16 and 1 + (l + 2048) / 4096
    return tl.sum(16 * upper - 24 * total), tl.sum(4096 * lower - 6144 * total)


@triton.jit
def _shifted(words, LEFT: tl.constexpr):
    if LEFT >= 0:
        moved = words << LEFT
    else:
        moved = words >> (-LEFT)
    return moved


@triton.jit(do_not_specialize=["batch", "block_rows", "share"])
def _cascade_kernel(
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
    start_dependents(PDL)
    # The id may be one beyond the count: then it is an old one, in range, and its row is not read.
    count = tl.load(counts + block, cache_modifier=".cg")
    row = tl.load(ids + block * block_rows + part, cache_modifier=".cg")
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
            found = tl.sum(_level_products(words0, even0, odd0, ASM))
            if W1 > 0:
                found += tl.sum(_level_products(words1, even1, odd1, ASM))
            sums += found.to(tl.float32)
        else:
            for one in range(batch):
                if ((bits >> one) & 1) != 0:
                    own = levels + one * (2 * W)
                    found = tl.sum(_level_products(words0, tl.load(own + w0), tl.load(own + W + w0), ASM))
                    if W1 > 0:
                        even = tl.load(own + w1, mask=w1 < W, other=0)
                        odd = tl.load(own + W + w1, mask=w1 < W, other=0)
                        found += tl.sum(_level_products(words1, even, odd, ASM))
                    sums = tl.where(b == one, found.to(tl.float32), sums)
        scores = (sums - zero) * row_step * unit + row_bias
        passed = (((bits >> b) & 1) != 0) & (b < batch) & ((scores > row_bar) | dense)
        bits = tl.sum(passed.to(tl.int32) << b)
        tl.store(row_bits + row, bits)
        if SLOTS == 0 and bits == 0:
            tl.store(live_values + item, 0.0)
        if bits != 0:
            values = tl.zeros((BATCH,), tl.float32)
            start = rest + row.to(tl.int64) * (3 * W)
            for one in range(batch):
                if ((bits >> one) & 1) != 0:
                    own = x + one * (8 * W)
                    high, low = _row_products(words0, start, own, w0, W)
                    if W1 > 0:
                        more_high, more_low = _row_products(words1, start, own, w1, W)
                        high += more_high
                        low += more_low
                    values = tl.where(b == one, high * row_step + low * row_scale + row_bias, values)
            values = tl.where(passed & ~(values <= 0), values, 0.0)  # keeps a NaN
            if SLOTS == 0:  # a packed list keeps its entries
                tl.store(live_values + item + b, values, mask=b < 1)
            else:
                slot = pid * SLOTS + written
                tl.store(live_ids + slot, row)
                tl.store(live_values + slot * batch + b, values, mask=b < batch)
                written += (tl.sum((values != 0).to(tl.int32)) > 0).to(tl.int32)
        row = next_row
        words0 = next0
        words1 = next1
    if SLOTS > 0:
        tl.store(live_counts + pid, written)


def cascade_settings(d: int, batch: int) -> tuple[int, int]:
    """(programs of a packed list, or candidates of a program at most for a batch, and warps), by width and batch."""
    if batch > 1:
        return 8, 4
    return (1056, 4) if d > 2048 else (792, 1)


def cascade_rows(
    n: int, d: int, batch: int, block: int, device: torch.device | str, share: int | None = None
) -> LiveRows:
    """The list of live rows that `cascade` fills from a selection of n rows in blocks of `block`."""
    share = share or -(-block // cascade_settings(d, 2)[0])
    blocks, slots = triton.cdiv(n, block), triton.cdiv(block, share)
    ids = torch.zeros(blocks * share * slots, dtype=torch.int32, device=device)
    values = torch.zeros(blocks * share * slots, batch, device=device)
    return LiveRows(n, slots, ids, values, torch.zeros(blocks * share, dtype=torch.int32, device=device))


def cascade(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    out: LiveRows | PackedRows,
    row_state: Tensor | None = None,
    pdl: bool = False,
    levels: InputLevels | None = None,
    warps: int | None = None,
    programs: int | None = None,
) -> None:
    """Test the candidates in `selection` and compute what passes.

    x: (B, d) fp32/fp16/bf16, B <= 32. selection.row_bits becomes what passed; its list stays that of the candidates.
    out: for B = 1 the packed list of the candidates (`pack`), whose values become h, zero where a candidate fails; or
    `LiveRows` from `cascade_rows`. row_state: (B,) int32, 2 = a dense row, which is not tested. levels: scratch;
    without it the call makes one. warps, programs: launch settings of a packed list.
    """
    batch, d = check_input("x", x)
    n = selection.n
    require(d % 8 == 0, f"planes hold 8 columns a word; a width of {d} is no multiple of that")
    check_tensor("weights.upper", weights.upper, (n, d // 8), (torch.int32,), x)
    check_tensor("weights.rest", weights.rest, (n, 3 * d // 8), (torch.int32,), x)
    for name in ("step", "scale", "bias", "bar"):
        check_tensor(f"weights.{name}", getattr(weights, name), (n,), (torch.float32,), x)
    check_tensor("x", x, (batch, d), FLOAT_TYPES, x)
    if row_state is not None:
        check_tensor("row_state", row_state, (batch,), (torch.int32,), x)
    if isinstance(out, PackedRows):
        require(batch == 1 and len(out.ids) == n, f"a packed list is for one batch row of {n} rows, got {batch}")
        ids, counts, live_counts = out.ids, out.count, None
        blocks, block_rows, slots = 1, n, 0
        share = programs or cascade_settings(d, batch)[0]
    else:
        ids, counts, live_counts = selection.ids, selection.counts, out.counts
        blocks, block_rows, slots = selection.counts.numel(), selection.block, out.slots
        share = out.counts.numel() // blocks
        require(
            out.n == n and share * blocks == out.counts.numel() and slots * share >= block_rows,
            f"the live rows ({out.n} in {out.counts.numel()} ranges of {slots}) do not fit a selection of {n} in"
            f" {blocks} blocks of {block_rows}",
        )
        require(out.values.shape[1] == batch, f"the live rows are made for batch {out.values.shape[1]}, got {batch}")
    words = d // 8
    levels = levels or InputLevels.empty(batch, d, x.device)
    check_tensor("levels.words", levels.words, (batch, 2, words), (torch.int32,), x)
    pdl = use_pdl(pdl, x.device)
    _levels_kernel[(batch,)](
        x, levels.words, levels.units, W=words, TILE=next_power_of_two(words), PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    first, second = two_tiles(words)
    _cascade_kernel[(blocks * share,)](
        x, levels.words, levels.units, weights.upper, weights.rest, weights.step, weights.scale, weights.bias,
        weights.bar, row_state, ids, counts, selection.row_bits, out.ids, out.values, live_counts, batch, block_rows,
        share, W=words, W0=first, W1=second, BATCH=next_power_of_two(batch), SLOTS=slots, ASM=not INTERPRET, PDL=pdl,
        num_warps=warps or cascade_settings(d, batch)[1], launch_pdl=pdl,
    )  # fmt: skip
