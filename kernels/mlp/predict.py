"""A predictor's first product, one token, with the LayerNorm folded in: y[r] = act(sum_j w[r, j] n[j]).

    n = LayerNorm(x) = (x - mean) rstd g + b,  so  y[r] = rstd (sum_j w[r, j] g[j] x[j] - mean sum_j w[r, j] g[j])
                                                          + sum_j w[r, j] b[j]

x (1, d), w (rank, d), y (1, rank) fp32, sums in fp32. The two last sums depend on weights alone (`norm_sums`). The rows
are in registers before the wait for the stage before. After it one pass over x gives products, mean and variance
together, and one reduction adds them all up: a barrier, where a sum each would take a dozen. A program also normalises
its slice of x for fc1.

Rows may be int8 or fp8 codes or nibbles with a scale each (`codes`). Of nibbles, what their floats have too much comes
off a sum:
    sum_j code[j] z[j] = 16 sum_j (1 + u[j] / 16) z[j] - 24 sum_j z[j]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, INTERPRET, check_input, check_tensor, require
from dejavu_train.kernels.common.launch import (
    load_vector,
    next_power_of_two,
    programmatic,
    start_dependents_and_wait,
    sums_together,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference, mean_and_rstd
from dejavu_train.kernels.mlp.codes import CODE_TYPES, nibble_floats, stored_width, to_float, unscaled

PROGRAMS = 132  # at most, where MAX_ROWS rows each are enough: one a multiprocessor
MAX_ROWS = 7


@dataclass(frozen=True)
class PredictSettings:
    """rows: of a program, at most MAX_ROWS. block: columns a piece of a row. warps."""

    rows: int
    block: int
    warps: int


def predict_settings(d: int, rank: int) -> PredictSettings:
    """Launch settings by shape."""
    if INTERPRET:
        return PredictSettings(1 + rank % MAX_ROWS, min(64, max(16, next_power_of_two(d))), 4)
    block = min(2048, max(16, next_power_of_two(d)))
    return PredictSettings(min(MAX_ROWS, -(-rank // PROGRAMS)), block, 8)


def norm_sums(weight: Tensor, ln: LayerNormWeights) -> tuple[Tensor, Tensor]:
    """Sums of every row of weight (n, d) with the LayerNorm's weight and bias: (n,) fp32 each, without scales."""
    both = torch.stack(ln.folded, dim=1).float()
    # In parts: a wide copy of a whole fc1 may not fit beside the model.
    parts = (unscaled(part, None, torch.float32, len(both)) for part in weight.split(4096))
    gains, shifts = torch.cat([part @ both for part in parts]).T.contiguous()
    return gains, shifts


def predict_down_reference(
    x: Tensor, ln: LayerNormWeights, weight: Tensor, scale: Tensor | None = None, relu: bool = False
) -> Tensor:
    """(1, rank) in plain torch. fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = layer_norm_reference(x, ln, wide) @ unscaled(weight, scale, wide, x.shape[1]).T
    return y.relu() if relu else y


@triton.jit
def row_tiles(w_ptr, first, n_rows, columns, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows first .. first + ROWS - 1 in pieces (BLOCK,), row by row. The last row again beyond n_rows."""
    tiles = ()
    for r in tl.static_range(ROWS):
        at = w_ptr + tl.minimum(first + r, n_rows - 1).to(tl.int64) * D
        tiles = tiles + load_vector(at, columns, D, BLOCK)
    return tiles


