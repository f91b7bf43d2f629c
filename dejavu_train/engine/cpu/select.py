"""Compiled selection: which heads and neurons each batch row uses, by the predictors and second stages of a bundle.

A selection is a number for each unit with bit b set where batch row b uses the unit. Rows that are still dense use all.
"""

import numpy as np

from dejavu_train.engine.cpu.arrays import (
    BIAS,
    DENSE,
    DOWN,
    DOWN_SCALE,
    INT4,
    KIND,
    PREDICTORS,
    RANK,
    RELU,
    SPARSE,
    TOP_K,
    UNITS,
    UP,
    UP_SCALE,
)
from dejavu_train.engine.cpu.row_kernels import dot_nibbles
from dejavu_train.engine.cpu.threads import barrier, bits_from_float, compiled
from dejavu_train.engine.cpu.vector_ops import scale_and_shift, stored_products, stored_sums

AHEAD = 4  # candidates of the second stage whose planes are fetched while one is tested


@compiled()
def stored_bytes(kind, n):
    """Bytes of n weights of a predictor."""
    return (n + 1) // 2 if kind == INT4 else n * (4 >> kind)


@compiled()
def predict_down(model, selectors, state, work, site, thread, n_threads):
    """The first half of every predictor that reads this site: work.hidden from work.normed. Threads share."""
    for at in range(selectors.sites[site], selectors.sites[site + 1]):
        number = selectors.readers[at]
        spec = selectors.spec[number]
        kind, rank = spec[KIND], spec[RANK]
        d = model.norms.shape[2]
        start, stop = rank * thread // n_threads, rank * (thread + 1) // n_threads
        work.bytes_read[thread, PREDICTORS] += (stop - start) * stored_bytes(kind, d)
        scale = selectors.scale[spec[DOWN_SCALE] : spec[DOWN_SCALE] + rank]
        for b in range(state.row_state.shape[0]):
            if state.row_state[b] == SPARSE:
                hidden = work.hidden[number, b]
                stored_products(
                    selectors.float32, selectors.float16, selectors.int8, selectors.int4, kind, spec[DOWN], scale,
                    work.normed[thread, b, :d], start, stop, hidden,
                )  # fmt: skip
                if spec[RELU]:
                    for r in range(start, stop):
                        hidden[r] = max(hidden[r], np.float32(0))


@compiled()
def unit_logits(selectors, work, number, b, start, stop, out):
    """The logits of units ``start`` to ``stop`` for batch row b into out (n,)."""
    spec = selectors.spec[number]
    units = spec[UNITS]
    hidden = work.hidden[number, b, : spec[RANK]]
    stored_sums(
        selectors.float32, selectors.float16, selectors.int8, selectors.int4, spec[KIND], spec[UP],
        hidden, units, start, stop, out
    )  # fmt: skip
    scale_and_shift(out[start:stop], selectors.scale[spec[UP_SCALE] + start :], selectors.bias[spec[BIAS] + start :])


@compiled()
def order_key(value):
    """A whole number that orders as the fp32 value does. NaN comes before everything."""
    if value != value:
        return np.int64(-(1 << 40))
    bits = np.int64(bits_from_float(value))
    return bits if bits >= 0 else np.int64(-(1 << 31)) - bits


@compiled()
def kth_key(values, k):
    """The order_key of the k-th largest of values (n,)."""
    low, high = np.int64(-(1 << 41)), np.int64(1 << 31)  # at least k values reach low, fewer reach high
    while high - low > 1:
        middle = (low + high) >> 1
        reach = 0
        for i in range(values.shape[0]):
            reach += order_key(values[i]) >= middle
        if reach >= k:
            low = middle
        else:
            high = middle
    return low


@compiled()
def choose_above(logits, threshold, bit, chosen):
    """Set ``bit`` in chosen (n,) where logits (n,) exceed the threshold. NaN does not."""
    for i in range(logits.shape[0]):
        chosen[i] |= bit if logits[i] > threshold else 0


@compiled()
def choose_largest(logits, k, bit, chosen):
    """Set ``bit`` in chosen (n,) for the k largest logits (n,), of equal ones the first. NaN is never chosen."""
    key = kth_key(logits, k)
    above = 0
    for i in range(logits.shape[0]):
        above += order_key(logits[i]) > key
    ties = k - above
    for i in range(logits.shape[0]):
        value = logits[i]
        rank_key = order_key(value)
        if rank_key > key or (rank_key == key and ties > 0):
            ties -= rank_key == key
            if value == value:
                chosen[i] |= bit


@compiled()
def rows_in_state(state, row_state):
    """Bits of the batch rows in this state."""
    bits = 0
    for b in range(state.row_state.shape[0]):
        if state.row_state[b] == row_state:
            bits |= 1 << b
    return bits


