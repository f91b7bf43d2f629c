"""A dense matrix times one normalised vector: y[i] = act(sum_j w[i, j] n[j] + bias[i]),  n = LayerNorm(x).

x (1, d) fp32, w (n, d) row-major, y (1, n) fp32. Sums in fp32. Programs stride over the rows, ROWS at a time. The rows
that come next are always on their way before these are summed, the first ones before the wait for the stage before
(weights depend on nothing). x stays in registers, in one-dimensional pieces spread over all threads of a program: a
width such as 7168 is seven pieces of 1024, where two powers of two would pad it to 8192.

GROUP chooses the weights' format: 0 = numbers, else 4-bit words with a scale for GROUP columns, see `int4_row_step`. n
is then rounded to fp16, and rows go sixteen at a time. BLOCK is a piece's columns. Of words, a program's threads, and
ROWS how many pairs of units its queue has room for. WHOLE: there are a multiple of sixteen rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import INTERPRET, check_device, check_rows, check_shape
from dejavu_train.kernels.common.int4_norm import norm_bytes, normalised_units, unit_norms
from dejavu_train.kernels.common.int4_row_step import first_rows, int4_rows_step, pairs_ahead, row_queue_bytes
from dejavu_train.kernels.common.lane_queue import MOST_BYTES, even_room
from dejavu_train.kernels.common.launch import fetches_rows, load_vector, n_sms, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.dense.dense_batch import dense_hidden
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.matrix import Matrix


@dataclass(frozen=True)
class RowSettings:
    """programs: per multiprocessor. rows: of a step. width: columns of a piece of a row, at most."""

    programs: int
    rows: int
    warps: int
    width: int = 1024

    def block(self, d: int) -> int:
        """Columns of a piece of a row of d."""
        return min(self.width, max(16, triton.next_power_of_2(d)))

    def warps_for(self, d: int) -> int:
        """No more threads than a piece has columns: threads that hold the same value would write it to one place."""
        return min(self.warps, max(1, self.block(d) // 32))


def row_settings(d: int) -> RowSettings:
    """Launch settings by width, each swept alone."""
    if d < 2048:
        return RowSettings(4, 2, 4, 512)
    return RowSettings(8, 2, 4, 512) if d <= 4096 else RowSettings(2, 2, 8)


@dataclass(frozen=True)
class Int4RowSettings:
    """programs: per multiprocessor. warps: of one. ahead: pairs of units that a warp's queue has room for, at most.

    A pair is 128 bytes of 16 rows, 2 KB (`int4_row_step`).
    fetched: words of each of a program's first rows that the L2 is asked for behind those, before the wait.
    """

    programs: int
    warps: int
    ahead: int
    fetched: int = 0


def int4_row_settings(d: int) -> Int4RowSettings:
    """Launch settings for 4-bit rows by width, from whole steps (`benchmarks/results/int4_settings.csv`)."""
    if INTERPRET:
        return Int4RowSettings(1, 1, 2)
    return Int4RowSettings(3 if d <= 4096 else 2, 4, 5, 288)


def operands_reference(x: Tensor, ln: LayerNormWeights, weight: Matrix) -> tuple[Tensor, Tensor]:
    """(numbers, LayerNorm(x)) whose product is meant: 4-bit rows meet n in fp16, in fp64 where x is."""
    if weight.format is Format.INT4:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return weight.dense(wide), layer_norm_reference(x, ln, torch.float16).to(wide)
    return weight.numbers, layer_norm_reference(x, ln, weight.numbers.dtype)


def dense_rows_reference(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Matrix,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Plain torch, any batch."""
    numbers, n = operands_reference(x, ln, weight)
    y = torch.nn.functional.linear(n, numbers)
    if bias is not None:
        y = y + bias
    out.copy_(y.relu() if activation == "relu" else y)