@triton.jit
def norm_products(tiles, x, gain, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """Sums of rows times gain times x, of x and of its squares (ROWS + 2 scalars) from pieces in registers."""
    scaled = ()
    for j in tl.static_range(STEPS):
        part = x[j].to(tl.float32)
        scaled = scaled + (part * gain[j].to(tl.float32),)
        if j == 0:
            total = part
            squares = part * part
        else:
            total += part
            squares += part * part
    products = ()
    for r in tl.static_range(ROWS):
        product = to_float(tiles[r * STEPS]) * scaled[0]
        for j in tl.static_range(1, STEPS):
            product += to_float(tiles[r * STEPS + j]) * scaled[j]
        products = products + (product,)
    return sums_together(products + (total, squares), ROWS + 2)


@triton.jit
def nibble_products(tiles, low, high, low_gain, high_gain, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """`norm_products` of rows of nibbles, from the two halves of x and of the gain."""
    scaled = ()
    for j in tl.static_range(STEPS):
        first = low[j].to(tl.float32)
        second = high[j].to(tl.float32)
        scaled = scaled + (first * low_gain[j].to(tl.float32), second * high_gain[j].to(tl.float32))
        if j == 0:
            total = first + second
            squares = first * first + second * second
            both = scaled[0] + scaled[1]
        else:
            total += first + second
            squares += first * first + second * second
            both += scaled[2 * j] + scaled[2 * j + 1]
    products = ()
    for r in tl.static_range(ROWS):
        for j in tl.static_range(STEPS):
            floats = nibble_floats(tiles[r * STEPS + j])
            if j == 0:
                product = floats[0] * scaled[0] + floats[1] * scaled[1]
            else:
                product += floats[0] * scaled[2 * j] + floats[1] * scaled[2 * j + 1]
        products = products + (product,)
    found = sums_together(products + (total, squares, both), ROWS + 3)
    sums = ()
    for r in tl.static_range(ROWS):
        sums = sums + (16 * found[r] - 24 * found[ROWS + 2],)
    return sums + (found[ROWS], found[ROWS + 1])


@triton.jit
def high_half(x_ptr, columns, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ceil(D / 2) .. of x (D,) as pieces that meet the high nibbles of those of the first half."""
    HALF: tl.constexpr = (D + 1) // 2
    xs = ()
    for j in tl.static_range((HALF + BLOCK - 1) // BLOCK):
        c = j * BLOCK + columns
        xs = xs + (tl.load(x_ptr + HALF + c, mask=c < D - HALF, other=0.0),)
    return xs


@triton.jit
def row_values(ptr, first, n_rows, ROWS: tl.constexpr):
    """One scalar a row."""
    values = ()
    for r in tl.static_range(ROWS):
        values = values + (tl.load(ptr + tl.minimum(first + r, n_rows - 1)),)
    return values


@triton.jit
def normalised_rows(
    pid,
    x_ptr,
    gain_ptr,
    shift_ptr,
    w_ptr,
    gains_ptr,
    shifts_ptr,
    normalised_ptr,
    n_rows,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
    BEFORE: tl.constexpr = 0,
    EARLY: tl.constexpr = False,
):
    """Products of program pid's ROWS rows with LayerNorm(x), with the wait, as scalars. Stores its slice of n.

    BEFORE: programs of the grid that have rows of another matrix. EARLY: lets the next kernel start before the wait.
    """
    first = (pid - BEFORE) * ROWS
    NIBBLES: tl.constexpr = w_ptr.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = (D + 1) // 2 if NIBBLES else D  # elements of a row, and columns of x that meet each first
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    columns = tl.arange(0, BLOCK)
    tiles = row_tiles(w_ptr, first, n_rows, columns, WIDTH, BLOCK, ROWS)
    gain = load_vector(gain_ptr, columns, WIDTH, BLOCK)
    if NIBBLES:
        high_gain = high_half(gain_ptr, columns, D, BLOCK)
    gains = row_values(gains_ptr, first, n_rows, ROWS)
    shifts = row_values(shifts_ptr, first, n_rows, ROWS)
    own = pid * SLICE + tl.arange(0, SLICE)
    if normalised_ptr is not None:
        own_gain = tl.load(gain_ptr + own, mask=own < D, other=0.0).to(tl.float32)
        own_shift = tl.load(shift_ptr + own, mask=own < D, other=0.0).to(tl.float32)
    if EARLY:
        start_dependents_and_wait(PDL)
    else:
        wait_for_predecessor(PDL)
    x = load_vector(x_ptr, columns, WIDTH, BLOCK)
    if normalised_ptr is not None:
        own_x = tl.load(x_ptr + own, mask=own < D, other=0.0).to(tl.float32)
    if NIBBLES:
        sums = nibble_products(tiles, x, high_half(x_ptr, columns, D, BLOCK), gain, high_gain, STEPS, ROWS)
    else:
        sums = norm_products(tiles, x, gain, STEPS, ROWS)
    mean, rstd = mean_and_rstd(sums[ROWS], sums[ROWS + 1], D, eps)
    if normalised_ptr is not None:
        value = (own_x - mean) * rstd * own_gain + own_shift
        tl.store(normalised_ptr + own, value.to(normalised_ptr.dtype.element_ty), mask=own < D)
    y = ()
    for r in tl.static_range(ROWS):
        y = y + (rstd * (sums[r] - mean * gains[r]) + shifts[r],)
    return y


@triton.jit
def predicted_rows(
    pid,
    x_ptr,
    gain_ptr,
    shift_ptr,
    w_ptr,
    scale_ptr,
    gains_ptr,
    shifts_ptr,
    out_ptr,
    normalised_ptr,
    n_rows,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
    BEFORE: tl.constexpr = 0,
    EARLY: tl.constexpr = False,
):
    """Program pid's whole work, also as a part of another grid: `normalised_rows` times their scales, stored."""
    first = (pid - BEFORE) * ROWS
    if scale_ptr is not None:
        scales = row_values(scale_ptr, first, n_rows, ROWS)
    y = normalised_rows(
        pid, x_ptr, gain_ptr, shift_ptr, w_ptr, gains_ptr, shifts_ptr, normalised_ptr, n_rows, eps, D, BLOCK, ROWS,
        SLICE, PDL, BEFORE, EARLY,
    )  # fmt: skip
    for r in tl.static_range(ROWS):
        value = y[r]
        if scale_ptr is not None:
            value = value * scales[r]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(out_ptr + first + r, value, mask=first + r < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _predict_down_kernel(
    x_ptr,
    gain_ptr,
    shift_ptr,
    w_ptr,
    scale_ptr,
    gains_ptr,
    shifts_ptr,
    out_ptr,
    normalised_ptr,
    n_rows,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    # The selection that follows asks for its own weights meanwhile.
    predicted_rows(
        tl.program_id(0), x_ptr, gain_ptr, shift_ptr, w_ptr, scale_ptr, gains_ptr, shifts_ptr, out_ptr, normalised_ptr,
        n_rows, eps, D, BLOCK, ROWS, SLICE, RELU, PDL, EARLY=True,
    )  # fmt: skip


def predict_down(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Tensor,
    sums: tuple[Tensor, Tensor],
    out: Tensor,
    scale: Tensor | None = None,
    relu: bool = False,
    normalised_out: Tensor | None = None,
    pdl: bool = False,
    settings: PredictSettings | None = None,
) -> None:
    """x (1, d) fp32/fp16/bf16. weight (rank, d) as x, or int8/fp8 with scale (rank,) fp32, or (rank, ceil(d / 2)) uint8
    nibbles with such a scale. out (1, rank) fp32.

    sums: as `norm_sums` gives them. normalised_out: (1, d), receives LN(x). Sums in fp32, in a fixed order.
    Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    require(batch == 1, f"the LayerNorm is folded into the product of one row, got {batch}")
    rank = weight.shape[0]
    check_tensor("weight", weight, (rank, stored_width(weight, d)), FLOAT_TYPES + CODE_TYPES, x)
    for name, given in zip(("weight", "bias"), ln.folded, strict=True):
        check_tensor(f"LayerNorm {name}", given, (d,), FLOAT_TYPES, x)
    check_tensor("out", out, (1, rank), (torch.float32,), x)
    require(weight.dtype not in CODE_TYPES or scale is not None, f"a weight of {weight.dtype} needs a scale a row")
    for total in sums:
        check_tensor("sums", total, (rank,), (torch.float32,), x)
    if scale is not None:
        check_tensor("scale", scale, (rank,), (torch.float32,), x)
    if normalised_out is not None:
        check_tensor("normalised_out", normalised_out, (1, d), FLOAT_TYPES, x)
    programs, constants, warps = norm_launch(d, (rank,), settings, weight.dtype == torch.uint8)
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_down_kernel[(programs,)](
        x,
        *ln.folded,
        weight,
        scale,
        *sums,
        out,
        normalised_out,
        rank,
        ln.eps,
        **constants,
        RELU=relu,
        PDL=has_pdl,
        num_warps=warps,
        launch_pdl=use_pdl,
    )


def norm_launch(
    d: int, n_rows: Sequence[int], settings: PredictSettings | None = None, nibbles: bool = False
) -> tuple[int, dict[str, int], int]:
    """(programs, constants, warps) of `normalised_rows` over matrices of so many rows each, for all kernels with it."""
    settings = settings or predict_settings((d + 1) // 2 if nibbles else d, sum(n_rows))
    require(1 <= settings.rows <= MAX_ROWS, f"a program takes 1 to {MAX_ROWS} rows, not {settings.rows}")
    programs = sum(-(-rows // settings.rows) for rows in n_rows)
    own = next_power_of_two(-(-d // programs))  # columns of n that each stores
    constants = {"D": d, "BLOCK": settings.block, "ROWS": settings.rows, "SLICE": own}
    return programs, constants, min(settings.warps, max(1, settings.block // 32))  # no more threads than columns
