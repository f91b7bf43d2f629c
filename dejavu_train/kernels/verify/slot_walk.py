"""Eight slots times rows of numbers on the tensor cores, each slot's products a function of its own input alone.

    v[i, r] = sum_j w[r, j] x[i, j]           w (n, d), or turned (d, n), x (8, d) in w's dtype

Rows of the matrix are M of the tensor cores, and columns of it are K there. Slots are N, each with a column of its own,
so slots do not mix. A matrix of few rows is cut into SPLITS equal ranges of columns. The last program of a tile of rows
to arrive adds what all have left, in the order of the columns. So a sum has one order, whatever slots are live. Until
its input is there a program asks the L2 for the beginning of its rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import require
from dejavu_train.kernels.common.lane_queue import fetch_ahead
from dejavu_train.kernels.common.launch import fetches_rows, n_sms, wait_for_predecessor
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.listed import keyed
from dejavu_train.kernels.stages.rows import launch_walk
from dejavu_train.kernels.stages.sink import Sink

SLOTS = tl.constexpr(8)
MOST_SPLITS = 16
PARTIALS, TICKETS = 8192, 8  # of a multiprocessor


@dataclass(frozen=True)
class SlotSettings(Settings, stage="slots"):
    """programs: per multiprocessor. A matrix of few rows is cut until there are two thirds of them. rows: of a tile.
    block: columns of a step. stages: of the pipeline over columns. warps: of a program. fetched: bytes of each row that
    the L2 is asked for early."""

    programs: int
    rows: int
    block: int
    stages: int
    warps: int
    fetched: int

    def splits(self, n: int, d: int, sms: int) -> int:
        """Ranges of columns for n rows of d columns: a power of two."""
        tiles, splits = triton.cdiv(n, self.rows), 1
        while splits < MOST_SPLITS and 3 * tiles * splits < 2 * self.programs * sms and 2 * self.block * splits <= d:
            splits *= 2
        return splits


@dataclass(frozen=True)
class ProductScratch:
    """Scratch of products that run in turn. partials: fp32. tickets: int32, zero between calls. sums: of rows of 4
    bits that are neurons, see `common.partial_sums`."""

    partials: Tensor
    tickets: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, d: int, device: torch.device | str) -> "ProductScratch":
        """d: columns of the widest matrix whose rows are neurons."""
        sms = n_sms(torch.device(device))
        partials = torch.zeros(sms * PARTIALS, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(sms * TICKETS, dtype=torch.int32, device=device), partial_sums(d, device))


class SlotSource(NamedTuple):
    """Where programs leave what the last one adds. See `ProductScratch`."""

    partials: Tensor
    tickets: Tensor


@triton.jit
def _fetch_rows(weight, first, EACH: tl.constexpr, n_rows, how: tl.constexpr):
    """Ask the L2 for the beginning of what this program reads."""
    if how.fetched > 0:
        lane = tl.arange(0, how.lanes)
        line = tl.program_id(0) * how.rows
        if how.turned:
            row = first + lane
            there = (lane < how.fetched) & (row < how.d) & (line + how.rows <= n_rows)
            fetch_ahead(weight + row.to(tl.int64) * n_rows + line, there, how.line)
        else:
            row = line + lane
            there = (lane < how.rows) & (row < n_rows) & (first + EACH <= how.d)
            fetch_ahead(weight + row.to(tl.int64) * how.d + first, there, how.fetched)


@triton.jit
def _tile(weight, lines, k, n_rows, EVEN: tl.constexpr, how: tl.constexpr):
    """(rows, block): columns k of these rows, zero beyond the matrix."""
    inside = lines < n_rows
    if how.turned:
        at = weight + k.to(tl.int64)[:, None] * n_rows + lines[None, :]
        mask = inside[None, :]
        if not EVEN:
            mask = mask & (k < how.d)[:, None]
        w = tl.trans(tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"))
    else:
        at = weight + lines.to(tl.int64)[:, None] * how.d + k[None, :]
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (k < how.d)[None, :]
        w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def put_slots(values, sink, lines, n_rows, how: tl.constexpr):
    i = tl.arange(0, how.wide)[None, :]
    inside = (lines < n_rows)[:, None]
    stored = inside & (i < SLOTS)
    ahead = sink.ahead(sink, lines[:, None], i, inside, stored, n_rows)
    sink.put(sink, values * (1 / how.unit), ahead, lines[:, None], i, stored, n_rows)


@triton.jit
def slot_sums(x, weight, lines, first, n_rows, EACH: tl.constexpr, EVEN: tl.constexpr, how: tl.constexpr):
    """(rows, wide) fp32: products with EACH columns from `first` on."""
    i = tl.arange(0, how.wide)
    c = tl.arange(0, how.block)
    acc = tl.zeros((how.rows, how.wide), tl.float32)
    for column in tl.range(0, EACH, how.block, num_stages=how.stages):
        k = first + column + c
        w = _tile(weight, lines, k, n_rows, EVEN, how)
        at = x + i[None, :] * how.d + k[:, None]
        live = (i < SLOTS)[None, :]
        if not EVEN:
            live = live & (k < how.d)[:, None]
        own = tl.load(at, mask=live, other=0.0)
        acc = tl.dot(w, own, acc, input_precision="ieee")
    return acc


@triton.jit
def _walk_slots(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    EACH: tl.constexpr = (how.d + how.block * how.splits - 1) // (how.block * how.splits) * how.block
    EVEN: tl.constexpr = how.d % (how.block * how.splits) == 0
    tile = tl.program_id(0)
    first = tl.program_id(1) * EACH
    lines = tile * how.rows + tl.arange(0, how.rows)
    i = tl.arange(0, how.wide)
    _fetch_rows(weight, first, EACH, n_rows, how)
    wait_for_predecessor(PDL)
    acc = slot_sums(x, weight, lines, first, n_rows, EACH, EVEN, how)
    if how.splits == 1:
        put_slots(acc, sink, lines, n_rows, how)
    else:
        SIZE: tl.constexpr = how.rows * SLOTS
        left = source.partials + tile * (how.splits * SIZE) + tl.arange(0, how.rows)[:, None] * SLOTS + i[None, :]
        there = (tl.arange(0, how.rows) >= 0)[:, None] & (i < SLOTS)[None, :]
        tl.store(left + tl.program_id(1) * SIZE, acc, mask=there, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's sums are stored before one thread releases the ticket
        arrived = tl.atomic_add(source.tickets + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == how.splits - 1:
            total = tl.zeros((how.rows, how.wide), tl.float32)
            for split in range(how.splits):
                total += tl.load(left + split * SIZE, mask=there, other=0.0, cache_modifier=".cg")
            put_slots(total, sink, lines, n_rows, how)
            tl.store(source.tickets + tile, 0)


@keyed
class SlotWalk(NamedTuple):
    """d: columns. rows: of a tile. block, stages: of a step. splits: of columns. turned: columns are rows in memory.

    wide: columns of N, slots and zeros: turned tiles reach the tensor cores without registers from sixteen on.
    unit: what x is kept times. lanes: threads. fetched: bytes of a row that are fetched early, or turned, how many rows
    of `line` bytes.
    """

    d: int
    rows: int
    block: int
    stages: int
    splits: int = 1
    turned: bool = False
    wide: int = SLOTS.value
    unit: float = 1.0
    lanes: int = 32
    fetched: int = 0
    line: int = 0
    walk: Any = _walk_slots


def is_cut(weight: Rows) -> bool:
    """Whether the columns of this matrix (n, d) as stored are cut, so that sums have another order."""
    numbers = weight.numbers
    (n, d), size = numbers.shape, numbers.element_size()
    settings = SlotSettings.find(weight.format, numbers.device, bytes=size, d=d, turned=False)
    return settings.splits(n, d, n_sms(numbers.device)) > 1


def launch_slots(
    x: Tensor, weight: Rows, sink: Sink, scratch: ProductScratch, turned: bool, unit: float, pdl: bool
) -> None:
    """x (8, d) in the weight's dtype. weight (..., d), or turned (d, n)."""
    numbers, d = weight.numbers, x.shape[1]
    n, size = numbers.numel() // d, numbers.element_size()
    settings = SlotSettings.find(weight.format, x.device, bytes=size, d=d, turned=turned)
    block = min(settings.block, max(16, triton.next_power_of_2(d)))
    splits = settings.splits(n, d, n_sms(x.device))
    tiles = triton.cdiv(n, settings.rows)
    each = triton.cdiv(d, block * splits) * block
    fetched = 0
    if fetches_rows(x.device) and (n if turned else d) * size % 16 == 0:
        fetched = min(settings.fetched, each * size) // 16 * 16
    line = settings.rows * size
    lanes = 32 * settings.warps
    if turned:
        fetched = min(fetched * settings.rows // line, lanes)
    if splits > 1:
        room, tickets = tiles * splits * settings.rows * SLOTS.value, scratch.tickets.numel()
        require(room <= scratch.partials.numel() and tiles <= tickets, f"no room for {splits} splits of {tiles} tiles")
    wide = 2 * SLOTS.value if turned else SLOTS.value
    how = SlotWalk(d, settings.rows, block, settings.stages, splits, turned, wide, unit, lanes, fetched, line)
    launch_walk(
        (tiles, splits), x, None, weight.parts(), sink, SlotSource(scratch.partials, scratch.tickets), n, how, pdl,
        num_warps=settings.warps,
    )  # fmt: skip
