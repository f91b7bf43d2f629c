"""Neurons whose rows are numbers, or codes of one each: how the MLP of one token multiplies those of a list.

Program p takes entries p, p + P, p + 2 P, ... of the list, `rows` at a time. Their rows of the first matrix share one
reduction. Then it reads their rows of down at once, and behind a gate those of up. Rows of value zero are left out.
The rows that come next, of either matrix, are on their way meanwhile. Behind a gate, up's products of a step are part
of the next step's reduction. Sums and hidden values are fp32.

A format of one number a column is two functions. `number` makes fp32 of a piece of a row, and `factor` gives what the
products of a row are multiplied with.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_shape
from dejavu_train.kernels.common.launch import THROUGH_L1, dot_type, load_vector, n_sms, sums_together
from dejavu_train.kernels.common.layer_norm import norm_vectors, row_moments
from dejavu_train.kernels.common.partial_sums import most_splits
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.stages.listed import ListedLaunch, keyed


@dataclass(frozen=True)
class MlpSettings(Settings, stage="listed"):
    """programs: of a multiprocessor. block: columns of a piece of a row, at most. rows: entries a step, at most 8."""

    programs: int
    block: int
    rows: int
    warps: int


@triton.jit
def to_fp32(tile):
    return tile.to(tl.float32)


@triton.jit
def no_factor(parts, row):
    return 1.0


@triton.jit
def _number_gathered(how: tl.constexpr, matrix, rows, live, lane):
    """The rows of a matrix in pieces (block,), row by row. A row for which `live` is zero is not read."""
    tiles = ()
    for r in tl.static_range(how.rows):
        at = matrix.parts[0] + rows[r].to(tl.int64) * how.d
        limit = tl.where(live[r] != 0, how.d, 0)
        for j in tl.static_range((how.d + how.lanes - 1) // how.lanes):
            c = j * how.lanes + lane
            tiles = tiles + (tl.load(at + c, mask=c < limit, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _number_ids(how: tl.constexpr, ids, first, last):
    """Entries first, first + P, ... of the list. Beyond the list's end old ones, in range."""
    rows = ()
    for r in tl.static_range(how.rows):
        entry = tl.minimum(first + r * tl.num_programs(0), last)
        rows = rows + (tl.load(ids + entry, cache_modifier=".cg"),)
    return rows


@triton.jit
def _number_inside(how: tl.constexpr, first, step, number):
    inside = ()
    for r in tl.static_range(how.rows):
        inside = inside + (first + r * step < number,)
    return inside


@triton.jit
def _number_part(how: tl.constexpr, tiles, r, n):
    """Each thread's part of the product of row r with n."""
    STEPS: tl.constexpr = (how.d + how.lanes - 1) // how.lanes
    part = how.number(tiles[r * STEPS]) * n[0].to(tl.float32)
    for j in tl.static_range(1, STEPS):
        part += how.number(tiles[r * STEPS + j]) * n[j].to(tl.float32)
    return part


@triton.jit
def _number_added(how: tl.constexpr, acc, tiles, values):
    """acc plus rows times their values, piece by piece."""
    STEPS: tl.constexpr = (how.d + how.lanes - 1) // how.lanes
    more = ()
    for j in tl.static_range(STEPS):
        total = acc[j]
        for r in tl.static_range(how.rows):
            total += how.number(tiles[r * STEPS + j]) * values[r]
        more = more + (total,)
    return more


@triton.jit
def _number_gated(how: tl.constexpr, held, sums, act: tl.constexpr):
    """The values of a step behind a gate: its activations times up's products, whose sums are `sums`."""
    values = ()
    for r in tl.static_range(how.rows):
        product = sums[r] * held[2][r] + held[3][r]
        if act.both:
            product = act.function(product, act.threshold)
        values = values + (tl.where(held[1][r] == 0, 0.0, held[1][r] * product),)
    return values


@triton.jit
def _number_share(how: tl.constexpr, number):
    return tl.program_id(0), number, how.rows * tl.num_programs(0)


@triton.jit
def _number_read_input(how: tl.constexpr, x, lane, CACHE: tl.constexpr = THROUGH_L1):
    return load_vector(x, lane, how.d, how.lanes, CACHE)


@triton.jit
def _number_read_norm(how: tl.constexpr, norm, lane):
    return norm_vectors(norm, lane, how.d, how.lanes)


@triton.jit
def _number_normalise(how: tl.constexpr, x, norms, norm, lane):
    """Pieces, zero beyond d where gain and shift are. Mean and variance by one reduction."""
    STEPS: tl.constexpr = (how.d + how.lanes - 1) // how.lanes
    pieces = load_vector(x, lane, how.d, how.lanes)
    total = pieces[0].to(tl.float32)
    squares = total * total
    for j in tl.static_range(1, STEPS):
        part = pieces[j].to(tl.float32)
        total += part
        squares += part * part
    sums = sums_together((total, squares), 2)
    mean, rstd = row_moments(sums[0], sums[1], norm, how.d)
    n = ()
    for j in tl.static_range(STEPS):
        value = norm.scaled((pieces[j].to(tl.float32) - mean) * rstd, norms[0][j], norms[1][j])
        n = n + (value.to(how.rounded),)
    return n, mean, rstd


@triton.jit
def _number_first_rows(how: tl.constexpr, first, ids, begin, end, last, lane):
    rows = _number_ids(how, ids, begin, last)
    next_rows = _number_ids(how, ids, begin + how.rows * tl.num_programs(0), last)
    inside = _number_inside(how, begin, tl.num_programs(0), end)
    return rows, next_rows, _number_gathered(how, first, rows, inside, lane)


