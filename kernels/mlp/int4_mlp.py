"""fc1 and fc2 over a packed list in one grid with 4-bit weights, one token:

    out[j] = residual[j] + b2[j] + sum_k h[k] w2_t[ids[k], j],   h[k] = relu(sum_j w1[ids[k], j] n[j] + b1[ids[k]])

n = LayerNorm(x), rounded to fp16, or x itself. x (1, d) fp32 (fp16 without a LayerNorm). w1, w2_t (n, d), of w2_t
columns are outputs. A program takes its part of the list, neighbours whose rows lie on few pages of memory, sixteen at
a time, as the tensor cores want them in both products. A dense step is the list of all rows, where `int4_fc2` does
not say otherwise.

fc1: sixteen rows of a list are multiplied as those of a matrix are (`int4_row_step`), a program's warps sharing out the
columns. The rows with h other than zero, and h, go into a list in shared memory (`shared_rows`).
fc2: neurons lie along K, as in `int4_fc2`, sixteen of that list at a time, h * scale * 64 rounded to fp16, products
with the codes exact, sums in fp32: |h * scale| must stay below 1023, or sums are NaN. A warp has stripes of 8
lane groups' columns. What takes a multiprocessor's time there is not the products but a program's sums, of which it
has all d: each is one of eight columns of C, the others being those of other lane groups' scales. So as many stripes as
lane groups share a scale (T) have their factors in different columns of B, and their sums in one C: of stripe s in
columns A s to A s + A - 1, A = 8 / T, one for each scale of a stripe. A program's sum is rounded to fp16, and must stay
below 65504. `add_partials` adds them up in a fixed order.

What is known before the wait for the stage before is read there: x, where a launch before that one made it (EARLY_X,
the predictor normalised it), or the list and its first rows (EARLY_LIST, a look-ahead predictor).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import INTERPRET, check_dtype, check_int4, check_shape, require
from dejavu_train.kernels.common.int4_mma import fp16_pairs
from dejavu_train.kernels.common.int4_neurons import (
    factor_pairs,
    factor_sums,
    fc2_products,
    lane_places,
    nibble_unit,
    store_four,
)
from dejavu_train.kernels.common.int4_norm import norm_bytes, normalised_units, unit_norms, unit_pairs
from dejavu_train.kernels.common.int4_row_step import first_rows, int4_rows_step, pairs_ahead, rows_of_list
from dejavu_train.kernels.common.int4_tiles import FACTOR_UNIT
from dejavu_train.kernels.common.lane_queue import after_slot, as_it_comes, ask, at_slot, emptied, take
from dejavu_train.kernels.common.late_norm import LateNorm
from dejavu_train.kernels.common.launch import use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.common.shared_rows import append_rows, four_rows, rows_list
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.mlp.pack import PackedSelection
from dejavu_train.kernels.mlp.sparse_mlp import check_mlp

ROWS = tl.constexpr(16)  # of a step
QUEUE_BYTES = 40 * 1024  # of shared memory for words and LayerNorm: a list of rows and sums have the rest of 48 KB
MOST_ROWS = 384  # of a program, live or not, for which its list has room: 3 KB


@dataclass(frozen=True)
class Int4MlpSettings:
    """programs: grid size, at most `most_splits`. warps: of one. ahead: pairs of units of fc1 that a warp's queue has
    room for, at most. registers: of a thread, at most."""

    programs: int
    warps: int
    ahead: int
    registers: int


def int4_mlp_settings(d: int) -> Int4MlpSettings:
    """Launch settings by width, from whole steps (`benchmarks/results/int4_settings.csv`): a program for each of 132
    multiprocessors, or two, of which one multiplies while the other has barriers. Up to 5120 two would have half a
    step each.
    """
    if INTERPRET:
        return Int4MlpSettings(3, 1, 2, 255)
    return Int4MlpSettings(132, 8, 2, 168) if d <= 5120 else Int4MlpSettings(264, 4, 4, 200 if d <= 9216 else 224)


@triton.constexpr_function
def lane_vector(words):
    """Neighbouring words of fc2's rows that a lane reads at once."""
    return 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1


@triton.constexpr_function
def sharing(words, group):
    """T: 1, 2 or 4 neighbouring lane groups of a row that share a scale."""
    if group == 8 * words:
        return 4
    groups = group // (8 * lane_vector(words))
    return 4 if groups % 4 == 0 else 2 if groups % 2 == 0 else 1


