"""The LM head of eight slots behind the screen of `dense.screened_head`: logits of the rows that can win alone.

    logits[i, v] = sum_j w[v, j] n[i, j], or -inf where row v cannot be the largest of any slot

x (8, d) fp32, n its norm in the head's dtype. A program a slot makes levels of it. The screen multiplies the head's
codes by the levels of all slots on the tensor cores, in whole numbers. That bounds each logit from both sides. Where
one of sixteen rows may win for one slot, they are multiplied as `slot_walk` does it. The order of sums is the whole
head's. The largest logit of a slot and its lowest token are those of the whole head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_shape, check_tensor
from dejavu_train.kernels.common.launch import as_dependent, wait_for_predecessor
from dejavu_train.kernels.dense.screened_head import ScreenedHead, levels_of
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.rows import launch_walk
from dejavu_train.kernels.stages.sink import LinearSink
from dejavu_train.kernels.verify.slot_walk import SLOTS, SlotSettings, SlotWalk, put_slots, slot_sums

ROWS = 16  # of numbers that are read together
TILE, BLOCK, STAGES = 64, 256, 4  # of codes: rows, columns of a step, steps on their way


@dataclass(frozen=True)
class ScreenScratch:
    """levels (16, d / 4) int32: four of each slot, high ones, then low ones. numbers (8, 2) fp32: the step of a slot's
    levels, and the norms that bounds take. upper (V, 8) fp32: what a logit is at most. floors (8) int32: ordered bits
    of what the largest is at least."""

    levels: Tensor
    numbers: Tensor
    upper: Tensor
    floors: Tensor

    @classmethod
    def empty(cls, n: int, d: int, device: torch.device | str) -> "ScreenScratch":
        return cls(
            torch.zeros(2 * SLOTS.value, d // 4, dtype=torch.int32, device=device),
            torch.zeros(SLOTS.value, 2, dtype=torch.float32, device=device),
            torch.zeros(n, SLOTS.value, dtype=torch.float32, device=device),
            torch.zeros(SLOTS.value, dtype=torch.int32, device=device),
        )


class ScreenSource(NamedTuple):
    """See `ScreenScratch`."""

    upper: Tensor
    floors: Tensor


@triton.jit
def _ordered(bits):
    """Bits of fp32 as whole numbers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _levels_kernel(
    x, n, norm, levels, numbers, floors, steps, tiny,
    D: tl.constexpr, BLOCK: tl.constexpr, SLOT_COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    W: tl.constexpr = D // 4
    wait_for_predecessor(PDL)
    high, low, t, length, rest = levels_of(x + slot * D, norm, c, D, BLOCK)
    strange = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range((W + BLOCK - 1) // BLOCK):
        word = j * BLOCK + c
        inside = word < W
        tl.store(levels + slot * W + word, high[j], mask=inside)
        tl.store(levels + (SLOT_COUNT + slot) * W + word, low[j], mask=inside)
        for k in tl.static_range(4):
            strange += tl.load(n + slot * D + 4 * word + k, mask=inside, other=0.0).to(tl.float32) * 0.0
    most = (length + steps * (rest + tiny)) * 1.0001
    # Where n overflows, when it is rounded, no bound holds: all rows are read.
    most = tl.where(tl.sum(strange, 0) == 0.0, most, float("inf"))
    tl.store(numbers + 2 * slot, t)
    tl.store(numbers + 2 * slot + 1, most)
    tl.store(floors + slot, -2147483648)


@triton.jit
def _screen_kernel(
    codes, scales, levels, numbers, stops, upper, floors, n_rows,
    D: tl.constexpr, ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, SLOT_COUNT: tl.constexpr,
    N_STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    inside = lines < n_rows
    i = tl.arange(0, SLOT_COUNT)
    c = tl.arange(0, COLUMNS)
    both = tl.load(scales + 2 * lines[:, None] + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0.0)
    factor, off = tl.split(both)
    barred = lines < 0
    for s in tl.static_range(N_STOPS):  # no bound is taken from what may be barred
        barred = barred | (lines == tl.load(stops + s))
    wait_for_predecessor(PDL)
    highs = tl.zeros((ROW_TILE, SLOT_COUNT), tl.int32)
    lows = tl.zeros((ROW_TILE, SLOT_COUNT), tl.int32)
    for first in tl.range(0, D, COLUMNS, num_stages=STEPS):
        k = first + c
        w = tl.load(
            codes + lines.to(tl.int64)[:, None] * D + k[None, :], mask=inside[:, None] & (k < D)[None, :], other=0
        )
        at = levels + i[None, :] * D + k[:, None]
        there = (k < D)[:, None] & (i >= 0)[None, :]
        high = tl.load(at, mask=there, other=0)
        low = tl.load(at + SLOT_COUNT * D, mask=there, other=0)
        highs = tl.dot(w, high, highs, out_dtype=tl.int32)
        lows = tl.dot(w, low, lows, out_dtype=tl.int32)
    t = tl.load(numbers + 2 * i)
    most = tl.load(numbers + 2 * i + 1)
    value = (highs.to(tl.float32) * 128.0 + lows.to(tl.float32)) * (factor[:, None] * t[None, :])
    room = off[:, None] * most[None, :]
    tl.store(upper + lines[:, None] * SLOT_COUNT + i[None, :], value + room, mask=inside[:, None])
    sure = value - room
    sure = tl.where((sure == sure) & (inside & (barred == 0))[:, None], sure, float("-inf"))
    tl.atomic_max(floors + i, _ordered(tl.max(sure, 0).to(tl.int32, bitcast=True)), sem="relaxed")


@triton.jit
def _walk_screened(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    lines = tl.program_id(0) * how.rows + tl.arange(0, how.rows)
    i = tl.arange(0, SLOTS)
    EACH: tl.constexpr = (how.d + how.block - 1) // how.block * how.block
    wait_for_predecessor(PDL)
    floor = _ordered(tl.load(source.floors + i, cache_modifier=".cg")).to(tl.float32, bitcast=True)
    there = (lines < n_rows)[:, None] & (i >= 0)[None, :]
    bound = tl.load(source.upper + lines[:, None] * SLOTS + i[None, :], mask=there, other=0.0, cache_modifier=".cg")
    wins = there & ((bound >= floor[None, :]) | (bound != bound) | (floor != floor)[None, :])
    if tl.max(tl.max(wins.to(tl.int32), 1), 0) > 0:
        acc = slot_sums(x, weight, lines, 0, n_rows, EACH, how.d % how.block == 0, how)
        put_slots(acc, sink, lines, n_rows, how)
    else:
        put_slots(tl.full((how.rows, how.wide), float("-inf"), tl.float32), sink, lines, n_rows, how)


def screened_slots_reference(
    x: Tensor, n: Tensor, head: ScreenedHead, stops: Tensor, logits: Tensor, scratch: ScreenScratch | None
) -> None:
    """Plain torch: all logits."""
    logits.copy_(torch.nn.functional.linear(n.to(head.weight.dtype), head.weight))


def screened_slots(
    x: Tensor, n: Tensor, head: ScreenedHead, stops: Tensor, logits: Tensor, scratch: ScreenScratch, pdl: bool = False
) -> None:
    """x (8, d) fp32 and its norm n (8, d) in the head's dtype -> logits (8, V) fp32.

    stops (K,) int32: of `sampling.TokenState`. Errors: shapes, dtypes, a CPU tensor.
    """
    check_device("x", x)
    rows, d = head.weight.shape
    check_tensor("x", x, (SLOTS.value, d), (torch.float32,), x)
    check_tensor("n", n, (SLOTS.value, d), (head.weight.dtype,), x)
    check_tensor("logits", logits, (SLOTS.value, rows), (torch.float32,), x)
    check_shape("scratch.upper", scratch.upper, rows, SLOTS.value)
    dependent = as_dependent(pdl, x.device)
    _levels_kernel[(SLOTS.value,)](
        x, n, head.ln.args()._replace(gain=head.gain, shift=head.shift), scratch.levels, scratch.numbers,
        scratch.floors, head.steps, head.tiny,
        D=d, BLOCK=head.settings.block(d), SLOT_COUNT=SLOTS,
        num_warps=head.settings.warps_for(d), **dependent,
    )  # fmt: skip
    _screen_kernel[(triton.cdiv(rows, TILE),)](
        head.words.view(torch.int8), head.scales, scratch.levels.view(torch.int8), scratch.numbers, stops,
        scratch.upper, scratch.floors, rows, D=d, ROW_TILE=TILE, COLUMNS=BLOCK, STEPS=STAGES, SLOT_COUNT=SLOTS,
        N_STOPS=stops.shape[0], num_warps=4, **dependent,
    )  # fmt: skip
    weight = Rows(head.weight)
    settings = SlotSettings.find(weight.format, x.device, bytes=head.weight.element_size(), d=d, turned=False)
    block = min(settings.block, max(16, triton.next_power_of_2(d)))  # as the whole head: the order of sums
    how = SlotWalk(d, ROWS, block, settings.stages, walk=_walk_screened)
    launch_walk(
        triton.cdiv(rows, ROWS), n, None, weight.parts(), LinearSink(logits, None),
        ScreenSource(scratch.upper, scratch.floors), rows, how, pdl, num_warps=1,
    )  # fmt: skip
