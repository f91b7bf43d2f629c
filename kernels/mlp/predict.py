# mypy: disable-error-code="assignment, misc"
"""A predictor's first product, one token, with the LayerNorm folded in: y[r] = act(sum_j w[r, j] n[j]).

    n = LayerNorm(x) = (x - mean) rstd g + b,  so  y[r] = rstd (sum_j w[r, j] g[j] x[j] - mean sum_j w[r, j] g[j])
                                                          + sum_j w[r, j] b[j]

x (1, d), w (rank, d), y (1, rank) fp32, sums in fp32. The two last sums depend on weights alone (`norm_sums`). The rows
are in registers before the wait for the stage before; after it one pass over x gives products, mean and variance
together, and one reduction adds them all up: a barrier, where a sum each would take a dozen. A program also normalises
its slice of x for fc1.

Rows of uint8 are nibbles as a bundle stores them: of a row's H = ceil(d / 2) bytes, byte j holds code + 8 of column j
in its low nibble and of column H + j in the high one. A nibble u becomes the float 1 + u / 16 in the mantissa of 1.0,
so four instructions and eight byte permutations make eight floats; what the ones and eights add comes off a sum:
    sum_j code[j] z[j] = 16 sum_j (1 + u[j] / 16) z[j] - 24 sum_j z[j]
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import FLOAT_TYPES, INTERPRET, QUANTIZED_TYPES, check_input, check_tensor, require
from kernels.common.launch import (
    load_vector,
    next_power_of_two,
    programmatic,
    start_dependents_and_wait,
    sums_together,
    wait_for_predecessor,
)
from kernels.common.layer_norm import LayerNormWeights, layer_norm_reference, mean_and_rstd

INTERPRETED = tl.constexpr(INTERPRET)
CODE_TYPES = (*QUANTIZED_TYPES, torch.uint8)
PROGRAMS = 132  # at most, where MAX_ROWS rows each are enough: one a multiprocessor
MAX_ROWS = 7


@dataclass(frozen=True)
class PredictSettings:
    """rows: of a program, at most MAX_ROWS; block: columns a piece of a row; warps."""

    rows: int
    block: int
    warps: int


def predict_settings(d: int, rank: int) -> PredictSettings:
    """Launch settings by shape."""
    if INTERPRET:
        return PredictSettings(1 + rank % MAX_ROWS, min(64, max(16, next_power_of_two(d))), 4)
    block = min(2048, max(16, next_power_of_two(d)))
    return PredictSettings(min(MAX_ROWS, -(-rank // PROGRAMS)), block, 8)


def nibble_codes(stored: Tensor, columns: int) -> Tensor:
    """Codes (n, columns) int8 of stored nibbles (n, ceil(columns / 2)) uint8."""
    wide = stored.to(torch.int16)
    return (torch.cat([wide & 15, wide >> 4], dim=1)[:, :columns] - 8).to(torch.int8)


def stored_width(weight: Tensor, columns: int) -> int:
    """What a row of `columns` has of this weight's elements: half as many where they are nibbles."""
    return (columns + 1) // 2 if weight.dtype == torch.uint8 else columns