@triton.constexpr_function
def stripes_of(words, warps):
    """Stripes of each warp, some of them beyond the row's end perhaps."""
    return -(-words // (8 * lane_vector(words) * warps))


@triton.constexpr_function
def slot_bytes(words, warps):
    """Shared memory of a stripe's words on their way: four rows of each lane."""
    return 32 * warps * 16 * lane_vector(words)


@triton.constexpr_function
def passes_of(words, group, warps):
    """How often a program goes over its list, with other columns each time: their sums share a C, their words room."""
    return -(-stripes_of(words, warps) // min(sharing(words, group), QUEUE_BYTES // slot_bytes(words, warps)))


@triton.constexpr_function
def slots_of(words, group, warps):
    """Stripes of each warp in a pass."""
    return -(-stripes_of(words, warps) // passes_of(words, group, warps))


@triton.jit
def _item(listed, held, unit, number, scales, lane, W: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr):
    """Of a lane's rows 4 t .. 4 t + 3 of sixteen of the list, for pass `number`: the four row numbers, whether these
    are there, their h, and their scales of the stripe whose column of B is the lane's."""
    V: tl.constexpr = lane_vector(W)
    WARPS: tl.constexpr = lane.shape[0] // 32
    T: tl.constexpr = sharing(W, GROUP)
    SLOTS: tl.constexpr = slots_of(W, GROUP, WARPS)
    g = lane % 32 // 4
    t = lane % 4
    four = four_rows(listed, unit * 4 + t, CAPACITY)
    left = held - 16 * unit - 4 * t
    slot = g // (8 // T)
    stripe = (number * SLOTS + slot) * WARPS + lane // 32
    word = stripe * (8 * V) + g % (8 // T) * (T * V)
    inside = (slot < SLOTS) & (word < W)
    numbers = ()
    there = ()
    h = ()
    found = ()
    for j in tl.static_range(4):
        own = left > j
        there = there + (own,)
        number_of = tl.where(own, four[j], 0)  # beyond the end there may be anything
        numbers = numbers + (number_of,)
        h = h + (tl.where(own, four[4 + j], 0.0),)
        at = scales + number_of.to(tl.int64) * (8 * W // GROUP) + word * 8 // GROUP
        found = found + (tl.load(at, mask=own & inside, other=0.0).to(tl.float32),)
    return numbers + there + h + found


@triton.jit
def _ask_slot(queue, words, item, word, place, W: tl.constexpr, V: tl.constexpr):
    """The queue with a lane's words of its four rows of an `_item`, from `word` of each on, on their way in slot 0."""
    at = ()
    there = ()
    for j in tl.static_range(4):
        at = at + (words + item[j].to(tl.int64) * W + word,)
        there = there + (item[4 + j] & (word < W),)
    queue = ask(queue, place, at[0], at[1], there[0], there[1], 0, V, True, LATE=True)
    return ask(queue, place, at[2], at[3], there[2], there[3], 1, V, True, LATE=True)


@triton.jit
def _sums_of_columns(
    queue, words, scales, listed, held, to, lane, W: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr
):
    """fc2 of the `held` rows of the list, whose sums are stored as fp16 at `to` (8 W,). queue: an empty one."""
    V: tl.constexpr = lane_vector(W)
    L: tl.constexpr = lane.shape[0]
    WARPS: tl.constexpr = L // 32
    T: tl.constexpr = sharing(W, GROUP)
    A: tl.constexpr = 8 // T  # scales of a stripe
    PASSES: tl.constexpr = passes_of(W, GROUP, WARPS)
    SLOTS: tl.constexpr = slots_of(W, GROUP, WARPS)
    STRIDE: tl.constexpr = WARPS * 8 * V  # words from one slot's stripe to the next
    g = lane % 32 // 4
    t = lane % 4
    place = lane_places(lane)
    begin = lane // 32 * (8 * V) + g * V  # a lane's words of the first stripe
    units = (held + 15) // 16
    item = _item(listed, held, 0, 0, scales, lane, W, GROUP, CAPACITY)
    for k in tl.static_range(SLOTS):
        own = at_slot(queue, k, slot_bytes(W, WARPS))
        queue = after_slot(queue, _ask_slot(own, words, item, begin + k * STRIDE, place, W, V))
    zero = tl.zeros((L,), tl.float32)
    for number in range(0, as_it_comes(PASSES)):
        acc = ()
        for _ in tl.static_range(16 * V):
            acc = acc + (zero,)
        ones = (zero, zero, zero, zero)
        for unit in range(0, units):
            b0, b1 = factor_pairs(item[12:], item[8:12])
            ones = factor_sums(ones, b0, b1)
            # The next sixteen rows, or the first ones for the next pass.
            more = unit + 1 < units
            next_number = tl.where(more, number, number + 1)
            left = tl.where(next_number < PASSES, held, 0)
            item = _item(listed, left, tl.where(more, unit + 1, 0), next_number, scales, lane, W, GROUP, CAPACITY)
            for slot in range(0, as_it_comes(SLOTS)):
                own = at_slot(queue, slot, slot_bytes(W, WARPS))
                w01, own = take(own, place, 0, V, 2 * SLOTS - 1)
                w23, own = take(own, place, 1, V, 2 * SLOTS - 2)
                mine = g // A == slot
                f0 = tl.where(mine, b0, 0)
                f1 = tl.where(mine, b1, 0)
                for v in tl.static_range(V):
                    acc = acc[16:] + fc2_products(acc[:16], (w01[v], w01[V + v], w23[v], w23[V + v]), f0, f1)
                own = _ask_slot(own, words, item, begin + (next_number * SLOTS + slot) * STRIDE, place, W, V)
                queue = after_slot(queue, own)
        # Of C[g, n] that column n is meant whose scale is lane group g's: n = A s + g // T of stripe s.
        own_slot = t // (A // 2)
        word = ((number * SLOTS + own_slot) * WARPS + lane // 32) * (8 * V) + g * V
        meant = (own_slot < SLOTS) & (t % (A // 2) == g // T // 2) & (word < W)
        odd = g // T % 2 != 0
        raised = tl.where(odd, ones[1], ones[0]) * (8.0 / FACTOR_UNIT)
        pairs = ()
        for i in tl.static_range(4 * V):
            both = ()
            for parity in tl.static_range(2):  # columns 2 i and 2 i + 1 of a lane group
                first = acc[16 * (i // 4) + 8 * parity + 2 * (i % 4)]
                second = acc[16 * (i // 4) + 8 * parity + 2 * (i % 4) + 1]
                total = tl.where(odd, second, first) * (1 / (nibble_unit(i % 4) * FACTOR_UNIT))
                both = both + (total - raised,)
            pairs = pairs + (fp16_pairs(both[0], both[1]).to(tl.float32, bitcast=True),)
        for v in tl.static_range(V):
            store_four(
                to.to(tl.pointer_type(tl.float32), bitcast=True) + 4 * (word + v), pairs[4 * v : 4 * v + 4], meant
            )


@triton.jit(do_not_specialize=["last"])
def _int4_mlp_kernel(
    x,
    norm_weight,
    norm_bias,
    w1,
    scales1,
    b1,
    w2,
    scales2,
    ids,
    count,
    partials,
    estimate,
    moments,
    last,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    AHEAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    NORM: tl.constexpr,
    EARLY_X: tl.constexpr,
    EARLY_LIST: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = D // 8
    ROOM: tl.constexpr = slots_of(W, GROUP, L // 32) * slot_bytes(W, L // 32)  # of fc2's words
    pid = tl.program_id(0)
    lane = tl.arange(0, L)
    listed = rows_list(pid, CAPACITY)
    if EARLY_X:
        n = unit_pairs(x, lane, W, GROUP, ".cg")
    if not EARLY_LIST:
        if NORM:
            norms = unit_norms(norm_weight, norm_bias, lane, W, GROUP)
        wait_for_predecessor(PDL)
    number = tl.load(count, cache_modifier=".cg")
    each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = pid * each
    end = tl.minimum(number, begin + each)
    rows = rows_of_list(ids, begin, end, last, lane)
    queue, s = first_rows(
        w1, scales1, rows, lane, W, GROUP, AHEAD, False, 0, ROOM, LISTED=True
    )  # fmt: skip
    if EARLY_LIST:
        if NORM:
            norms = unit_norms(norm_weight, norm_bias, lane, W, GROUP)
        wait_for_predecessor(PDL)
    if NORM:
        n, mean, rstd = normalised_units(x, norms, lane, W, GROUP, EPS)
        if estimate is not None:
            if pid == 0:
                tl.store(estimate, mean)
                tl.store(estimate + 1, rstd)
                tl.store(moments, 0)
                tl.store(moments + 1, 0)
    elif not EARLY_X:
        n = unit_pairs(x, lane, W, GROUP)
    held = 0
    slot = 0
    for first in range(begin, end, 16):
        entries = first + tl.arange(0, ROWS)
        own = tl.load(ids + tl.minimum(entries, last), cache_modifier=".cg")
        offsets = tl.load(b1 + own).to(tl.float32)
        next_rows = rows_of_list(ids, first + 16, end, last, lane)
        values, queue, slot, s = int4_rows_step(
            queue, slot, s, n, w1, scales1, rows, next_rows, lane, W, GROUP, AHEAD, False, LISTED=True
        )
        values += offsets
        values = tl.where((values <= 0) | (entries >= end), 0.0, values)  # keeps a NaN
        listed, held = append_rows(listed, held, own, values, values != 0, CAPACITY)
        rows = next_rows
    queue = emptied(queue, lane)
    tl.debug_barrier()  # the list is written, and no warp reads words of fc1 any more
    _sums_of_columns(queue, w2, scales2, listed, held, partials + pid * D, lane, W, GROUP, CAPACITY)


def int4_mlp_partials(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    rows: PackedSelection,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
    settings: Int4MlpSettings | None = None,
    late: LateNorm | None = None,
) -> tuple[Tensor, int]:
    """(partial sums in fp16, how many of them) whose sum with residual and fc2's bias is `int4_mlp`.

    late: of what the sum will be. Its estimate is made here, which is that
    of x, with a LayerNorm, and its moments are set to zero.
    """
    n, d = check_mlp(x, ln, weights, rows, early)
    check_dtype("x", x, (torch.float16 if ln is None else torch.float32,))
    w1 = check_int4("fc1.weight", weights.up.weight, (n, d), x)
    w2 = check_int4("fc2.weight", weights.down.weight, (n, d), x)
    require(w1.group == w2.group, f"fc1 and fc2 must have groups of one size, not {w1.group} and {w2.group}")
    require(late is None or ln is not None, "there is nothing to estimate where x is normalised already")
    settings = settings or int4_mlp_settings(d)
    most = most_splits(x.device)
    programs = min(max(settings.programs, triton.cdiv(n, MOST_ROWS)), most)
    if partials is None:
        partials = partial_sums(d, x.device)
    check_shape("partials", partials, most, d)
    partials = partials.view(torch.float16)
    capacity = ROWS.value * triton.cdiv(n, ROWS.value * programs)
    room = QUEUE_BYTES - (norm_bytes(d // 8, w1.group, settings.warps) if ln is not None else 0)
    require(capacity <= MOST_ROWS, f"{n} neurons: at most {MOST_ROWS * most}, which {most} lists hold")
    _int4_mlp_kernel[(programs,)](
        x if ln is not None else x.view(torch.int32),
        None if ln is None else ln.weight,
        None if ln is None else ln.bias,
        w1.words,
        w1.scales,
        weights.up.bias,
        w2.words,
        w2.scales,
        rows.ids,
        rows.count,
        partials,
        None if late is None else late.estimate,
        None if late is None else late.moments,
        n - 1,
        D=d,
        GROUP=w1.group,
        L=32 * settings.warps,
        AHEAD=pairs_ahead(d // 8, w1.group, settings.warps, settings.ahead, room),
        CAPACITY=capacity,
        NORM=ln is not None,
        EARLY_X=early == "x",
        EARLY_LIST=early == "list",
        EPS=1e-5 if ln is None else ln.eps,
        PDL=pdl,
        num_warps=settings.warps,
        maxnreg=settings.registers,
        launch_pdl=pdl,
    )
    return partials, programs


def int4_mlp(
    x: Tensor,
    ln: LayerNormWeights | None,
    weights: MlpWeights,
    residual: Tensor,
    rows: PackedSelection,
    out: Tensor,
    partials: Tensor | None = None,
    early: str | None = None,
    pdl: bool = False,
    settings: Int4MlpSettings | None = None,
) -> None:
    """Reads rows.ids and rows.count. residual and out (1, d) fp32. Bitwise deterministic. See the module's docstring.

    early: what was written before the launch before this one: "x" (without a LayerNorm here), "list", or None.
    Errors: shapes, dtypes, groups, a CPU tensor.
    """
    pdl = use_pdl(pdl, out.device)
    check_shape("residual", residual, *x.shape)
    check_shape("out", out, *x.shape)
    sums = int4_mlp_partials(x, ln, weights, rows, partials, early, pdl, settings)
    add_partials(*sums, weights.down.bias, residual, out, pdl)
