# mypy: disable-error-code="assignment"
"""fc1 of a cascade: candidates are tested on four bits of their row, and only what passes is read whole.

    s[b, i] = step[i] sum_j u[i, j] x[b, j] + bias[i]
    passed[b, i] = candidate[b, i] and (s[b, i] > bar[i] or row b is dense)
    h[b, i] = relu(s[b, i] + scale[i] sum_j l[i, j] x[b, j]) where passed, else 0; the live ones as a list

x (B, d), normalised already. A weight is step u + scale l with u in -7..7 and l in -2048..2047. Planes of words of 32
bits, W = d / 8: nibble k of upper[i, w] is u + 8 of column k W + w; rest[i] is W words of the upper nibbles of l + 2048
in the same order, then 2 W words of its low bytes, byte k of word w being that of column k W + w and, in the second W
words, of column (4 + k) W + w. So a thread's 16 bytes of any plane meet the same few contiguous parts of x, which stay
in its registers, and a candidate that fails costs a quarter of a row.
The list of candidates comes as block-local ranges (`Selection`; packed: one block of all rows). A program owns every
SHARE-th of one block; the next candidate's upper plane is on its way while the present one is summed. row_bits is set
to what passed, so that the selection says afterwards what was used.
Several batch rows share the weights they read, x comes from the L1 for each: exact, and slower than a product on tensor
cores from about four rows on.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_common import start_dependents, two_tiles, use_pdl
from kernels.gather_gemv import LiveRows
from kernels.launch import FLOAT_TYPES, check_input, check_tensor, next_power_of_two, require
from kernels.select import Selection

# An integer below 2^23 in the mantissa of 2^23 is a float without a conversion, of which an SM does few.
MAGIC = tl.constexpr(0x4B000000)
UPPER_ZERO = tl.constexpr(8388608.0 + 8.0)
LOWER_ZERO = tl.constexpr(8388608.0 + 2048.0)


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


def cascade_reference(
    x: Tensor, weights: CascadeWeights, candidates: Tensor, row_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h (B, n) and passed (B, n) bool in plain torch, from candidates (B, n) bool; fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    upper, lower = (part.to(wide) for part in weights.parts())
    scores = x.to(wide) @ upper.T + weights.bias.to(wide)
    passed = scores > weights.bar.to(wide)
    if row_state is not None:
        passed = passed | (row_state[:, None] == 2)
    passed = passed & candidates
    return torch.where(passed, (scores + x.to(wide) @ lower.T).relu(), 0.0), passed


@triton.jit
def _x_parts(x, w, W: tl.constexpr, MASKED: tl.constexpr):
    """Eight tiles of x: columns k W + w."""
    parts = ()
    for k in tl.static_range(8):
        if MASKED:
            parts = parts + (tl.load(x + k * W + w, mask=w < W, other=0.0).to(tl.float32),)
        else:
            parts = parts + (tl.load(x + k * W + w).to(tl.float32),)
    return parts


@triton.jit
def _upper_products(words, xs):
    acc = tl.zeros(words.shape, tl.float32)
    for k in tl.static_range(8):
        code = ((words >> (4 * k)) & 15) | MAGIC
        acc += (code.to(tl.float32, bitcast=True) - UPPER_ZERO) * xs[k]
    return acc


@triton.jit
def _lower_products(rest, w, W: tl.constexpr, xs):
    """rest: pointer to the row's rest."""
    middle = tl.load(rest + w, mask=w < W, other=0)
    low0 = tl.load(rest + W + w, mask=w < W, other=0)
    low1 = tl.load(rest + 2 * W + w, mask=w < W, other=0)
    acc = tl.zeros(middle.shape, tl.float32)
    for k in tl.static_range(8):
        low = low0
        if k >= 4:
            low = low1
        code = (((middle >> (4 * k)) & 15) << 8) | ((low >> (8 * (k % 4))) & 255) | MAGIC
        acc += (code.to(tl.float32, bitcast=True) - LOWER_ZERO) * xs[k]
    return acc


