"""The largest logit of an LM head without reading all of its numbers: a screen in int8, then the rows that can win.

    n = norm(x), rounded to the head's dtype;  logit[v] = sum_j w[v, j] n[j];  wanted: the largest, lowest id first

Columns differ in size, so w[v, j] = w'[v, j] a[j], and n' = n a. Beside its numbers the head has int8 codes c (V, d) of
w' = scale c + e, with a scale a row. The screen multiplies codes by levels of n' = t q + f. Whole q = 128 high + low is
at most 127 * 128, high and low in a byte each (`dp4a`). The screen's logit is scale t (c . q). By Cauchy and Schwarz it
is off by no more than

    |e| |n'| + |scale c| |f|,    | | the Euclidean norm,

and what fp32 sums and the rounding of n add. So each logit has a lower and an upper bound. A token whose upper bound is
below another's lower bound is not the largest. The rows of all others are multiplied as in `dense_rows`, with the same
sums in the same order. The token is that of all logits, bit for bit, and half the LM head's bytes are read.

No bound is taken from rows of `stops`, which may be barred.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly
from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_device, check_dtype, check_shape, require
from dejavu_train.kernels.common.launch import (
    as_dependent,
    joined,
    load_vector,
    n_sms,
    registers_for,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.layer_norm import (
    LayerNormWeights,
    layer_norm_reference,
    norm_vectors,
    normalised_pieces,
)
from dejavu_train.kernels.common.limits import SCREENED_WIDTHS
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.stages.number_rows import row_pieces, row_product
from dejavu_train.kernels.stages.rows import RowSettings

CODES_PER_WORD = 4
LARGEST = 127  # of a code, and of a high level
EPSILON = 2.0**-24  # what one fp32 rounding changes, as a share
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}  # of n, as a share
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float32: 0.0}  # of n, where that share is zero
NORM_ROUNDING = tl.constexpr(128 * EPSILON)  # of a LayerNorm's summands, in both kernels that make one
ROWS_AT_ONCE = 512  # rounded to codes together


@dataclass(frozen=True)
class ScreenSettings(Settings, stage="screen"):
    """programs: per multiprocessor. rows: of a step, a power of two up to 16. warps: of a program.

    A thread has four words of a piece."""

    programs: int
    rows: int
    warps: int

    def block(self, d: int) -> int:
        """Words of a piece of a row. No more threads than it has words of four codes."""
        return min(triton.next_power_of_2(d // CODES_PER_WORD), 128 * self.warps)

    @property
    def registers(self) -> int:
        """Registers of a thread, at most, so that all programs have room."""
        return registers_for(self.programs, self.warps)

    def warps_for(self, d: int) -> int:
        return max(1, min(self.warps, self.block(d) // 32))


@dataclass(frozen=True)
class TokenCandidates:
    """Candidates of the largest logit of one row: values (P,) fp32, ids (P,) int32, the lowest ones of their value.
    -inf and 0 where there is none."""

    values: Tensor
    ids: Tensor

    @classmethod
    def empty(cls, candidates: int, device: torch.device | str) -> "TokenCandidates":
        values = torch.full((candidates,), float("-inf"), device=device, dtype=torch.float32)
        return cls(values, torch.zeros(candidates, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class ScreenedHead:
    """An LM head (V, d) with its screen.

    ln: the norm before it. gain, shift (d,) fp32: of it, times a. words (V, d / 4) int32: four codes each. scales
    (V, 2) fp32: scale, and by how much a screened logit is off at most, as a share of |n'| + steps (|f| + tiny). tiny:
    the norm of what rounding n may lose below fp16's normal numbers, times a. upper (V,), lows (P,) fp32: scratch.
    best: what programs found.
    """

    weight: Tensor
    ln: LayerNormWeights
    gain: Tensor
    shift: Tensor
    words: Tensor
    scales: Tensor
    steps: float
    tiny: float
    upper: Tensor
    lows: Tensor
    best: TokenCandidates
    settings: ScreenSettings

    @classmethod
    def of(cls, weight: Tensor, ln: LayerNormWeights, settings: ScreenSettings | None = None) -> "ScreenedHead":
        """Round weight (V, d), d a multiple of 16, to codes. A row with a NaN keeps it in its error."""
        n, d = weight.shape
        check_shape("weight", weight, n, d)
        check_dtype("weight", weight, FLOAT_TYPES)
        require(d % SCREENED_WIDTHS == 0, f"a screened LM head needs a width that {SCREENED_WIDTHS} divides, got {d}")
        device = weight.device
        parts = [weight[start : start + ROWS_AT_ONCE] for start in range(0, n, ROWS_AT_ONCE)]
        squares = torch.stack([part.float().nan_to_num().square().sum(0) for part in parts]).sum(0)
        sizes = torch.where(squares > 0, (squares / n).sqrt(), 1.0).clamp_min(1e-20)  # a: of columns
        codes = torch.empty(n, d, dtype=torch.int8, device=device)
        scales, errors = (torch.empty(n, 2, device=device, dtype=torch.float32) for _ in range(2))
        for number, given in enumerate(parts):
            rows, part = slice(number * ROWS_AT_ONCE, number * ROWS_AT_ONCE + len(given)), given.float() / sizes
            scale = part.abs().amax(1, keepdim=True).clamp_min(1e-30) / LARGEST
            rounded = (part / scale).round().clamp(-LARGEST, LARGEST)
            codes[rows] = rounded.nan_to_num().to(torch.int8)
            lost, whole = part - rounded * scale, torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
            off = torch.linalg.vector_norm(lost, dim=1, dtype=torch.float64)
            sums = 2 * (d + 64) * EPSILON + ROUNDING[weight.dtype]  # of both logits' sums, of n
            scales[rows, 0] = scale[:, 0]
            errors[rows] = (torch.stack([off + sums * whole, off + whole], 1) * 1.0001 + 1e-30).float()
        settings = settings or ScreenSettings.find("float", device, d=d)
        programs = min(n_sms(device) * settings.programs, triton.cdiv(n, settings.rows))
        best = TokenCandidates.empty(min(2 * n_sms(device), n), device)
        upper, lows = (torch.empty(size, device=device, dtype=torch.float32) for size in (n, programs))
        gain, shift = (given.float() * sizes for given in ln.folded)
        # One share of |f| for all rows: a row whose codes are nearly exact counts as one that loses more.
        steps = 2 * float((errors[:, 1] / errors[:, 0]).nanmedian())
        scales[:, 1] = torch.maximum(errors[:, 0], errors[:, 1] / steps)
        tiny = float(torch.linalg.vector_norm(sizes)) * SMALLEST[weight.dtype]
        return cls(weight, ln, gain, shift, codes.view(torch.int32), scales, steps, tiny, upper, lows, best, settings)

    def rows_read(self) -> int:
        """How many rows of numbers the last step read: those that could win. Waits for it."""
        return int((~(self.upper < self.lows.max())).sum())

    def read_bytes(self) -> int:
        """Bytes of the last step: the screen with its bounds, and those rows. Waits for it."""
        screen = sum(tensor.nbytes for tensor in (self.words, self.scales, self.upper))
        return screen + self.rows_read() * self.weight[0].nbytes


def screened_head_reference(x, head: ScreenedHead, position, least, stops) -> None:
    """Plain torch: all logits, of which the best goes into `head.best`."""
    logits = torch.nn.functional.linear(layer_norm_reference(x, head.ln, head.weight.dtype), head.weight)[0].float()
    bad = bool(logits.isnan().any())
    if int(position[0]) + 1 < int(least[0]):
        logits[stops[stops >= 0].long()] = float("-inf")
    best = head.best
    best.values.fill_(float("-inf"))
    best.ids.fill_(0)
    best.values[0] = float("nan") if bad else logits.max()
    best.ids[0] = int((logits == logits.max()).nonzero()[0]) if not bad else 0


@triton.jit
def dot_of_bytes(words, levels, sums, ASM: tl.constexpr = ASSEMBLY):
    """sums + the product of four signed bytes each, int32."""
    if ASM:
        sums = assembly("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", (words, levels, sums), PURE=True)
    else:
        for i in tl.static_range(4):
            sums += ((words << (24 - 8 * i)) >> 24) * ((levels << (24 - 8 * i)) >> 24)
    return sums


@triton.jit
def _piece(vector, j, c, D: tl.constexpr, BLOCK: tl.constexpr):
    """Values for piece j of a row's words, fp32 (BLOCK, 4): each word's four columns. A thread reads 16 bytes at once.
    Columns of one number each, for four words a thread, took 14 us of a multiprocessor's L1."""
    word = (j * BLOCK + c)[:, None]
    at = vector + 4 * word + tl.arange(0, 4)[None, :]
    return tl.load(at, mask=word < D // 4, other=0.0).to(tl.float32)


@triton.jit
def levels_of(x, norm, c, D: tl.constexpr, BLOCK: tl.constexpr):
    """(high levels, low levels as words, t, |n'|, |f|) of n' = norm(x), with a gain and a shift. Of |f| also what
    fp32 may lose of n'. Gain and shift are loaded when they are needed: with all that else is in registers they would
    cost a multiprocessor one of its programs."""
    STEPS: tl.constexpr = (D // 4 + BLOCK - 1) // BLOCK
    xs = ()
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STEPS):
        xs = xs + (_piece(x, j, c, D, BLOCK),)
        total += tl.sum(xs[j], 1)
    mean = norm.mean(tl.sum(total, 0), D)
    squares = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STEPS):
        centred = tl.where((j * BLOCK + c)[:, None] < D // 4, xs[j] - mean, 0.0)
        squares += tl.sum(centred * centred, 1)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + norm.eps)
    n = ()
    largest = tl.zeros((BLOCK,), tl.float32)
    length = tl.zeros((BLOCK,), tl.float32)
    summands = tl.zeros((BLOCK,), tl.float32)
    off_mean = tl.abs(mean) * rstd + 1.0  # by which an error of the mean is multiplied
    for j in tl.static_range(STEPS):
        inside = (j * BLOCK + c)[:, None] < D // 4
        z = (xs[j] - mean) * rstd
        gains, shifts = _piece(norm.gain, j, c, D, BLOCK), _piece(norm.shift, j, c, D, BLOCK)
        value = tl.where(inside, z * gains + shifts, 0.0)
        size = (tl.abs(z) + off_mean) * tl.abs(gains) + tl.abs(shifts)
        summands += tl.sum(tl.where(inside, size * size, 0.0), 1)
        n = n + (value,)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 1))
        length += tl.sum(value * value, 1)
    t = tl.maximum(tl.max(largest, 0), 1e-30) / (127 * 128)
    place = 8 * tl.arange(0, 4)[None, :]
    high = ()
    low = ()
    rest = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STEPS):
        q = tl.floor(n[j] / t + 0.5).to(tl.int32)
        q = tl.minimum(tl.maximum(q, -127 * 128), 127 * 128)
        off = n[j] - q.to(tl.float32) * t
        rest += tl.sum(off * off, 1)
        high = high + (tl.sum(((q >> 7) & 255) << place, 1),)
        low = low + (tl.sum((q & 127) << place, 1),)
    lost = tl.sqrt(tl.sum(rest, 0)) + NORM_ROUNDING * tl.sqrt(tl.sum(summands, 0))
    return high, low, t, tl.sqrt(tl.sum(length, 0)), lost


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _reversed(number, n):
    """The number below n, a power of two, with its bits in the other order."""
    return int(f"{number:0{n.bit_length() - 1}b}"[::-1], 2)


