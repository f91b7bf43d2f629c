"""Neurons of 4-bit words: how the MLP of one token multiplies those of a list.

First products: sixteen rows of a list are multiplied as those of a matrix are (`int4_rows`), a program's warps
sharing out the columns. Its part of the list are neighbours, whose rows lie on few pages of memory. The rows whose
value is not zero, and the values, go into a list in shared memory (`shared_rows`). Behind a gate, up's rows of that
list are multiplied alike, and the list is written anew in its own place. A step's entries are read before its
reduction, and written behind it.

Down: neurons lie along K, as in `int4_fc2`, sixteen of that list at a time. h * scale * 64 is rounded to fp16, products
with the codes are exact, sums are fp32. So |h * scale| must stay below 1023, or sums are NaN. A squared ReLU's values
are kept times 2^-6 (`unit`). A warp has stripes of 8 lane groups' columns. What takes a
multiprocessor's time there is not the products but a program's sums, of which it has all d. Each is one of eight
columns of C, the others being those of other lane groups' scales. So T stripes share one C, where T lane groups share a
scale: their factors lie in different columns of B. A stripe has A = 8 / T scales. The sums of stripe s lie in
columns A s to A s + A - 1. A program's sum is rounded to fp16, and must stay below 65504.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_dtype, check_int4, require
from dejavu_train.kernels.common.int4_mma import fp16_pairs, pairs_of_a_warp, unit_vector
from dejavu_train.kernels.common.int4_neurons import (
    factor_pairs,
    factor_sums,
    fc2_products,
    lane_places,
    nibble_unit,
    store_four,
)
from dejavu_train.kernels.common.int4_norm import norm_bytes, normalised_units, unit_norms, unit_pairs
from dejavu_train.kernels.common.int4_tiles import FACTOR_UNIT
from dejavu_train.kernels.common.lane_queue import after_slot, as_it_comes, ask, at_slot, emptied, listed_row, take
from dejavu_train.kernels.common.launch import THROUGH_L1, n_sms
from dejavu_train.kernels.common.partial_sums import most_splits
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.common.shared_rows import append_rows, four_rows, one_row, rows_list, written_anew
from dejavu_train.kernels.formats.matrix import MlpWeights
from dejavu_train.kernels.stages.int4_rows import (
    Int4Form,
    ask_first_rows,
    first_rows,
    int4_rows_step,
    new_queue,
    pairs_ahead,
    rows_of_list,
    with_offsets,
)
from dejavu_train.kernels.stages.listed import ListedLaunch, keyed

ROWS = tl.constexpr(16)  # of a step
QUEUE_BYTES = 40 * 1024  # of shared memory for words and LayerNorm: a list of rows and sums have the rest of 48 KB
MOST_ROWS = 384  # of a program, live or not, for which its list has room: 3 KB


@dataclass(frozen=True)
class Int4MlpSettings(Settings, stage="listed_int4"):
    """programs: of a multiprocessor. warps: of one. ahead: pairs of units of the first matrix that a warp's queue has
    room for, at most. registers: of a thread, at most.

    Of two programs one multiplies while the other has barriers. Narrow rows would give two half a step each.
    """

    programs: int
    warps: int
    ahead: int
    registers: int


@triton.constexpr_function
def lane_vector(words):
    """Neighbouring words of fc2's rows that a lane reads at once."""
    return 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1