@triton.jit
def _cascade_kernel(
    x,
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
    W: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One batch row."""
    pid = tl.program_id(0)
    block = pid // SHARE
    part = pid % SHARE
    w0 = tl.arange(0, W0)
    w1 = w0
    if W1 > 0:
        w1 = W0 + tl.arange(0, W1)
    start_dependents(PDL)
    # The id may be one beyond the count: then it is an old one, in range, and its row is not read.
    count = tl.load(counts + block, cache_modifier=".cg")
    row = tl.load(ids + block * BLOCK + part, cache_modifier=".cg")
    width = tl.where(part < count, W, 0)
    words0 = tl.load(upper + row.to(tl.int64) * W + w0, mask=w0 < width, other=0)
    words1 = words0
    if W1 > 0:
        words1 = tl.load(upper + row.to(tl.int64) * W + w1, mask=w1 < width, other=0)
    xs0 = _x_parts(x, w0, W, False)
    xs1 = xs0
    if W1 > 0:
        xs1 = _x_parts(x, w1, W, True)
    dense = False
    if row_state is not None:
        dense = tl.load(row_state) == 2
    written = 0
    for item in range(part, count, SHARE):
        ahead = item + SHARE
        next_row = tl.load(ids + block * BLOCK + tl.minimum(ahead, BLOCK - 1), cache_modifier=".cg")
        width = tl.where(ahead < count, W, 0)
        next0 = tl.load(upper + next_row.to(tl.int64) * W + w0, mask=w0 < width, other=0)
        next1 = next0
        if W1 > 0:
            next1 = tl.load(upper + next_row.to(tl.int64) * W + w1, mask=w1 < width, other=0)
        score = tl.sum(_upper_products(words0, xs0))
        if W1 > 0:
            score += tl.sum(_upper_products(words1, xs1))
        score = score * tl.load(step + row) + tl.load(bias + row)
        passed = (score > tl.load(bar + row)) | dense
        tl.store(row_bits + row, passed.to(tl.int32))
        if passed:
            start = rest + row.to(tl.int64) * (3 * W)
            lower = tl.sum(_lower_products(start, w0, W, xs0))
            if W1 > 0:
                lower += tl.sum(_lower_products(start, w1, W, xs1))
            value = score + lower * tl.load(scale + row)
            if value <= 0:
                value = 0.0  # keeps a NaN
            slot = pid * SLOTS + written
            tl.store(live_ids + slot, row)
            tl.store(live_values + slot, value)
            written += (value != 0).to(tl.int32)
        row = next_row
        words0 = next0
        words1 = next1
    tl.store(live_counts + pid, written)


@triton.jit(do_not_specialize=["batch"])
def _cascade_rows_kernel(
    x,
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
    W: tl.constexpr,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """2 to 32 batch rows."""
    pid = tl.program_id(0)
    block = pid // SHARE
    w = tl.arange(0, TILE)
    b = tl.arange(0, BATCH)
    start_dependents(PDL)
    count = tl.load(counts + block)
    dense = b < 0
    if row_state is not None:
        dense = tl.load(row_state + b, mask=b < batch, other=0) == 2
    written = 0
    for item in range(pid % SHARE, count, SHARE):
        row = tl.load(ids + block * BLOCK + item)
        bits = tl.load(row_bits + row)
        words = tl.load(upper + row.to(tl.int64) * W + w, mask=w < W, other=0)
        scores = tl.zeros((BATCH,), tl.float32)
        for one in range(batch):
            if ((bits >> one) & 1) != 0:
                xs = _x_parts(x + one * (8 * W), w, W, True)
                scores = tl.where(b == one, tl.sum(_upper_products(words, xs)), scores)
        scores = scores * tl.load(step + row) + tl.load(bias + row)
        passed = (((bits >> b) & 1) != 0) & (b < batch) & ((scores > tl.load(bar + row)) | dense)
        bits = tl.sum(passed.to(tl.int32) << b)
        tl.store(row_bits + row, bits)
        if bits != 0:
            lower = tl.zeros((BATCH,), tl.float32)
            start = rest + row.to(tl.int64) * (3 * W)
            for one in range(batch):
                if ((bits >> one) & 1) != 0:
                    xs = _x_parts(x + one * (8 * W), w, W, True)
                    lower = tl.where(b == one, tl.sum(_lower_products(start, w, W, xs)), lower)
            values = scores + lower * tl.load(scale + row)
            values = tl.where(passed & ~(values <= 0), values, 0.0)  # keeps a NaN
            slot = pid * SLOTS + written
            tl.store(live_ids + slot, row)
            tl.store(live_values + slot * batch + b, values, mask=b < batch)
            written += (tl.sum((values != 0).to(tl.int32)) > 0).to(tl.int32)
    tl.store(live_counts + pid, written)


def cascade_settings(d: int, batch: int) -> tuple[int, int]:
    """(candidates of a program at most, warps), by width and batch."""
    if batch > 1:
        return 8, 8 if d > 4096 else 4
    return 16, 8 if d > 4096 else 4 if d >= 2048 else 1


def cascade_rows(
    n: int, d: int, batch: int, block: int, device: torch.device | str, share: int | None = None
) -> LiveRows:
    """The output that `cascade` wants for a selection of n rows in blocks of `block`."""
    share = share or -(-block // cascade_settings(d, batch)[0])
    blocks, slots = triton.cdiv(n, block), triton.cdiv(block, share)
    ids = torch.zeros(blocks * share * slots, dtype=torch.int32, device=device)
    values = torch.zeros(blocks * share * slots, batch, device=device)
    return LiveRows(n, slots, ids, values, torch.zeros(blocks * share, dtype=torch.int32, device=device))


def cascade(
    x: Tensor,
    weights: CascadeWeights,
    selection: Selection,
    out: LiveRows,
    row_state: Tensor | None = None,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """Test the candidates in `selection` and write the live rows of what passes to `out`, from `cascade_rows`.

    x: (B, d) fp32/fp16/bf16, B <= 32. selection.row_bits becomes what passed; its list stays that of the candidates.
    row_state: (B,) int32, 2 = a dense row, which is not tested.
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
    blocks = selection.counts.numel()
    share = out.counts.numel() // blocks
    require(
        out.n == n and share * blocks == out.counts.numel() and out.slots * share >= selection.block,
        f"the live rows ({out.n} in {out.counts.numel()} ranges of {out.slots}) do not fit a selection of {n} in"
        f" {blocks} blocks of {selection.block}",
    )
    require(out.values.shape[1] == batch, f"the live rows are made for batch {out.values.shape[1]}, got {batch}")
    words = d // 8
    pdl = use_pdl(pdl, x.device)
    tensors = (
        x, weights.upper, weights.rest, weights.step, weights.scale, weights.bias, weights.bar, row_state,
        selection.ids, selection.counts, selection.row_bits, out.ids, out.values, out.counts,
    )  # fmt: skip
    sizes = {"W": words, "BLOCK": selection.block, "SHARE": share, "SLOTS": out.slots, "PDL": pdl}
    launch = {"num_warps": warps or cascade_settings(d, batch)[1], "launch_pdl": pdl}
    if batch == 1:
        first, second = two_tiles(words)
        _cascade_kernel[(blocks * share,)](*tensors, W0=first, W1=second, **sizes, **launch)
    else:
        _cascade_rows_kernel[(blocks * share,)](
            *tensors, batch, TILE=next_power_of_two(words), BATCH=next_power_of_two(batch), **sizes, **launch
        )