@triton.jit
def _number_begin(how: tl.constexpr, coming, gate, up, down, lane):
    """(this step's rows, the next one's, this one's of the first matrix, what is held of the step before, the sums).

    held: rows of down, their values, with a gate factors and biases of up, and its rows.
    """
    nothing = _number_inside(how, tl.program_id(0), 0, 0)
    values = ()
    for _ in tl.static_range(how.rows):
        values = values + (0.0,)
    acc = ()
    for _ in tl.static_range((how.d + how.lanes - 1) // how.lanes):
        acc = acc + (tl.zeros((how.lanes,), tl.float32),)
    held = (_number_gathered(how, down, coming[0], nothing, lane), values)
    if gate is not None:
        held = held + (values, values, _number_gathered(how, up, coming[0], nothing, lane))
    return coming + (held, acc)


@triton.jit
def _number_products(how: tl.constexpr, state, gate, up, n, ids, entry, end, last, lane):
    rows, next_rows, w, held, acc = state
    step = tl.num_programs(0)
    first = gate if gate is not None else up
    inside = _number_inside(how, entry, step, end)
    after = _number_inside(how, entry + how.rows * step, step, end)
    coming = _number_gathered(how, first, next_rows, after, lane)
    far_rows = _number_ids(how, ids, entry + 2 * how.rows * step, last)
    offsets = ()
    parts = ()
    for r in tl.static_range(how.rows):
        offsets = offsets + (tl.load(first.bias + rows[r]).to(tl.float32),)
        parts = parts + (_number_part(how, w, r, n),)
    if gate is not None:
        for r in tl.static_range(how.rows):
            parts = parts + (_number_part(how, held[4], r, n),)
    sums = sums_together(parts, len(parts))
    products = ()
    for r in tl.static_range(how.rows):
        products = products + (sums[r] * how.factor(first.parts, rows[r]) + offsets[r],)
    return products, inside, (rows, next_rows, far_rows, coming, held, sums[how.rows :], acc)


@triton.jit
def _number_add(how: tl.constexpr, state, values, gate, up, down, act: tl.constexpr, lane):
    rows, next_rows, far_rows, coming, held, sums, acc = state
    ready = held[1]
    if gate is not None:
        ready = _number_gated(how, held, sums, act)
    acc = _number_added(how, acc, held[0], ready)
    fresh = ()
    live = ()
    factors = ()
    offsets = ()
    for r in tl.static_range(how.rows):
        fresh = fresh + (values[r] * how.factor(down.parts, rows[r]),)
        live = live + (values[r] != 0,)
        if gate is not None:
            factors = factors + (how.factor(up.parts, rows[r]),)
            offsets = offsets + (tl.load(up.bias + rows[r]).to(tl.float32),)
    fresh_rows = (_number_gathered(how, down, rows, live, lane), fresh)
    if gate is not None:
        fresh_rows = fresh_rows + (factors, offsets, _number_gathered(how, up, rows, live, lane))
    return next_rows, far_rows, coming, fresh_rows, acc


@triton.jit
def _number_finish(how: tl.constexpr, state, gate, up, down, n, partials, act: tl.constexpr, lane):
    held = state[3]
    values = held[1]
    if gate is not None:
        parts = ()
        for r in tl.static_range(how.rows):
            parts = parts + (_number_part(how, held[4], r, n),)
        values = _number_gated(how, held, sums_together(parts, how.rows), act)
    acc = _number_added(how, state[4], held[0], values)
    for j in tl.static_range((how.d + how.lanes - 1) // how.lanes):
        c = j * how.lanes + lane
        tl.store(partials + tl.program_id(0) * how.d + c, acc[j], mask=c < how.d)


@keyed
class NumberNeurons(NamedTuple):
    """d: columns. lanes: of a piece of a row. rows: of a step. rounded: what a normalised x is rounded to.

    The functions of `stages.mlp` follow.
    """

    d: Any
    lanes: Any
    rows: Any
    rounded: Any
    number: Any = to_fp32
    factor: Any = no_factor
    share: Any = _number_share
    read_input: Any = _number_read_input
    read_norm: Any = _number_read_norm
    normalise: Any = _number_normalise
    first_rows: Any = _number_first_rows
    begin: Any = _number_begin
    products: Any = _number_products
    add: Any = _number_add
    finish: Any = _number_finish


def launch(
    x: Tensor, weights: MlpWeights, norm: bool, every: bool, number: Any = to_fp32, factor: Any = no_factor
) -> ListedLaunch:
    """Launch for matrices of numbers, or of codes that `number` and `factor` make numbers of."""
    n, d = weights.up.weight.shape
    for name, linear in weights.named():
        check_shape(f"{name}.weight", linear.weight.parts()[0], n, d)
    device = x.device
    gated = weights.gate is not None
    settings = MlpSettings.find("float", device, d=d, norm=norm, gated=gated, all=every)
    block = min(settings.block, max(16, triton.next_power_of_2(d)))
    kind = dot_type(weights.up.weight.parts()[0].dtype)
    how = NumberNeurons(d, block, settings.rows, kind, number, factor)
    warps = min(settings.warps, max(1, block // 32))  # no more threads than columns
    return ListedLaunch(how, min(settings.programs * n_sms(device), most_splits(device)), warps)