@triton.constexpr_function
def sharing(words, group):
    """T, a power of two up to 4: how many neighbouring lane groups of a row share a scale."""
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
def _item(listed, held, unit, number, scales, lane, how: tl.constexpr):
    """Values that a lane needs of its rows 4 t .. 4 t + 3 of sixteen of the list, for pass `number`.

    The four row numbers, whether these are there, and their h. Their scales of the stripe whose column of B is the
    lane's."""
    V: tl.constexpr = lane_vector(how.words)
    WARPS: tl.constexpr = lane.shape[0] // 32
    T: tl.constexpr = sharing(how.words, how.group)
    SLOTS: tl.constexpr = slots_of(how.words, how.group, WARPS)
    g = lane % 32 // 4
    t = lane % 4
    four = four_rows(listed, unit * 4 + t, how.capacity)
    left = held - 16 * unit - 4 * t
    slot = g // (8 // T)
    stripe = (number * SLOTS + slot) * WARPS + lane // 32
    word = stripe * (8 * V) + g % (8 // T) * (T * V)
    inside = (slot < SLOTS) & (word < how.words)
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
        at = scales + number_of.to(tl.int64) * (8 * how.words // how.group) + word * 8 // how.group
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
def _sums_of_columns(queue, words, scales, listed, held, to, lane, how: tl.constexpr):
    """Down of the `held` rows of the list, whose sums are stored as fp16 at `to` (8 W,). queue: an empty one."""
    V: tl.constexpr = lane_vector(how.words)
    L: tl.constexpr = lane.shape[0]
    WARPS: tl.constexpr = L // 32
    T: tl.constexpr = sharing(how.words, how.group)
    A: tl.constexpr = 8 // T  # scales of a stripe
    PASSES: tl.constexpr = passes_of(how.words, how.group, WARPS)
    SLOTS: tl.constexpr = slots_of(how.words, how.group, WARPS)
    STRIDE: tl.constexpr = WARPS * 8 * V  # words from one slot's stripe to the next
    g = lane % 32 // 4
    t = lane % 4
    place = lane_places(lane)
    begin = lane // 32 * (8 * V) + g * V  # a lane's words of the first stripe
    units = (held + 15) // 16
    item = _item(listed, held, 0, 0, scales, lane, how)
    for k in tl.static_range(SLOTS):
        own = at_slot(queue, k, slot_bytes(how.words, WARPS))
        queue = after_slot(queue, _ask_slot(own, words, item, begin + k * STRIDE, place, how.words, V))
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
            item = _item(listed, left, tl.where(more, unit + 1, 0), next_number, scales, lane, how)
            for slot in range(0, as_it_comes(SLOTS)):
                own = at_slot(queue, slot, slot_bytes(how.words, WARPS))
                w01, own = take(own, place, 0, V, 2 * SLOTS - 1)
                w23, own = take(own, place, 1, V, 2 * SLOTS - 2)
                mine = g // A == slot
                f0 = tl.where(mine, b0, 0)
                f1 = tl.where(mine, b1, 0)
                for v in tl.static_range(V):
                    acc = acc[16:] + fc2_products(acc[:16], (w01[v], w01[V + v], w23[v], w23[V + v]), f0, f1)
                own = _ask_slot(own, words, item, begin + (next_number * SLOTS + slot) * STRIDE, place, how.words, V)
                queue = after_slot(queue, own)
        # Of C[g, n] that column n is meant whose scale is lane group g's: n = A s + g // T of stripe s.
        own_slot = t // (A // 2)
        word = ((number * SLOTS + own_slot) * WARPS + lane // 32) * (8 * V) + g * V
        meant = (own_slot < SLOTS) & (t % (A // 2) == g // T // 2) & (word < how.words)
        odd = g // T % 2 != 0
        raised = tl.where(odd, ones[1], ones[0]) * (8.0 / (FACTOR_UNIT * how.unit))
        pairs = ()
        for i in tl.static_range(4 * V):
            both = ()
            for parity in tl.static_range(2):  # columns 2 i and 2 i + 1 of a lane group
                first = acc[16 * (i // 4) + 8 * parity + 2 * (i % 4)]
                second = acc[16 * (i // 4) + 8 * parity + 2 * (i % 4) + 1]
                total = tl.where(odd, second, first) * (1 / (nibble_unit(i % 4) * FACTOR_UNIT * how.unit))
                both = both + (total - raised,)
            pairs = pairs + (fp16_pairs(both[0], both[1]).to(tl.float32, bitcast=True),)
        for v in tl.static_range(V):
            store_four(
                to.to(tl.pointer_type(tl.float32), bitcast=True) + 4 * (word + v), pairs[4 * v : 4 * v + 4], meant
            )


@triton.jit
def _int4_share(how: tl.constexpr, number):
    each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    return begin, tl.minimum(number, begin + each), 16


@triton.jit
def _int4_read_input(how: tl.constexpr, x, lane, CACHE: tl.constexpr = THROUGH_L1):
    return with_offsets(unit_pairs(x, lane, how.words, how.group, CACHE), how.form)


@triton.jit
def _int4_read_norm(how: tl.constexpr, norm, lane):
    return unit_norms(norm, lane, how.words, how.group)


@triton.jit
def _int4_normalise(how: tl.constexpr, x, norms, norm, lane):
    planes, mean, rstd = normalised_units(x, norms, norm, lane, how.words, how.group)
    return with_offsets(planes, how.form), mean, rstd


@triton.jit
def _int4_first_rows(how: tl.constexpr, first, ids, begin, end, last, lane):
    """(queue, scales, rows): of fc2's words as well."""
    rows = rows_of_list(ids, begin, end, last, lane)
    queue, s = first_rows(first.parts[0], first.parts[1], rows, lane, how.form)
    return queue, s, rows


@triton.jit
def _int4_begin(how: tl.constexpr, coming, gate, up, down, lane):
    """(queue, its first slot, scales, rows, the list, how many it holds, rows of its next step)."""
    return coming[0], 0, coming[1], coming[2], rows_list(tl.program_id(0), how.capacity), 0, tl.zeros((16,), tl.int32)


@triton.jit
def _int4_products(how: tl.constexpr, state, gate, up, n, ids, entry, end, last, lane):
    queue, slot, s, rows, listed, held, _ = state
    first = gate if gate is not None else up
    entries = entry + tl.arange(0, ROWS)
    own = tl.load(ids + tl.minimum(entries, last), cache_modifier=".cg")
    offsets = tl.load(first.bias + own).to(tl.float32)
    next_rows = rows_of_list(ids, entry + 16, end, last, lane)
    values, queue, slot, s = int4_rows_step(
        queue, slot, s, n, first.parts[0], first.parts[1], rows, next_rows, lane, how.form
    )
    return (values + offsets,), (entries < end,), (queue, slot, s, next_rows, listed, held, own)


@triton.jit
def _int4_add(how: tl.constexpr, state, values, gate, up, down, act: tl.constexpr, lane):
    queue, slot, s, rows, listed, held, own = state
    listed, held = append_rows(listed, held, own, values[0] * how.unit, values[0] != 0, how.capacity)
    return queue, slot, s, rows, listed, held, own


@triton.jit
def _rows_held(how: tl.constexpr, listed, held, first, lane):
    """`rows_of_list` of the list in shared memory."""
    numbers = ()
    there = ()
    for k in tl.static_range(6):
        entry = first + listed_row(lane, k)
        own, _ = one_row(listed, entry, how.capacity)
        there = there + (entry < held,)
        numbers = numbers + (tl.where(entry < held, own, 0),)  # beyond the end there may be anything
    return numbers + there


@triton.jit
def _products_held(
    how: tl.constexpr, queue, listed, held, matrix, n, act: tl.constexpr, FIRST: tl.constexpr, lane
):  # fmt: skip
    """(queue, list, how many it holds) of the list's rows whose value is not zero.

    FIRST: values are activations of the matrix's products. Else they are the list's values times up's products.
    """
    rows = _rows_held(how, listed, held, 0, lane)
    queue, s = ask_first_rows(queue, matrix.parts[0], matrix.parts[1], rows, lane, how.form)
    slot = 0
    again = written_anew(listed)
    kept = 0
    for first in range(0, held, 16):
        entries = first + tl.arange(0, ROWS)
        own, values = one_row(listed, entries, how.capacity)
        own = tl.where(entries < held, own, 0)
        offsets = tl.load(matrix.bias + own).to(tl.float32)
        next_rows = _rows_held(how, listed, held, first + 16, lane)
        products, queue, slot, s = int4_rows_step(
            queue, slot, s, n, matrix.parts[0], matrix.parts[1], rows, next_rows, lane, how.form
        )
        products += offsets
        if FIRST or act.both:
            products = act.function(products, act.threshold)
        values = products * how.unit if FIRST else values * products
        values = tl.where(entries < held, values, 0.0)
        again, kept = append_rows(again, kept, own, values, values != 0, how.capacity)
        rows = next_rows
    return queue, again, kept


@triton.jit
def _int4_rest(how: tl.constexpr, queue, listed, held, gate, up, down, n, partials, act: tl.constexpr, lane):
    """Products behind the first ones, whose rows and values the list holds."""
    queue = emptied(queue, lane)
    tl.debug_barrier()  # the list is written, and no warp reads words of the first matrix any more
    if gate is not None:
        queue, listed, held = _products_held(how, queue, listed, held, up, n, act, False, lane)
        queue = emptied(queue, lane)
        tl.debug_barrier()
    to = partials + tl.program_id(0) * (8 * how.words)
    _sums_of_columns(queue, down.parts[0], down.parts[1], listed, held, to, lane, how)


@triton.jit
def _int4_finish(how: tl.constexpr, state, gate, up, down, n, partials, act: tl.constexpr, lane):
    _int4_rest(how, state[0], state[4], state[5], gate, up, down, n, partials, act, lane)


@triton.jit
def _int4_run(how: tl.constexpr, chosen, rows, gate, up, down, n, partials, act: tl.constexpr, lane):
    listed = rows_list(tl.program_id(0), how.capacity)
    listed, held = append_rows(listed, 0, rows, tl.zeros(rows.shape, tl.float32), chosen, how.capacity)
    tl.debug_barrier()
    first = gate if gate is not None else up
    queue = new_queue(lane, how.form)
    queue, listed, held = _products_held(how, queue, listed, held, first, n, act, True, lane)
    _int4_rest(how, queue, listed, held, gate, up, down, n, partials, act, lane)


@keyed
class Int4Neurons(NamedTuple):
    """words: of a row. group: columns that share a scale. lanes: threads. form: of the first matrices' rows.
    capacity: rows of a program's list. unit: what hidden values are kept times.

    The functions of `stages.mlp` follow.
    """

    words: Any
    group: Any
    lanes: Any
    form: Any
    capacity: Any
    unit: Any
    share: Any = _int4_share
    read_input: Any = _int4_read_input
    read_norm: Any = _int4_read_norm
    normalise: Any = _int4_normalise
    first_rows: Any = _int4_first_rows
    begin: Any = _int4_begin
    products: Any = _int4_products
    add: Any = _int4_add
    finish: Any = _int4_finish
    run: Any = _int4_run


def launch(x: Tensor, weights: MlpWeights, norm: bool, every: bool) -> ListedLaunch:
    """Launch for matrices of 4 bits whose groups are of one size. every: the list holds all neurons."""
    n, d = weights.up.weight.shape
    settings = Int4MlpSettings.find("int4", x.device, d=d, gated=weights.gate is not None, all=every)
    most = most_splits(x.device)
    programs = min(max(settings.programs * n_sms(x.device), triton.cdiv(n, MOST_ROWS)), most)
    capacity = ROWS.value * triton.cdiv(n, ROWS.value * programs)
    require(capacity <= MOST_ROWS, f"{n} neurons: at most {MOST_ROWS * most}, which {most} lists hold")
    return int4_launch(x, weights, norm, settings, programs, capacity)


def int4_launch(
    x: Tensor, weights: MlpWeights, norm: bool, settings: Int4MlpSettings, programs: int, capacity: int
) -> ListedLaunch:
    """Launch of so many programs, whose lists have room for `capacity` rows."""
    n, d = weights.up.weight.shape
    groups = [check_int4(f"{name}.weight", linear.weight, (n, d), x).group for name, linear in weights.named()]
    group, words, warps = groups[0], d // 8, settings.warps
    require(set(groups) == {group}, f"an MLP's matrices must have groups of one size, not {groups}")
    check_dtype("x", x, (torch.float32 if norm else torch.float16,))
    room = QUEUE_BYTES - (norm_bytes(words, group, warps) if norm else 0)
    form = Int4Form(
        words, group, 32 * warps, pairs_of_a_warp(words, unit_vector(words, group), warps),
        pairs_ahead(words, group, warps, settings.ahead, room), listed=True,
        room=slots_of(words, group, warps) * slot_bytes(words, warps),  # of down's words
    )  # fmt: skip
    unit = 2.0**-6 if weights.hidden.activation == "relu2" else 1.0
    how = Int4Neurons(words, group, 32 * warps, form, capacity, unit)
    return ListedLaunch(how, programs, warps, settings.registers, torch.float16, pairs=True)
