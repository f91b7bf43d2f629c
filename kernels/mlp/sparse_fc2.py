"""fc2 over a packed list, one token: out[j] = residual[j] + bias[j] + sum_k values[k] w_t[ids[k], j].

`pack` closes the gaps of a list in one small kernel, in the list's order. `sparse_fc2` reads the rows as an unbroken
stream: a program owns a stripe of columns and every SPLITS-th row, keeps ROWS of them on their way and one accumulator
a column. Nothing is reduced or waited for inside the loop. Rows of zero values are not read. A second kernel adds the
partial sums in an order that the shape fixes: many narrow programs read them at once, where a last arriver would read
them alone. w_t (n, d), values fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_numbers, check_shape
from kernels.common.launch import start_dependents_and_wait, use_pdl, wait_for_predecessor
from kernels.formats.matrix import Matrix
from kernels.mlp.selection import Selection

ENTRIES = 1024  # of the list, for a program of `pack`
MAX_SPLITS = 264  # rows of the scratch for partial sums


@dataclass(frozen=True)
class PackedSelection:
    """ids (n) int32, defined below count (1) int32, old ones beyond it. values (n) fp32, where a kernel wrote some."""

    ids: Tensor
    values: Tensor
    count: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str) -> "PackedSelection":
        ids, count = (torch.zeros(size, dtype=torch.int32, device=device) for size in (n, 1))
        return cls(ids, torch.zeros(n, device=device, dtype=torch.float32), count)

    def set_dense(self, h: Tensor) -> None:
        """Fill from h (1, n), for tests."""
        ids = h[0].nonzero().flatten()
        self.ids[: len(ids)] = ids.int()
        self.values[: len(ids)] = h[0, ids].float()
        self.count.fill_(len(ids))

    def to_dense(self) -> Tensor:
        """(1, n) fp32 with zeros elsewhere. Synchronises with the host: for tests and references."""
        dense = torch.zeros(1, len(self.ids), device=self.ids.device, dtype=torch.float32)
        count = int(self.count)
        dense[0, self.ids[:count].long()] = self.values[:count]
        return dense


@triton.jit
def pack_ranges(
    number_of,
    ids,
    counts,
    packed_ids,
    packed_count,
    n_ranges,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ALL_RANGES: tl.constexpr,
    RANGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program number_of's RANGES ranges, with its wait: a program's whole work, also as a part of another grid."""
    # All slots are read beside the counts that say which of them are valid: one round trip.
    if EARLY:
        start_dependents_and_wait(PDL)
    else:
        wait_for_predecessor(PDL)
    low = number_of * RANGES
    every = tl.arange(0, ALL_RANGES)
    number = tl.load(counts + every, mask=every < n_ranges, other=0)
    own = low + tl.arange(0, RANGES)
    slot = tl.arange(0, SLOTS_PAD)
    mine = tl.load(counts + own, mask=own < n_ranges, other=0)
    at = own[:, None] * SLOTS + slot[None, :]
    there = (own < n_ranges)[:, None] & (slot < SLOTS)[None, :]
    row = tl.load(ids + at, mask=there, other=0)
    start = tl.sum(tl.where(every < low, number, 0)) + tl.cumsum(mine, 0) - mine
    place = start[:, None] + slot[None, :]
    valid = slot[None, :] < mine[:, None]
    tl.store(packed_ids + place, row, mask=valid)
    if low == 0:
        tl.store(packed_count, tl.sum(number))


