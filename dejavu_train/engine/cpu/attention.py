"""Compiled attention of one token: q, k, v of the selected heads, the missing K and V before, the output projection."""

import numpy as np

from dejavu_train.engine.cpu.arrays import DONE, KV, OUT, QKV, WEIGHTS
from dejavu_train.engine.cpu.row_kernels import ROWS, dot_four
from dejavu_train.engine.cpu.threads import compiled
from dejavu_train.engine.cpu.vector_ops import SUMS, add_list, copy, dot_rows, exp_negative, move_product


@compiled()
def row_bytes(model):
    """Bytes of one row of weights with its scales."""
    codes = model.rows.shape[1] * model.rows.itemsize
    return codes if model.rows.itemsize == 4 else codes + 4 * model.scales.shape[1]


@compiled()
def project_qkv(model, selectors, state, work, layer, n_heads, thread, n_threads):
    """q of the selected heads into work.q, k and v into the caches, for this position and those where they are missing.

    A head that is selected again finds K and V missing from its watermark on. They are computed from the kept
    attn_in of those positions, four rows of weights by four, so that the weights are still read once.
    """
    e = state.keys.shape[3]
    first, kept = model.first[layer, QKV], selectors.kept[layer]
    mask, heads, numbers = work.mask[thread], work.heads[thread], work.numbers[thread]
    start, stop = n_heads * 3 * e * thread // n_threads, n_heads * 3 * e * (thread + 1) // n_threads
    n = stop - start
    for i in range(n):
        at = start + i
        numbers[i] = first + heads[at // (3 * e)] * 3 * e + at % (3 * e)
    i = 0
    while i < n:
        head, inside = heads[(start + i) // (3 * e)], (start + i) % (3 * e)
        count = min(ROWS, n - i, 3 * e - inside)  # of one head
        for b in range(state.row_state.shape[0]):
            if not mask[head] >> b & 1:
                continue
            position, own, results = state.position[b], state.sequence[b], work.results[thread, b]
            none_missing = kept < 0 or inside + count <= e  # rows of q alone
            skipped = max(0, e - inside)  # q of an earlier position
            for p in range(position if none_missing else state.watermark[layer, own, head], position):
                operand, unit = state.attn_in[kept, own, p], state.attn_unit[kept, own, p]
                dot_four(model.rows, model.scales, model.group, numbers, i, n, operand, unit, results)
                put_qkv(model, state, work, layer, b, head, inside + skipped, p, results[i + skipped : i + count])
        dot_rows(
            model.rows, model.scales, model.group, numbers, i, n, work.operand[thread], work.operand_unit[thread],
            mask[head], work.results[thread],
        )  # fmt: skip
        for b in range(state.row_state.shape[0]):
            if mask[head] >> b & 1:
                mine = work.results[thread, b, i : i + count]
                put_qkv(model, state, work, layer, b, head, inside, state.position[b], mine)
        i += count
    work.bytes_read[thread, WEIGHTS] += n * row_bytes(model)


@compiled()
def put_qkv(model, state, work, layer, b, head, inside, position, products):
    """Products with the rows of a head from number ``inside`` on, of 3 e, where they belong, biases added."""
    e, own = state.keys.shape[3], state.sequence[b]
    for r in range(products.shape[0]):
        part, k = (inside + r) // e, (inside + r) % e
        value = products[r] + model.qkv_bias[layer, head * 3 * e + inside + r]
        if part == 0:
            work.q[b, head * e + k] = value * (np.float32(1) / np.sqrt(np.float32(e)))
        elif part == 1:
            state.keys[layer, own, head, k, position] = value
        else:
            state.values[layer, own, head, position, k] = value


@compiled()
def keep_input(selectors, state, work, layer):
    """Keep attn_in of this position, from which a head's K and V are computed when it is next selected."""
    kept = selectors.kept[layer]
    for b in range(state.row_state.shape[0]):
        if kept >= 0 and state.row_state[b] != DONE:
            copy(state.attn_in[kept, state.sequence[b], state.position[b]], work.operand[0, b])
            state.attn_unit[kept, state.sequence[b], state.position[b]] = work.operand_unit[0, b]


@compiled()
def raise_watermarks(state, work, layer, n_heads):
    """K and V of the selected heads are valid up to this position. One thread says so when all have computed theirs."""
    for i in range(n_heads):
        head = work.heads[0, i]
        for b in range(state.row_state.shape[0]):
            if work.mask[0, head] >> b & 1:
                state.watermark[layer, state.sequence[b], head] = state.position[b] + 1


@compiled(fastmath=SUMS)
def attend_one(q, keys, values, n, scores, mean, out):
    """Softmax attention of q (e,) over n columns of keys (e, T) and rows of values (T, e), less mean (e,), into out."""
    e = q.shape[0]
    scores = scores[:n]
    for p in range(n):
        scores[p] = 0
    for k in range(e // 2):
        even, odd, from_even, from_odd = q[2 * k], q[2 * k + 1], keys[2 * k], keys[2 * k + 1]
        for p in range(n):
            scores[p] += even * from_even[p] + odd * from_odd[p]
    if e % 2:
        last, from_last = q[e - 1], keys[e - 1]
        for p in range(n):
            scores[p] += last * from_last[p]
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
    for p in range(n):
        weight, value = scores[p], values[p]
        for k in range(e):
            out[k] += weight * value[k]
    for k in range(e):
        out[k] = out[k] / total - mean[k]


@compiled()
def attend(selectors, state, work, layer, n_heads, thread, n_threads):
    """Attention of the selected heads into work.heads_out, less the mean that stands in for a skipped head."""
    e = state.keys.shape[3]
    turn = 0
    for i in range(n_heads):
        head = work.heads[thread, i]
        for b in range(state.row_state.shape[0]):
            own = state.sequence[b]
            if work.mask[thread, head] >> b & 1:
                turn += own == b  # rows of one sequence share what a thread has read
                if turn % n_threads == thread:
                    n = state.position[b] + 1
                    attend_one(
                        work.q[b, head * e : (head + 1) * e], state.keys[layer, own, head],
                        state.values[layer, own, head], n, work.scores[thread], selectors.means[layer, head],
                        work.heads_out[b, head * e : (head + 1) * e],
                    )  # fmt: skip
                    work.bytes_read[thread, KV] += 8 * n * e


@compiled()
def project_out(model, state, work, layer, n_heads, thread, n_threads):
    """This thread's share of the output projection's sum over the selected heads, into work.partial[0]."""
    e, batch = state.keys.shape[3], state.row_state.shape[0]
    numbers, factors = work.numbers[thread], work.results[thread]
    work.partial[0, thread] = 0
    start, stop = n_heads * e * thread // n_threads, n_heads * e * (thread + 1) // n_threads
    live = 0
    for at in range(start, stop):
        head = work.heads[thread, at // e]
        unit, bits = head * e + at % e, work.mask[thread, head]
        live |= bits
        numbers[at - start] = model.first[layer, OUT] + unit
        for b in range(batch):
            factors[b, at - start] = work.heads_out[b, unit] if bits >> b & 1 else np.float32(0)
    n = stop - start
    work.bytes_read[thread, WEIGHTS] += n * row_bytes(model)
    # Where each head scales its sum, one head after the other; else all of them at once.
    scaled, out, i = model.out_scale.shape[0], work.partial[0, thread], 0
    if scaled:
        out = work.normed[thread]  # what was normed was read before the attention
        out[:] = 0
    while i < n:
        end, head = n, 0
        if scaled:
            head = work.heads[thread, (start + i) // e]
            end, live = min(n, i + e - (start + i) % e), work.mask[thread, head]
        add_list(out, model.rows, model.scales, model.group, numbers, factors, i, end, live)
        if scaled:
            for b in range(batch):
                move_product(work.partial[0, thread, b], out[b], model.out_scale[layer, head])
            work.bytes_read[thread, WEIGHTS] += 4 * out.shape[1]
        i = end
