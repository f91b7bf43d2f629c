"""fc1 and fc2 over a packed list in one grid, one token:

    out[j] = residual[j] + b2[j] + sum_k h[k] w2_t[ids[k], j],   h[k] = relu(sum_j w1[ids[k], j] n[j] + b1[ids[k]])

n = LayerNorm(x), rounded to w1's dtype, or x itself. x (1, d) fp32 (or as w1, without a LayerNorm). w1, w2_t (n, d).
Program p takes entries p, p + P, p + 2 P, ... of the list, ROWS at a time: their rows of fc1, one reduction for all of
them, then at once their rows of fc2, those of value zero left out. The rows of fc1 that come next, and the rows of fc2,
are on their way meanwhile. So nothing waits between the two products, where two kernels end, start and fill the
memory's queues again. What it costs is a sum of all d columns for each program, which `add_partials` adds up in a fixed
order. Hence few programs, one or two a multiprocessor.

What is known before the wait for the stage before is read there: x, where a launch before that one made it (EARLY_X,
the predictor normalised it), or the list and its first rows (EARLY_LIST, a look-ahead predictor).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import INTERPRET, check_device, check_numbers, check_shape
from dejavu_train.kernels.common.launch import load_vector, sums_together, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference, mean_and_rstd
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.mlp.pack import PackedSelection


@dataclass(frozen=True)
class MlpSettings:
    """programs: grid size, at most `most_splits`. block: columns a piece of a row. rows: entries a step, at most 8."""

    programs: int
    block: int
    rows: int
    warps: int


def mlp_settings(d: int, norm: bool = False) -> MlpSettings:
    """Launch settings by width, with or without a LayerNorm in front."""
    if INTERPRET:
        return MlpSettings(5, min(64, max(16, triton.next_power_of_2(d))), 2, 2)
    if d < 2048:
        return MlpSettings(264, max(16, triton.next_power_of_2(d)), 2, 8)
    if d <= 4096:
        return MlpSettings(264, 2048, 4 if d == 2048 else 2, 8)
    if d <= 5120:
        return MlpSettings(264, 1024, 1, 4)
    return MlpSettings(132, 2048, 2, 8) if d <= 8192 and not norm else MlpSettings(132, 4096, 2, 16)


def sparse_mlp_reference(
    x: Tensor, ln: LayerNormWeights | None, weights: MlpWeights, residual: Tensor, mask: Tensor, out: Tensor
) -> None:
    """Plain torch over a selection, mask (B, n) bool, in fp64 where x is. 4-bit weights meet x in fp16."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    fc1, fc2 = weights.up, weights.down
    dtype = torch.float16 if fc1.weight.format is Format.INT4 else fc1.weight.numbers.dtype
    n = x.to(dtype) if ln is None else layer_norm_reference(x, ln, dtype)
    h = (n.to(wide) @ fc1.weight.dense(wide).T + fc1.bias.to(wide)).relu()
    out.copy_(torch.where(mask, h, 0.0) @ fc2.weight.dense(wide) + fc2.bias.to(wide) + residual)


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
def _ids(ids, first, step, last, ROWS: tl.constexpr):
    """Entries first, first + step, ... of the list. Beyond the list's end old ones, in range."""
    rows = ()
    for r in tl.static_range(ROWS):
        rows = rows + (tl.load(ids + tl.minimum(first + r * step, last), cache_modifier=".cg"),)
    return rows


@triton.jit
def _inside(first, step, number, ROWS: tl.constexpr):
    inside = ()
    for r in tl.static_range(ROWS):
        inside = inside + (first + r * step < number,)
    return inside