@compiled()
def select_heads(selectors, state, work, number, thread):
    """The heads of this step into work.mask and work.heads of this thread. Returns how many any row uses.

    Every thread computes all of it: a few thousand products cost less than a barrier. number: -1 = a dense layer.
    """
    mask, heads = work.mask[thread], work.heads[thread]
    n = state.keys.shape[2]
    always = rows_in_state(state, DENSE)
    sparse = rows_in_state(state, SPARSE)
    mask[:n] = always | (sparse if number < 0 else 0)
    if number >= 0 and sparse:
        spec = selectors.spec[number]
        if thread == 0:
            work.bytes_read[thread, PREDICTORS] += n * (stored_bytes(spec[KIND], spec[RANK]) + 8)
        for b in range(state.row_state.shape[0]):
            if state.row_state[b] != SPARSE:
                continue
            logits = work.scores[thread, :n]
            unit_logits(selectors, work, number, b, 0, n, logits)
            if spec[TOP_K]:
                choose_largest(logits, spec[TOP_K], 1 << b, mask)
            else:
                choose_above(logits, selectors.threshold[number], 1 << b, mask)
    count = 0
    for i in range(n):
        if mask[i]:
            heads[count] = i
            count += 1
    return count


@compiled()
def select_neurons(model, selectors, state, work, control, layer, number, thread, n_threads):
    """The neurons of this step into lists: each thread writes its share to work.found, found_rows and counts."""
    spec, fine = selectors.spec[number], selectors.fine[layer]
    n, batch = spec[UNITS], state.row_state.shape[0]
    always, sparse = rows_in_state(state, DENSE), rows_in_state(state, SPARSE)
    start, stop = n * thread // n_threads, n * (thread + 1) // n_threads
    work.bytes_read[thread, PREDICTORS] += (stop - start) * (stored_bytes(spec[KIND], spec[RANK]) + 8)
    chosen = work.found_rows[thread]
    chosen[:] = always
    for b in range(batch):
        if state.row_state[b] == SPARSE:
            unit_logits(selectors, work, number, b, start, stop, work.unit_logits[b])
            if not spec[TOP_K]:
                mine = work.unit_logits[b, start:stop]
                choose_above(mine, selectors.threshold[number], 1 << b, chosen[start:stop])
    if spec[TOP_K]:
        barrier(control, n_threads)
        for b in range(batch):
            if state.row_state[b] == SPARSE:
                choose_largest(work.unit_logits[b], spec[TOP_K], 1 << b, chosen)
    if fine >= 0:
        for b in range(batch):
            if state.row_state[b] == SPARSE:
                unit, total = round_input(work.normed[thread, b], work.levels[thread, b])
                work.level_unit[thread, b], work.level_sum[thread, b] = unit, total
    # Lists shrink in place: what is overwritten was read, since count <= i - start and kept <= c.
    found, count = work.found[thread], 0
    for i in range(start, stop):
        found[count], chosen[start + count] = i, chosen[i]
        count += chosen[i] != 0
    if fine >= 0:
        work.bytes_read[thread, PREDICTORS] += count * (selectors.upper.shape[1] + 8)
        candidates, count = count, 0
        for c in range(candidates):
            unit, coming = found[c], fine * n + found[min(c + AHEAD, candidates - 1)]
            bits = second_stage(model, selectors, work, layer, unit, coming, chosen[start + c], sparse, thread)
            found[count], chosen[start + count] = unit, bits
            count += bits != 0
    work.counts[thread, 0] = count


@compiled()
def round_input(x, levels):
    """x (d,) as whole numbers in -127..127 into levels (d,), as in `planes.input_levels`: their unit, their sum."""
    largest = np.float32(0)
    for j in range(x.shape[0]):
        largest = max(largest, abs(x[j]))
    if largest == np.float32(0):
        largest = np.float32(1)
    factor = np.float32(127) / largest
    total = 0
    for j in range(x.shape[0]):
        levels[j] = np.int16(np.rint(x[j] * factor))
        total += int(levels[j])
    return largest / np.float32(127), total


@compiled()
def second_stage(model, selectors, work, layer, unit, coming, bits, sparse, thread):
    """The bits that stay: a sparse row keeps a candidate whose product by the upper plane exceeds its threshold.

    In whole numbers, and in fp32 in the order of `planes.SecondStage.scores`: all executors decide alike.
    """
    row, tested = selectors.fine[layer] * model.up_bias.shape[1] + unit, bits & sparse
    if not tested:
        return bits
    for b in range(work.hidden.shape[1]):
        if tested >> b & 1:
            whole = dot_nibbles(selectors.upper, row, coming, work.levels[thread, b]) - 8 * work.level_sum[thread, b]
            score = np.float32(whole) * selectors.grid[row, 0] * work.level_unit[thread, b] + model.up_bias[layer, unit]
            if not score > selectors.grid[row, 1]:
                bits &= ~(1 << b)
    return bits