@triton.jit
def row_pieces(weight, line, n_rows, c, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows line .. line + ROWS - 1 as a tuple of pieces (BLOCK,), row by row. Rows from n_rows on are not read.

    weight: of D columns, numbers or words of an integer type.
    """
    tiles = ()
    for r in tl.static_range(ROWS):
        width = tl.where(line + r < n_rows, D, 0)
        at = weight + (line + r).to(tl.int64) * D
        for j in tl.static_range((D + BLOCK - 1) // BLOCK):
            column = j * BLOCK + c
            tiles = tiles + (tl.load(at + column, mask=column < width, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def row_product(w, n, r, D: tl.constexpr, BLOCK: tl.constexpr):
    """Each thread's part of the product of row r of the pieces w with the pieces n, fp32 (BLOCK,)."""
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    acc = w[r * STEPS].to(tl.float32) * n[0]
    for j in tl.static_range(1, STEPS):
        acc += w[r * STEPS + j].to(tl.float32) * n[j]
    return acc


@triton.jit
def normalised_vector(
    x, norm_weight, norm_bias, c, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, TYPE: tl.constexpr
):
    """LayerNorm(x) as a tuple of fp32 pieces (BLOCK,), rounded to TYPE in between, zero beyond D."""
    xs = load_vector(x, c, D, BLOCK)
    gains = load_vector(norm_weight, c, D, BLOCK)
    shifts = load_vector(norm_bias, c, D, BLOCK)
    return normalised_pieces(xs, gains, shifts, c, D, BLOCK, EPS, TYPE)


@triton.jit
def normalised_pieces(
    xs, gains, shifts, c, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, TYPE: tl.constexpr
):
    """`normalised_vector` of loaded pieces: the parameters are static, and may be on their way before a wait."""
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    total = xs[0]
    for j in tl.static_range(1, STEPS):
        total += xs[j]
    mean = tl.sum(total, 0) / D
    squares = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STEPS):
        centred = xs[j] - mean
        if (j + 1) * BLOCK > D:
            centred = tl.where(j * BLOCK + c < D, centred, 0.0)
        squares += centred * centred
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + EPS)
    n = ()
    for j in tl.static_range(STEPS):
        value = (xs[j] - mean) * scale * gains[j].to(tl.float32) + shifts[j].to(tl.float32)
        n = n + (value.to(TYPE).to(tl.float32),)
    return n