@triton.jit
def _added(acc, tiles, values, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """acc plus rows times their values, piece by piece."""
    more = ()
    for j in tl.static_range(STEPS):
        total = acc[j]
        for r in tl.static_range(ROWS):
            total += tiles[r * STEPS + j].to(tl.float32) * values[r]
        more = more + (total,)
    return more


@triton.jit
def _layer_norm(x, gain, shift, D: tl.constexpr, EPS: tl.constexpr, STEPS: tl.constexpr, TYPE: tl.constexpr):
    """LayerNorm of pieces, zero beyond D where gain and shift are. Mean and variance by one reduction."""
    total = x[0].to(tl.float32)
    squares = total * total
    for j in tl.static_range(1, STEPS):
        part = x[j].to(tl.float32)
        total += part
        squares += part * part
    sums = sums_together((total, squares), 2)
    mean, rstd = mean_and_rstd(sums[0], sums[1], D, EPS)
    n = ()
    for j in tl.static_range(STEPS):
        value = (x[j].to(tl.float32) - mean) * rstd * gain[j].to(tl.float32) + shift[j].to(tl.float32)
        n = n + (value.to(TYPE),)
    return n


@triton.jit(do_not_specialize=["last"])
def _sparse_mlp_kernel(
    x,
    norm_weight,
    norm_bias,
    w1,
    b1,
    w2,
    ids,
    count,
    partials,
    last,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    EARLY_X: tl.constexpr,
    EARLY_LIST: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    if EARLY_X:
        n = load_vector(x, columns, D, BLOCK, ".cg")
    if NORM:
        gain = load_vector(norm_weight, columns, D, BLOCK)
        shift = load_vector(norm_bias, columns, D, BLOCK)
    if not EARLY_LIST:
        wait_for_predecessor(PDL)
    # An id may be one beyond the count: then it is an old one, in range, and its row is not read.
    number = tl.load(count, cache_modifier=".cg")
    rows = _ids(ids, pid, step, last, ROWS)
    next_rows = _ids(ids, pid + ROWS * step, step, last, ROWS)
    w = gathered_tiles(w1, rows, _inside(pid, step, number, ROWS), columns, D, BLOCK, ROWS)
    if EARLY_LIST:
        wait_for_predecessor(PDL)
    if not EARLY_X:
        n = load_vector(x, columns, D, BLOCK)
    if NORM:
        n = _layer_norm(n, gain, shift, D, EPS, STEPS, w1.dtype.element_ty)
    acc = ()
    for _ in tl.static_range(STEPS):
        acc = acc + (tl.zeros((BLOCK,), tl.float32),)
    values = ()
    for _ in tl.static_range(ROWS):
        values = values + (0.0,)
    second = gathered_tiles(w2, rows, _inside(pid, 0, 0, ROWS), columns, D, BLOCK, ROWS)  # none: zeros
    for item in range(pid, number, ROWS * step):
        inside = _inside(item, step, number, ROWS)
        after = _inside(item + ROWS * step, step, number, ROWS)
        coming = gathered_tiles(w1, next_rows, after, columns, D, BLOCK, ROWS)
        far_rows = _ids(ids, item + 2 * ROWS * step, step, last, ROWS)
        offsets = ()
        products = ()
        for r in tl.static_range(ROWS):
            offsets = offsets + (tl.load(b1 + rows[r]).to(tl.float32),)
            product = w[r * STEPS].to(tl.float32) * n[0].to(tl.float32)
            for j in tl.static_range(1, STEPS):
                product += w[r * STEPS + j].to(tl.float32) * n[j].to(tl.float32)
            products = products + (product,)
        sums = sums_together(products, ROWS)
        fresh = ()
        live = ()
        for r in tl.static_range(ROWS):
            value = sums[r] + offsets[r]
            value = tl.where((value <= 0) | (inside[r] == 0), 0.0, value)  # keeps a NaN
            fresh = fresh + (value,)
            live = live + (value != 0,)
        acc = _added(acc, second, values, STEPS, ROWS)
        second = gathered_tiles(w2, rows, live, columns, D, BLOCK, ROWS)
        values = fresh
        rows = next_rows
        next_rows = far_rows
        w = coming
    acc = _added(acc, second, values, STEPS, ROWS)
    for j in tl.static_range(STEPS):
        c = j * BLOCK + columns
        tl.store(partials + pid * D + c, acc[j], mask=c < D)


def check_mlp(
    x: Tensor, ln: LayerNormWeights | None, weights: MlpWeights, rows: PackedSelection, early: str | None
) -> tuple[int, int]:
    """(n, d) of the weights. Raise ValueError for what neither format goes with."""
    n, d = weights.up.weight.shape
    check_device("x", x)
    check_shape("x", x, 1, d)
    check_shape("fc1.bias", weights.up.bias, n)
    check_shape("rows.ids", rows.ids, n)
    if early not in (None, "x", "list") or (early == "x" and ln is not None):
        raise ValueError(f'early must be "list", None, or "x" without a LayerNorm, got {early!r}')
    return n, d


def sparse_mlp(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    residual: Tensor,
    rows: PackedSelection,
    out: Tensor,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
    settings: MlpSettings | None = None,
) -> None:
    """Reads rows.ids and rows.count. residual and out (1, d) fp32. Bitwise deterministic. See the module's docstring.

    early: what was written before the launch before this one: "x" (without a LayerNorm here), "list", or None.
    Errors: shapes, a CPU tensor.
    """
    n, d = check_mlp(x, ln, weights, rows, early)
    w1 = check_numbers("fc1.weight", weights.up.weight, n, d)
    w2 = check_numbers("fc2.weight", weights.down.weight, n, d)
    check_shape("residual", residual, 1, d)
    check_shape("out", out, 1, d)
    settings = settings or mlp_settings(d, ln is not None)
    splits = most_splits(out.device)
    programs = min(settings.programs, splits)
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, splits, d)
    pdl = use_pdl(pdl, out.device)
    _sparse_mlp_kernel[(programs,)](
        x,
        None if ln is None else ln.weight,
        None if ln is None else ln.bias,
        w1,
        weights.up.bias,
        w2,
        rows.ids,
        rows.count,
        partials,
        n - 1,
        D=d,
        BLOCK=settings.block,
        ROWS=settings.rows,
        NORM=ln is not None,
        EARLY_X=early == "x",
        EARLY_LIST=early == "list",
        EPS=1e-5 if ln is None else ln.eps,
        PDL=pdl,
        num_warps=min(settings.warps, max(1, settings.block // 32)),  # no more threads than columns
        launch_pdl=pdl,
    )
    add_partials(partials, programs, weights.down.bias, residual, out, pdl)