@triton.jit
def _sums(tiles, N: tl.constexpr):
    """The sums (N,) of N tiles (BLOCK,), a power of two of them, by one reduction.

    `sums_together` splits them into scalars, and what follows here would be done N times."""
    ordered = ()
    for k in tl.static_range(N):
        ordered = ordered + (tiles[_reversed(k, N)],)
    return tl.reshape(tl.sum(joined(ordered, _log2(N)), 0), (N,))


@triton.jit
def _screen_kernel(
    x, norm, words, scales, stops, upper, lows, steps, tiny, n_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, N_STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D // 4
    STEPS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    c = tl.arange(0, BLOCK)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    w = row_pieces(words, first, n_rows, c, W, BLOCK, ROWS)
    wait_for_predecessor(PDL)
    high, low, t, length, rest = levels_of(x, norm, c, D, BLOCK)
    most = (length + steps * (rest + tiny)) * 1.0001  # tiny: n rounded among fp16's smallest numbers
    lines = tl.arange(0, ROWS)
    surest = tl.full((ROWS,), float("-inf"), tl.float32)
    for begin in range(first, n_rows, step):
        coming = row_pieces(words, begin + step, n_rows, c, W, BLOCK, ROWS)
        own = begin + lines
        inside = own < n_rows
        both = tl.load(scales + 2 * own[:, None] + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0.0)
        factor, off = tl.split(both)
        off *= most
        tiles = ()
        for r in tl.static_range(ROWS):
            highs = tl.zeros((BLOCK,), tl.int32)
            lower = tl.zeros((BLOCK,), tl.int32)
            for j in tl.static_range(STEPS):
                highs = dot_of_bytes(w[r * STEPS + j], high[j], highs)
                lower = dot_of_bytes(w[r * STEPS + j], low[j], lower)
            tiles = tiles + ((highs * 128 + lower).to(tl.float32),)
        value = _sums(tiles, ROWS) * (factor * t)
        tl.store(upper + own, value + off, mask=inside)
        surest = tl.maximum(surest, tl.where(inside, value - off, float("-inf")))
        w = coming
    # A program with the row of a token that may be barred takes no bound: that of all others is there.
    sure = tl.max(surest, 0)
    for i in tl.static_range(N_STOPS):
        stop = tl.load(stops + i)
        sure = tl.where((stop >= 0) & (stop // ROWS % tl.num_programs(0) == tl.program_id(0)), float("-inf"), sure)
    tl.store(lows + tl.program_id(0), sure)


@triton.jit
def _rescore_kernel(
    x, norm, weight, upper, lows, position, least, stops, values, ids, n_rows, n_lows,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, LOWS: tl.constexpr, N_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)
    # x and the state are older than the screen's launch: read before the wait, past the L1.
    xs = load_vector(x, c, D, BLOCK, ".cg")
    gains, shifts = norm_vectors(norm, c, D, BLOCK)
    n = normalised_pieces(xs, gains, shifts, norm, c, D, BLOCK, weight.dtype.element_ty)
    early = tl.load(position, cache_modifier=".cg") + 1 < tl.load(least, cache_modifier=".cg")
    strange = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range((D + BLOCK - 1) // BLOCK):
        strange += n[j] * 0.0
    finite = tl.sum(strange, 0) == 0.0
    wait_for_predecessor(PDL)
    each = tl.arange(0, LOWS)
    floor = tl.max(tl.load(lows + each, mask=each < n_lows, other=float("-inf")), 0)
    floor = tl.where(finite, floor, float("-inf"))  # where n overflows, when it is rounded, no bound holds: all rows
    per_program = (n_rows + tl.num_programs(0) - 1) // tl.num_programs(0)
    lines = tl.program_id(0) * per_program + tl.arange(0, CHUNK)
    inside = (tl.arange(0, CHUNK) < per_program) & (lines < n_rows)
    bound = tl.load(upper + lines, mask=inside, other=float("-inf"))
    waiting = inside & ((bound >= floor) | (bound != bound))
    best = float("-inf")
    best_id = 0  # of programs without a candidate, and where all tokens are barred
    bad = floor != floor  # never: a scalar that is false
    line = tl.min(tl.where(waiting, lines, n_rows), 0)
    while line < n_rows:
        w = row_pieces(weight, line, n_rows, c, D, BLOCK, 1)
        waiting = waiting & (lines > line)
        coming = tl.min(tl.where(waiting, lines, n_rows), 0)
        value = tl.sum(row_product(w, n, 0, D, BLOCK), 0)
        bad |= value != value
        barred = line < 0  # a scalar that is false
        for i in tl.static_range(N_STOPS):
            barred |= tl.load(stops + i) == line
        better = (value > best) & ((barred & early) == 0)
        best = tl.where(better, value, best)
        best_id = tl.where(better, line, best_id)
        line = coming
    tl.store(values + tl.program_id(0), tl.where(bad, float("nan"), best))
    tl.store(ids + tl.program_id(0), best_id)


def screened_head(
    x: Tensor, head: ScreenedHead, position: Tensor, least: Tensor, stops: Tensor, pdl: bool = False
) -> None:
    """x (1, d) fp32 -> `head.best`: the largest logit and its token, a pair a program, for `sampling.advance`.

    position, least (1,), stops (K,) int32: of `sampling.TokenState`. x and these are older than this call.
    """
    check_device("x", x)
    (n, d), ln = head.weight.shape, head.ln
    check_shape("x", x, 1, d)
    check_shape("position", position, 1)
    check_shape("least", least, 1)
    dependent = as_dependent(pdl, x.device)
    settings, rows = head.settings, RowSettings.find("float", x.device, d=d)
    n_stops = stops.shape[0]
    _screen_kernel[(head.lows.numel(),)](
        x, ln.args()._replace(gain=head.gain, shift=head.shift), head.words, head.scales, stops, head.upper, head.lows,
        head.steps, head.tiny, n, D=d, BLOCK=settings.block(d), ROWS=settings.rows, N_STOPS=n_stops,
        num_warps=settings.warps_for(d), maxnreg=settings.registers, **dependent,
    )  # fmt: skip
    programs = head.best.values.numel()
    _rescore_kernel[(programs,)](
        x, ln.args(), head.weight, head.upper, head.lows, position, least, stops,
        head.best.values, head.best.ids, n, head.lows.numel(),
        D=d, BLOCK=rows.block(d), CHUNK=triton.next_power_of_2(triton.cdiv(n, programs)),
        LOWS=triton.next_power_of_2(head.lows.numel()), N_STOPS=n_stops,
        num_warps=rows.warps_for(d), **dependent,
    )  # fmt: skip