def unscaled(weight: Tensor, scale: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor:
    """weight (n, columns), or its nibbles, in `dtype`, rows times their scales (n,) where it has some."""
    if weight.dtype == torch.uint8:
        weight = nibble_codes(weight, columns)
    return weight.to(dtype) if scale is None else weight.to(dtype) * scale[:, None].to(dtype)


def norm_sums(weight: Tensor, ln: LayerNormWeights) -> tuple[Tensor, Tensor]:
    """Sums of every row of weight (n, d) with the LayerNorm's weight and bias: (n,) fp32 each, without scales."""
    both = torch.stack([ln.weight.float(), ln.bias.float()], dim=1)
    # In parts: a wide copy of a whole fc1 may not fit beside the model.
    parts = (unscaled(part, None, torch.float32, len(both)) for part in weight.split(4096))
    gains, shifts = torch.cat([part @ both for part in parts]).T.contiguous()
    return gains, shifts


def predict_down_reference(
    x: Tensor, ln: LayerNormWeights, weight: Tensor, scale: Tensor | None = None, relu: bool = False
) -> Tensor:
    """(1, rank) in plain torch; fp64 when x is fp64."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = layer_norm_reference(x, ln, wide) @ unscaled(weight, scale, wide, x.shape[1]).T
    return y.relu() if relu else y


@triton.jit
def to_float(tile):
    """fp32, exactly. The GPU converts int8 at a quarter of its rate for sums: here a code's byte becomes the end of
    the mantissa of 2^23, four codes at a time, and 2^23 (and the 128 that makes it positive) is subtracted."""
    if tile.dtype == tl.int8 and not INTERPRETED:
        floats = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7650;
            prmt.b32 $1, bytes, 0x4B000000, 0x7651;
            prmt.b32 $2, bytes, 0x4B000000, 0x7652;
            prmt.b32 $3, bytes, 0x4B000000, 0x7653;
            }
            """,
            "=r,=r,=r,=r,r",
            [tile],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        floats = floats - 8388736.0
    else:
        floats = tile.to(tl.float32)
    return floats


@triton.jit
def nibble_floats(tile):
    """(1 + low nibble / 16, 1 + high nibble / 16) of bytes, fp32."""
    if INTERPRETED:
        wide = tile.to(tl.int32)
        floats = (1 + (wide & 15).to(tl.float32) / 16, 1 + ((wide >> 4) & 15).to(tl.float32) / 16)
    else:
        floats = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, ones;
            mov.b32 ones, 0x80808080;
            shl.b32 low, $8, 3;
            shr.u32 high, $8, 1;
            lop3.b32 low, low, 0x78787878, ones, 0xEA;
            lop3.b32 high, high, 0x78787878, ones, 0xEA;
            prmt.b32 $0, low, 0x3F000000, 0x7044;
            prmt.b32 $1, low, 0x3F000000, 0x7144;
            prmt.b32 $2, low, 0x3F000000, 0x7244;
            prmt.b32 $3, low, 0x3F000000, 0x7344;
            prmt.b32 $4, high, 0x3F000000, 0x7044;
            prmt.b32 $5, high, 0x3F000000, 0x7144;
            prmt.b32 $6, high, 0x3F000000, 0x7244;
            prmt.b32 $7, high, 0x3F000000, 0x7344;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [tile],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    return floats


@triton.jit
def row_tiles(w_ptr, first, n_rows, columns, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows first .. first + ROWS - 1 in pieces (BLOCK,), row by row; the last row again beyond n_rows."""
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
    """Products of program pid's ROWS rows with LayerNorm(x), with the wait, as scalars; stores its slice of n.

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
    pid = tl.program_id(0)
    first = pid * ROWS
    if scale_ptr is not None:
        scales = row_values(scale_ptr, first, n_rows, ROWS)
    # The selection that follows asks for its own weights meanwhile.
    y = normalised_rows(
        pid, x_ptr, gain_ptr, shift_ptr, w_ptr, gains_ptr, shifts_ptr, normalised_ptr, n_rows, eps, D, BLOCK, ROWS,
        SLICE, PDL, EARLY=True,
    )  # fmt: skip
    for r in tl.static_range(ROWS):
        value = y[r]
        if scale_ptr is not None:
            value = value * scales[r]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(out_ptr + first + r, value, mask=first + r < n_rows)


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
    """x (1, d) fp32/fp16/bf16; weight (rank, d) as x, or int8/fp8 with scale (rank,) fp32, or (rank, ceil(d / 2)) uint8
    nibbles with such a scale; out (1, rank) fp32.

    sums: as `norm_sums` gives them. normalised_out: (1, d), receives LN(x). Sums in fp32, in a fixed order.
    Errors: shapes, dtypes, a CPU tensor.
    """
    batch, d = check_input("x", x)
    require(batch == 1, f"the LayerNorm is folded into the product of one row, got {batch}")
    rank = weight.shape[0]
    check_tensor("weight", weight, (rank, stored_width(weight, d)), FLOAT_TYPES + CODE_TYPES, x)
    check_tensor("LayerNorm weight", ln.weight, (d,), FLOAT_TYPES, x)
    check_tensor("LayerNorm bias", ln.bias, (d,), FLOAT_TYPES, x)
    check_tensor("out", out, (1, rank), (torch.float32,), x)
    require(weight.dtype not in CODE_TYPES or scale is not None, f"a weight of {weight.dtype} needs a scale a row")
    for total in sums:
        check_tensor("sums", total, (rank,), (torch.float32,), x)
    if scale is not None:
        check_tensor("scale", scale, (rank,), (torch.float32,), x)
    if normalised_out is not None:
        check_tensor("normalised_out", normalised_out, (1, d), FLOAT_TYPES, x)
    programs, constants, warps = norm_launch(d, rank, settings, weight.dtype == torch.uint8)
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_down_kernel[(programs,)](
        x,
        ln.weight,
        ln.bias,
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


def slice_of(d: int, programs: int) -> int:
    """Columns of n that each of so many programs stores, a power of two."""
    return next_power_of_two(-(-d // programs))


def norm_launch(
    d: int, n_rows: int, settings: PredictSettings | None = None, nibbles: bool = False
) -> tuple[int, dict[str, int], int]:
    """(programs, constants, warps) of `normalised_rows`, the same in every kernel that calls it."""
    settings = settings or predict_settings((d + 1) // 2 if nibbles else d, n_rows)
    require(1 <= settings.rows <= MAX_ROWS, f"a program takes 1 to {MAX_ROWS} rows, not {settings.rows}")
    programs = -(-n_rows // settings.rows)
    constants = {"D": d, "BLOCK": settings.block, "ROWS": settings.rows, "SLICE": slice_of(d, programs)}
    return programs, constants, min(settings.warps, max(1, settings.block // 32))  # no more threads than columns