@triton.jit
def _dense_rows_kernel(
    x,
    norm_weight,
    norm_bias,
    weight,
    scales,
    bias,
    out,
    n_rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    FETCHED: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    if GROUP > 0:
        w, s = first_rows(weight, scales, (tl.program_id(0) * 16, n_rows), c, D // 8, GROUP, ROWS, WHOLE, FETCHED, ROOM)
        norms = unit_norms(norm_weight, norm_bias, c, D // 8, GROUP)
        wait_for_predecessor(PDL)
        n, _, _ = normalised_units(x, norms, c, D // 8, GROUP, EPS)
        step = tl.num_programs(0) * 16
        first_slot = 0
        for begin in range(tl.program_id(0) * 16, n_rows, step):
            values, w, first_slot, s = int4_rows_step(
                w,
                first_slot,
                s,
                n,
                weight,
                scales,
                (begin, n_rows),
                (begin + step, n_rows),
                c,
                D // 8,
                GROUP,
                ROWS,
                WHOLE,
            )
            lines = begin + tl.arange(0, 16)
            if HAS_BIAS:
                values += tl.load(bias + lines, mask=lines < n_rows, other=0.0).to(tl.float32)
            if RELU:
                values = tl.where(values <= 0, 0.0, values)  # keeps a NaN
            tl.store(out + lines, values, mask=lines < n_rows)
    else:
        first = tl.program_id(0) * ROWS
        step = tl.num_programs(0) * ROWS
        w = row_pieces(weight, first, n_rows, c, D, BLOCK, ROWS)
        wait_for_predecessor(PDL)
        n = normalised_vector(x, norm_weight, norm_bias, c, D, BLOCK, EPS, weight.dtype.element_ty)
        for begin in range(first, n_rows, step):
            coming = row_pieces(weight, begin + step, n_rows, c, D, BLOCK, ROWS)
            offsets = ()
            for r in tl.static_range(ROWS):
                if HAS_BIAS:
                    offsets = offsets + (tl.load(bias + begin + r, mask=begin + r < n_rows, other=0.0),)
            for r in tl.static_range(ROWS):
                acc = row_product(w, n, r, D, BLOCK)
                if begin + r < n_rows:
                    value = tl.sum(acc, 0)
                    if HAS_BIAS:
                        value += offsets[r].to(tl.float32)
                    if RELU:
                        value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
                    tl.store(out + begin + r, value)
            w = coming


def row_launch(
    weight: Matrix, n: int, settings: RowSettings | Int4RowSettings | None, device: torch.device
) -> tuple[int, Tensor, Tensor | None, dict[str, int], int]:
    """(grid size, numbers or words, scales, constants, warps) of a kernel that walks over n rows."""
    d = weight.shape[-1]
    if weight.format is not Format.INT4:
        settings = settings or row_settings(d)
        if isinstance(settings, Int4RowSettings):
            raise ValueError("Int4RowSettings are for 4-bit rows")
        grid = min(n_sms(device) * settings.programs, triton.cdiv(n, settings.rows))
        constants = {"BLOCK": settings.block(d), "ROWS": settings.rows}
        constants |= {"GROUP": 0, "WHOLE": 0, "FETCHED": 0, "ROOM": 0}
        return grid, weight.numbers, None, constants, settings.warps_for(d)
    chosen = settings or int4_row_settings(d)
    if not isinstance(chosen, Int4RowSettings):
        raise ValueError("4-bit rows need Int4RowSettings")
    threads = 32 * chosen.warps
    beside = norm_bytes(d // 8, weight.group, chosen.warps)
    ahead = pairs_ahead(d // 8, weight.group, chosen.warps, chosen.ahead, MOST_BYTES - beside)
    constants = {"BLOCK": threads, "ROWS": ahead, "GROUP": weight.group, "WHOLE": int(n % 16 == 0)}
    constants["FETCHED"] = chosen.fetched if fetches_rows(device) else 0
    needed = row_queue_bytes(d // 8, weight.group, threads, ahead) + beside
    constants["ROOM"] = max(0, even_room(chosen.programs, d, fetches_rows(device), needed) - beside)
    grid = min(n_sms(device) * chosen.programs, triton.cdiv(n, 16))
    return grid, weight.words, weight.scales, constants, chosen.warps


def dense_rows(
    x: Tensor,
    ln: LayerNormWeights,
    weight: Matrix,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pdl: bool = False,
    settings: RowSettings | Int4RowSettings | None = None,
) -> None:
    """x (B, d) fp32, weight (n, d), bias (n) or None, activation "none" or "relu" -> out (B, n) fp32.

    One row runs in one kernel, bitwise deterministic. Several as a matrix product, of more than eight with 4-bit rows
    after these were written out in fp16. Errors: shapes, a CPU tensor, an unknown activation. Of 4-bit rows dtypes and
    groups.
    """
    check_device("x", x)
    batch, d = x.shape
    n = weight.shape[0]
    check_rows("weight", weight, (n, d), x)
    check_shape("out", out, batch, n)
    if activation not in ("none", "relu"):
        raise ValueError(f"activation must be none or relu, got {activation}")
    if batch > 1:
        out.copy_(dense_hidden(x, ln, weight, bias, activation, pdl))
        return
    grid, words, scales, constants, warps = row_launch(weight, n, settings, x.device)
    pdl = use_pdl(pdl, x.device)
    _dense_rows_kernel[(grid,)](
        x,
        ln.weight,
        ln.bias,
        words,
        scales,
        x if bias is None else bias,
        out,
        n,
        D=d,
        **constants,
        HAS_BIAS=bias is not None,
        RELU=activation == "relu",
        EPS=ln.eps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
