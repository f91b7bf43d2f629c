"""Compiled attention of one token: q, k, v of the selected units, the missing K and V before, the output projection.

A unit is a head of K and V with the query heads that share it. What norms or turns queries and keys reads whole heads,
whose rows several threads may have multiplied. So it is a phase of its own (`compare_heads`), of models that need it.
"""

import numpy as np

from dejavu_train.engine.cpu.arrays import BEFORE, BEHIND, DONE, KV, NEVER, OUT, QKV, WEIGHTS
from dejavu_train.engine.cpu.half_numbers import narrowed, widened
from dejavu_train.engine.cpu.row_kernels import ROWS
from dejavu_train.engine.cpu.threads import compiled
from dejavu_train.engine.cpu.vector_ops import (
    SUMS,
    copy,
    dot_stored,
    exp_negative,
    layer_norm,
    move_product,
    sum_stored,
    turn,
)


@compiled()
def row_bytes(model, packed):
    """Bytes of one row of weights with its scales."""
    if packed:
        return model.pairs.shape[1] + 2 * model.pair_scales.shape[1]
    codes = model.rows.shape[1] * model.rows.itemsize
    return codes if model.rows.itemsize > 1 else codes + 4 * model.scales.shape[1]


@compiled()
def project_qkv(model, selectors, state, work, layer, n_units, thread, n_threads):
    """q of the selected units into work.q, k and v into the caches, for this position and those where they are missing.

    A unit that is selected again finds K and V missing from its watermark on. They are computed from the kept
    attn_in of those positions, four rows of weights by four, so that the weights are still read once.
    """
    of_q = model.kv_group * state.keys.shape[3]
    of_unit = of_q + 2 * state.keys.shape[3]
    first, packed = model.first[layer, QKV], model.packed[layer, QKV]
    mask, heads, numbers = work.mask[thread], work.heads[thread], work.numbers[thread]
    start, stop = n_units * of_unit * thread // n_threads, n_units * of_unit * (thread + 1) // n_threads
    n = stop - start
    for i in range(n):
        at = start + i
        numbers[i] = first + heads[at // of_unit] * of_unit + at % of_unit
    i = 0
    while i < n:
        unit, inside = heads[(start + i) // of_unit], (start + i) % of_unit
        last = min(n, i + of_unit - inside)  # of this unit
        for b in range(state.row_state.shape[0]):
            if mask[unit] >> b & 1 and first_missing(selectors, state, layer, b, unit) < state.position[b]:
                fill_missing(model, selectors, state, work, layer, b, unit, i, last, inside, n, thread)
        operands, units, results = work.operand[thread], work.operand_unit[thread], work.results[thread]
        dot_stored(model, packed, numbers, i, last, n, operands, units, mask[unit], results)
        for b in range(state.row_state.shape[0]):
            if mask[unit] >> b & 1:
                mine = work.results[thread, b, i:last]
                put_qkv(model, state, work, layer, b, unit, inside, state.position[b], mine)
        i = last
    work.bytes_read[thread, WEIGHTS] += n * row_bytes(model, packed)


@compiled()
def fill_missing(model, selectors, state, work, layer, b, unit, start, stop, inside, n, thread):
    """K and V of a unit for batch row b where they are missing, by the rows ``start`` to ``stop`` of a list of n."""
    of_q, kept, own = model.kv_group * state.keys.shape[3], selectors.kept[layer], state.sequence[b]
    packed, numbers, results = model.packed[layer, QKV], work.numbers[thread], work.results[thread, b : b + 1]
    for i in range(start + max(0, of_q - inside) // ROWS * ROWS, stop, ROWS):  # no query of an earlier position
        for p in range(first_missing(selectors, state, layer, b, unit), state.position[b]):
            operands, units = state.attn_in[kept, own, p : p + 1], state.attn_unit[kept, own, p : p + 1]
            dot_stored(model, packed, numbers, i, i + ROWS, n, operands, units, 1, results)
            at = inside + i - start
            first = i + max(0, of_q - at)
            mine = results[0, first : min(i + ROWS, stop)]
            put_qkv(model, state, work, layer, b, unit, at + first - i, p, mine)


@compiled()
def first_missing(selectors, state, layer, b, unit):
    """The first position of batch row b at which a unit lacks K and V, its own where nothing was skipped."""
    if selectors.kept[layer] < 0:
        return state.position[b]
    return state.watermark[layer, state.sequence[b], unit]


@compiled()
def put_qkv(model, state, work, layer, b, unit, inside, position, products):
    """Products with the rows of a unit from number ``inside`` on where they belong, biases added."""
    e, own = state.keys.shape[3], state.sequence[b]
    of_q = model.kv_group * e
    first, n = unit * (of_q + 2 * e) + inside, products.shape[0]
    to_q, to_k = min(max(of_q - inside, 0), n), min(max(of_q + e - inside, 0), n)  # where q and k end
    # Slices, because an index that is a difference might be negative for all that the compiler knows.
    out, given, bias = work.q[b, unit * of_q + inside :], products[:to_q], model.qkv_bias[layer, first:]
    for r in range(to_q):
        out[r] = (given[r] + bias[r]) * np.float32(model.q_scaling)
    keys, given, bias = state.keys[layer, own, unit], products[to_q:to_k], model.qkv_bias[layer, first + to_q :]
    from_k = max(inside - of_q, 0)
    for r in range(to_k - to_q):
        keys[from_k + r, position] = narrowed(keys, given[r] + bias[r])
    from_v = max(inside - of_q - e, 0)
    out, given = state.values[layer, own, unit, position, from_v:], products[to_k:]
    bias = model.qkv_bias[layer, first + to_k :]
    for r in range(n - to_k):
        out[r] = narrowed(out, given[r] + bias[r])


@compiled()
def heads_change(model):
    """Whether queries and keys are normed or turned before they are compared."""
    return model.head_norm != NEVER or model.turns.shape[0] > 0


@compiled()
def compared(model, layer, part, position, x):
    """q (part 0) or k (1) of one head (e,) as attention compares it, in place."""
    weight, bias = model.head_norms[layer, part, 0], model.head_norms[layer, part, 1]
    if model.head_norm == BEFORE:
        layer_norm(x, weight, bias, model.head_eps, model.centred, x)
    if model.turns.shape[0]:
        turn(x, model.turns[position, 0], model.turns[position, 1])
    if model.head_norm == BEHIND:
        layer_norm(x, weight, bias, model.head_eps, model.centred, x)


@compiled()
def compare_heads(model, selectors, state, work, layer, n_units, thread, n_threads):
    """Norm and turn what `project_qkv` left of the selected units: a query or key head is one thread's."""
    e, counted = state.keys.shape[3], 0
    for i in range(n_units):
        unit = work.heads[thread, i]
        for b in range(state.row_state.shape[0]):
            if not work.mask[thread, unit] >> b & 1:
                continue
            for head in range(unit * model.kv_group, (unit + 1) * model.kv_group):
                counted += 1
                if counted % n_threads == thread:
                    compared(model, layer, 0, state.position[b], work.q[b, head * e : (head + 1) * e])
            counted += 1
            if counted % n_threads != thread:
                continue
            keys, key = state.keys[layer, state.sequence[b], unit], work.scores[thread, :e]
            for p in range(first_missing(selectors, state, layer, b, unit), state.position[b] + 1):
                for k in range(e):
                    key[k] = widened(keys[k, p])
                compared(model, layer, 1, p, key)
                for k in range(e):
                    keys[k, p] = narrowed(keys, key[k])


@compiled()
def keep_input(selectors, state, work, layer):
    """Keep attn_in of this position, from which a unit's K and V are computed when it is next selected."""
    kept = selectors.kept[layer]
    for b in range(state.row_state.shape[0]):
        if kept >= 0 and state.row_state[b] != DONE:
            copy(state.attn_in[kept, state.sequence[b], state.position[b]], work.operand[0, b])
            state.attn_unit[kept, state.sequence[b], state.position[b]] = work.operand_unit[0, b]


@compiled()
def raise_watermarks(state, work, layer, n_units):
    """K and V of the selected units are valid up to this position. One thread says so when all have computed theirs."""
    for i in range(n_units):
        unit = work.heads[0, i]
        for b in range(state.row_state.shape[0]):
            if work.mask[0, unit] >> b & 1:
                state.watermark[layer, state.sequence[b], unit] = state.position[b] + 1


@compiled(fastmath=SUMS)
def add_weighted(out, rows, weights):
    """Add to out (n,) each of the first m rows (at least m, at least n) times its one of weights (m,)."""
    n, m = out.shape[0], weights.shape[0]
    for i in range(0, m - m % 4, 4):  # four at once, so that out is read and written once for them
        a, b, c, d = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        of_a, of_b, of_c, of_d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for j in range(n):
            out[j] += (of_a * widened(a[j]) + of_b * widened(b[j])) + (of_c * widened(c[j]) + of_d * widened(d[j]))
    for i in range(m - m % 4, m):
        row, weight = rows[i], weights[i]
        for j in range(n):
            out[j] += weight * widened(row[j])


@compiled(fastmath=SUMS)
def attend_one(q, keys, values, n, slope, scores, mean, out):
    """Softmax attention of q (e,) over n columns of keys (e, T) and rows of values (T, e), less mean (e,), into out.

    A key loses ``slope`` of its score for each position that it stands before the last.
    """
    e = q.shape[0]
    scores = scores[:n]
    for p in range(n):
        scores[p] = slope * np.float32(p + 1 - n)
    add_weighted(scores, keys, q)
    largest = scores[0]
    for p in range(n):
        largest = max(largest, scores[p])
    total = np.float32(0)
    for p in range(n):
        weight = exp_negative(scores[p] - largest)
        scores[p] = weight
        total += weight
    for k in range(e):
        out[k] = 0
    add_weighted(out, values, scores)
    for k in range(e):
        out[k] = out[k] / total - mean[k]


@compiled()
def attend(model, selectors, state, work, layer, n_units, thread, n_threads):
    """Attention of the selected units into work.heads_out, less the mean that stands in for a skipped head."""
    e = state.keys.shape[3]
    turn = 0
    for i in range(n_units):
        unit = work.heads[thread, i]
        for head in range(unit * model.kv_group, (unit + 1) * model.kv_group):
            for b in range(state.row_state.shape[0]):
                own = state.sequence[b]
                if work.mask[thread, unit] >> b & 1:
                    turn += own == b  # rows of one sequence share what a thread has read
                    if turn % n_threads == thread:
                        n = state.position[b] + 1
                        attend_one(
                            work.q[b, head * e : (head + 1) * e], state.keys[layer, own, unit],
                            state.values[layer, own, unit], n, model.slopes[head], work.scores[thread],
                            selectors.means[layer, head], work.heads_out[b, head * e : (head + 1) * e],
                        )  # fmt: skip
                        if head % model.kv_group == 0:
                            work.bytes_read[thread, KV] += 2 * state.keys.itemsize * n * e


@compiled()
def project_out(model, state, work, layer, n_units, thread, n_threads):
    """This thread's share of the output projection's sum over the selected units, into work.partial[0]."""
    e, batch = state.keys.shape[3], state.row_state.shape[0]
    of_unit = model.kv_group * e
    numbers, factors = work.numbers[thread], work.results[thread]
    work.partial[0, thread] = 0
    start, stop = n_units * of_unit * thread // n_threads, n_units * of_unit * (thread + 1) // n_threads
    if batch > 1:  # by the number of a column, so that the order of a row's sum does not follow from other rows
        whole = state.keys.shape[2] * of_unit
        first, last = whole * thread // n_threads, whole * (thread + 1) // n_threads
        start, stop = 0, 0
        for i in range(n_units):
            at = work.heads[thread, i] * of_unit
            start += min(max(first - at, 0), of_unit)
            stop += min(max(last - at, 0), of_unit)
    live = 0
    for at in range(start, stop):
        unit = work.heads[thread, at // of_unit]
        column, bits = unit * of_unit + at % of_unit, work.mask[thread, unit]
        live |= bits
        numbers[at - start] = model.first[layer, OUT] + column
        for b in range(batch):
            factors[b, at - start] = work.heads_out[b, column] if bits >> b & 1 else np.float32(0)
    n = stop - start
    packed = model.packed[layer, OUT]
    work.bytes_read[thread, WEIGHTS] += n * row_bytes(model, packed)
    # Where each head scales its sum, one head after the other; else all of them at once.
    scaled, out, i = model.out_scale.shape[0], work.partial[0, thread], 0
    if scaled:
        out = work.normed[thread]  # what was normed was read before the attention
        out[:] = 0
    while i < n:
        end, head = n, 0
        if scaled:
            column = numbers[i] - model.first[layer, OUT]
            head = column // e
            end, live = min(n, i + e - column % e), work.mask[thread, column // of_unit]
        sum_stored(model, packed, out, numbers, factors, i, end, live, work.operand_unit[thread])
        if scaled:
            for b in range(batch):
                move_product(work.partial[0, thread, b], out[b], model.out_scale[layer, head])
            work.bytes_read[thread, WEIGHTS] += 4 * out.shape[1]
        i = end
