"""The first half of an MLP predictor in the grid of q/k/v, from an input whose LayerNorm is late, a few rows a program.

    hidden[r] = act(scale[r] (a <down[r], u> + c gains[r] + shifts[r]))

u (d,) fp16 as kept at the present position, a and c as in `late_norm`. down (rank, ceil(d / 2)) nibbles with a scale a
row (`codes`), gains and shifts (rank,): `norm_sums`. These programs come first in the grid and count themselves when
their values lie in memory. A tile of sixteen rows (`qkv_owned`) would be there as late as a tile of q/k/v is: the
second half would come behind all of these where they run at once. Where they take two rounds, tiles take fewer places.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.lane_queue import as_it_comes
from dejavu_train.kernels.common.late_norm import late_factors
from dejavu_train.kernels.common.launch import count_program, sums_together, wait_for_predecessor
from dejavu_train.kernels.mlp.codes import nibble_floats
from dejavu_train.kernels.mlp.predict import row_values


@triton.constexpr_function
def _block(width, lanes):
    """Bytes of a row that a program reads at once: 8 a thread."""
    return min(8 * lanes, max(16, triton.next_power_of_2(width)))


@triton.jit
def _pieces(w, first, n_rows, columns, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """A piece of each of ROWS rows from `first` on. Of rows beyond the end the last one again."""
    pieces = ()
    for r in tl.static_range(ROWS):
        at = w + tl.minimum(first + r, n_rows - 1).to(tl.int64) * WIDTH
        pieces = pieces + (tl.load(at + columns, mask=columns < WIDTH, other=0),)
    return pieces


@triton.jit
def late_rows(
    pid,
    u,
    position,
    moments,
    estimate,
    factors,
    w,
    scale,
    gains,
    shifts,
    hidden,
    arrived,
    n_rows,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's whole work, its wait included: rows pid * ROWS .. of hidden. u: int32 pairs of (T, d)."""
    WIDTH: tl.constexpr = (D + 1) // 2
    BLOCK: tl.constexpr = _block(WIDTH, L)
    first = pid * ROWS
    columns = tl.arange(0, BLOCK)
    place = tl.load(position)
    own_gains = row_values(gains, first, n_rows, ROWS)
    own_shifts = row_values(shifts, first, n_rows, ROWS)
    own_scales = row_values(scale, first, n_rows, ROWS)
    pieces = _pieces(w, first, n_rows, columns, WIDTH, ROWS)
    row = u.to(tl.pointer_type(tl.float16), bitcast=True) + place.to(tl.int64) * D
    wait_for_predecessor(PDL)
    a, c = late_factors(moments, estimate, EPS, D)
    if pid == 0:
        tl.store(factors + 2 * place, a)
        tl.store(factors + 2 * place + 1, c)
    products = ()
    for _ in tl.static_range(ROWS):
        products = products + (tl.zeros((BLOCK,), tl.float32),)
    both = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, as_it_comes(WIDTH), BLOCK):
        at = begin + columns
        low = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        high = tl.load(row + WIDTH + at, mask=at < D - WIDTH, other=0.0).to(tl.float32)
        both += low + high
        coming = _pieces(w, first, n_rows, at + BLOCK, WIDTH, ROWS)
        more = ()
        for r in tl.static_range(ROWS):
            floats = nibble_floats(pieces[r])
            more = more + (products[r] + floats[0] * low + floats[1] * high,)
        products = more
        pieces = coming
    sums = sums_together(products + (both,), ROWS + 1)
    for r in tl.static_range(ROWS):
        product = 16 * sums[r] - 24 * sums[ROWS]
        value = (a * product + c * own_gains[r] + own_shifts[r]) * own_scales[r]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # keeps a NaN
        tl.store(hidden + first + r, value, mask=first + r < n_rows)
    count_program(arrived)
