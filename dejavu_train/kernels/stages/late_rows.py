"""The first half of an MLP's predictor in the grid of q/k/v, from an input whose norm comes late (`late_norm`).

    hidden[r] = act(scale[r] (a <w[r], u> + c gains[r] + shifts[r]))

u (d,) fp16 as kept at the present position, w (rank, ceil(d / 2)) nibbles, gains, shifts and scales as in `predict`.
These programs have a few rows each, come first in the grid, and count themselves when their values lie in memory. A
tile of sixteen rows (`qkv_owned`) would be there as late as a tile of q/k/v is. The second half would come behind all
of these where they run at once. Where they take two rounds, tiles take fewer places.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.lane_queue import as_it_comes
from dejavu_train.kernels.common.late_norm import late_factors
from dejavu_train.kernels.common.launch import count_program, sums_together, wait_for_predecessor
from dejavu_train.kernels.formats.codes import nibble_floats
from dejavu_train.kernels.stages.predict import RowSizes, row_values, store_hidden


def late_sizes(d: int, rows: int, lanes: int, relu: bool) -> RowSizes:
    """Constants of `late_rows`: a thread reads 8 bytes of a row at once."""
    return RowSizes(d, min(8 * lanes, max(16, triton.next_power_of_2((d + 1) // 2))), rows, 0, relu=relu)


@triton.jit
def _row_pieces(rows, first, n_rows, columns, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """A piece of each of ROWS rows from `first` on. Of rows beyond the end the last one again."""
    pieces = ()
    for r in tl.static_range(ROWS):
        at = rows + tl.minimum(first + r, n_rows - 1).to(tl.int64) * WIDTH
        pieces = pieces + (tl.load(at + columns, mask=columns < WIDTH, other=0),)
    return pieces


@triton.jit
def late_rows(
    pid, u, position, late, down, n_rows, S: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, PDL: tl.constexpr
):
    """A program's whole work, its wait included: hidden from pid * S.rows on. u: int32 pairs of (T, d). late: as in
    `qkv_owned`, and so is down, of nibbles."""
    WIDTH: tl.constexpr = (S.d + 1) // 2
    first = pid * S.rows
    columns = tl.arange(0, S.block)
    place = tl.load(position)
    own_gains = row_values(down.gains, first, n_rows, S.rows)
    own_shifts = row_values(down.shifts, first, n_rows, S.rows)
    own_scales = row_values(down.scale, first, n_rows, S.rows)
    pieces = _row_pieces(down.weight, first, n_rows, columns, WIDTH, S.rows)
    row = u.to(tl.pointer_type(tl.float16), bitcast=True) + place.to(tl.int64) * S.d
    wait_for_predecessor(PDL)
    a, c = late_factors(late.moments, late.estimate, EPS, CENTRED, S.d)
    if pid == 0:
        tl.store(late.factors + 2 * place, a)
        tl.store(late.factors + 2 * place + 1, c)
    products = ()
    for _ in tl.static_range(S.rows):
        products = products + (tl.zeros((S.block,), tl.float32),)
    both = tl.zeros((S.block,), tl.float32)
    for begin in range(0, as_it_comes(WIDTH), S.block):
        at = begin + columns
        low = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        high = tl.load(row + WIDTH + at, mask=at < S.d - WIDTH, other=0.0).to(tl.float32)
        both += low + high
        coming = _row_pieces(down.weight, first, n_rows, at + S.block, WIDTH, S.rows)
        more = ()
        for r in tl.static_range(S.rows):
            floats = nibble_floats(pieces[r])
            more = more + (products[r] + floats[0] * low + floats[1] * high,)
        products = more
        pieces = coming
    sums = sums_together(products + (both,), S.rows + 1)
    values = ()
    for r in tl.static_range(S.rows):
        values = values + (a * (16 * sums[r] - 24 * sums[S.rows]) + c * own_gains[r] + own_shifts[r],)
    store_hidden(values, own_scales, down, first, n_rows, S)
    count_program(down.arrived)