@triton.jit(do_not_specialize=["n_ranges"])
def _pack_kernel(
    ids,
    counts,
    packed_ids,
    packed_count,
    n_ranges,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ALL_RANGES: tl.constexpr,
    RANGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pack_ranges(
        tl.program_id(0), ids, counts, packed_ids, packed_count, n_ranges, SLOTS, SLOTS_PAD,
        ALL_RANGES, RANGES, False, PDL,
    )  # fmt: skip


def pack(rows: Selection, out: PackedSelection, pdl: bool = False) -> None:
    """Close the gaps of a selection, of one row or of several: ids and count. Values come from what makes them."""
    pdl = use_pdl(pdl, rows.ids.device)
    programs, arguments, constants = pack_launch(rows, out)
    _pack_kernel[(programs,)](*arguments, **constants, PDL=pdl, num_warps=4, launch_pdl=pdl)


def pack_launch(
    rows: Selection, out: PackedSelection, entries: int = ENTRIES
) -> tuple[int, tuple[Any, ...], dict[str, int]]:
    """(programs, arguments, constants) of `pack_ranges`, the same in every grid that carries it, checked.

    entries: slots of the list for a program.
    """
    check_device("rows.ids", rows.ids)
    n_ranges = rows.counts.numel()
    padded = triton.next_power_of_2(rows.block)
    ranges = max(1, entries // padded)
    constants = {
        "SLOTS": rows.block,
        "SLOTS_PAD": padded,
        "ALL_RANGES": max(128, triton.next_power_of_2(n_ranges)),
        "RANGES": ranges,
    }
    arguments = (rows.ids, rows.counts, out.ids, out.count, n_ranges)
    return triton.cdiv(n_ranges, ranges), arguments, constants


def packed_block(d: int) -> int:
    """Block of the selections whose list is packed, for one batch row."""
    return 64 if d <= 5120 else 32


@triton.jit
def _entries(ids, values, first, n, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Entries first, first + STRIDE, ... of the list, ROWS of them: ids and values, zeros from n on."""
    rows = ()
    weights = ()
    for k in tl.static_range(ROWS):
        at = first + k * STRIDE
        there = tl.minimum(at, tl.maximum(n - 1, 0))
        rows = rows + (tl.load(ids + there),)
        weights = weights + (tl.where(n - at > 0, tl.load(values + there), 0.0),)
    return rows, weights


@triton.jit
def gathered_tiles(w, rows, live, columns, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """ROWS gathered rows in pieces (BLOCK,), row by row. A row for which `live` is zero is not read."""
    tiles = ()
    for r in tl.static_range(ROWS):
        at = w + rows[r].to(tl.int64) * D
        limit = tl.where(live[r] != 0, D, 0)
        for j in tl.static_range((D + BLOCK - 1) // BLOCK):
            c = j * BLOCK + columns
            tiles = tiles + (tl.load(at + c, mask=c < limit, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _sparse_fc2_kernel(
    ids,
    values,
    count,
    weight,
    partials,
    D: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(1)
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    STEP: tl.constexpr = ROWS * SPLITS
    wait_for_predecessor(PDL)
    n = tl.load(count)
    rows, weights = _entries(ids, values, split, n, SPLITS, ROWS)
    tiles = gathered_tiles(weight, rows, weights, columns, D, D, ROWS)
    next_rows, next_weights = _entries(ids, values, split + STEP, n, SPLITS, ROWS)
    acc = tl.zeros((STRIPE,), tl.float32)
    for first in range(split, n, STEP):
        coming = gathered_tiles(weight, next_rows, next_weights, columns, D, D, ROWS)
        far_rows, far_weights = _entries(ids, values, first + 2 * STEP, n, SPLITS, ROWS)
        for k in tl.static_range(ROWS):
            acc += tiles[k].to(tl.float32) * weights[k]
        tiles = coming
        weights = next_weights
        next_rows = far_rows
        next_weights = far_weights
    tl.store(partials + split * D + columns, acc, mask=columns < D)


@triton.jit
def summed_partials(
    partials, columns, inside, SIZE: tl.constexpr, STRIPE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr
):
    """Sums (STRIPE,) of SPLITS partial sums of SIZE columns, CHUNK of them at a time."""
    s = tl.arange(0, CHUNK)
    y = tl.zeros((CHUNK, STRIPE), tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        at = partials + (first + s)[:, None] * SIZE + columns[None, :]
        y += tl.load(at, mask=(first + s < SPLITS)[:, None] & inside[None, :], other=0.0)
    return tl.sum(y, 0)


@triton.jit
def _add_kernel(
    partials,
    bias,
    residual,
    out,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    STRIPE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = residual + bias + the sum of the partial sums, of SIZE / D rows."""
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    inside = columns < SIZE
    offset = tl.load(bias + columns % D, mask=inside, other=0.0).to(tl.float32)
    # Older than the launch before, and rewritten by every step: not out of the L1.
    base = tl.load(residual + columns, mask=inside, other=0.0, cache_modifier=".cg")
    # What comes next reads weights before its own wait.
    start_dependents_and_wait(PDL)
    y = summed_partials(partials, columns, inside, SIZE, STRIPE, SPLITS, CHUNK)
    tl.store(out + columns, y + offset + base, mask=inside)


def add_partials(partials: Tensor, splits: int, bias: Tensor, residual: Tensor, out: Tensor, pdl: bool) -> None:
    """out (B, d) = residual + bias + the first `splits` times B d partial sums. pdl as `use_pdl` gives it."""
    batch, d = out.shape
    stripe, chunk, warps = (32, 32, 4) if splits <= 132 else (64 // partials.element_size(), 64, 4)
    if INTERPRET:
        chunk = 4
    _add_kernel[(triton.cdiv(batch * d, stripe),)](
        partials,
        bias,
        residual,
        out,
        D=d,
        SIZE=batch * d,
        STRIPE=stripe,
        SPLITS=splits,
        CHUNK=chunk,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


@dataclass(frozen=True)
class Fc2Settings:
    """stripe: columns of a program. splits: programs a stripe. rows: on their way at once, twice."""

    stripe: int
    splits: int
    rows: int


def fc2_settings(d: int) -> Fc2Settings:
    """Launch settings by width."""
    if INTERPRET:
        return Fc2Settings(32, 3, 2)
    stripe = min(1024, triton.next_power_of_2(d))
    stripes = -(-d // stripe)
    if d == 9216:
        return Fc2Settings(stripe, 44, 12)
    return Fc2Settings(stripe, min(132, 66 if d <= 2048 else 528 // stripes), 8)


def partial_sums(d: int, device: torch.device | str) -> Tensor:
    """Scratch for every kernel that `add_partials` follows. Shared by calls that run one after another."""
    return torch.zeros(MAX_SPLITS, d, device=device, dtype=torch.float32)


def sparse_fc2(
    rows: PackedSelection,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
    settings: Fc2Settings | None = None,
) -> None:
    """weight (n, d), bias (d), residual and out (1, d) fp32. Bitwise deterministic. Errors: shapes, a CPU tensor."""
    check_device("rows.ids", rows.ids)
    n, d = weight.shape
    numbers = check_numbers("weight", weight, n, d)
    check_shape("rows.ids", rows.ids, n)
    check_shape("residual", residual, 1, d)
    check_shape("out", out, 1, d)
    settings = settings or fc2_settings(d)
    splits = min(settings.splits, MAX_SPLITS)
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, MAX_SPLITS, d)
    pdl = use_pdl(pdl, out.device)
    _sparse_fc2_kernel[(triton.cdiv(d, settings.stripe), splits)](
        rows.ids,
        rows.values,
        rows.count,
        numbers,
        partials,
        D=d,
        STRIPE=settings.stripe,
        SPLITS=splits,
        ROWS=settings.rows,
        PDL=pdl,
        num_warps=max(1, settings.stripe // 256),
        launch_pdl=pdl,
    )
    add_partials(partials, splits, bias, residual, out, pdl)


def sparse_fc2_reference(
    h: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Plain torch from dense h (B, n)."""
    out.copy_(h.float() @ weight.dense() + bias.float() + residual)
