"""One decoding step of a whole model in compiled code, run by every thread of a team at once.

Phases of a layer, with a barrier behind each:

    the head predictor's first half | q, k, v | norms and rotation of q and k | attention | output projection |
    the neuron predictor's first half | its second half and the second stage | up and down

A dense layer has no predictors to run, and a model may have nothing that norms or turns queries and keys. Else it is
the same code. What a family computes are numbers in `arrays.Model`: one compilation is for all families. The residual
stream x is private: every thread adds up the same partial sums.
"""

import numpy as np

from dejavu_train.engine.cpu.arrays import DONE, GREEDY, HEADS, LEVELS, LM_HEAD, MLP, SPARSE
from dejavu_train.engine.cpu.attention import (
    attend,
    compare_heads,
    heads_change,
    keep_input,
    project_out,
    project_qkv,
    raise_watermarks,
    row_bytes,
)
from dejavu_train.engine.cpu.mlp import listed_neurons, take_all, take_share
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu.sampling import (
    advance,
    bar_stops,
    head_needed,
    largest_of,
    not_finite,
    penalise,
    scored_rows,
)
from dejavu_train.engine.cpu.select import predict_down, rows_in_state, select_heads, select_neurons
from dejavu_train.engine.cpu.threads import barrier, compiled
from dejavu_train.engine.cpu.vector_ops import add, add_list, cap, copy, dot_list, layer_norm, norm, round_to_levels

N_STEPS, MODE, SCORE, TAIL_ONLY = range(4)  # words of a command; N_STEPS -1 sends the other threads home


@compiled()
def embed(model, state, work, thread):
    """Put the first layer's input into this thread's x: the token's row, and its position's where these are learned."""
    numbers, factors = work.numbers[thread], work.results[thread]
    factors[:, 0] = 1
    for b in range(state.row_state.shape[0]):
        if state.row_state[b] != DONE:
            position = state.position[b]
            if model.positions.shape[0]:
                copy(work.x[thread, b], model.positions[position])
            else:
                work.x[thread, b] = 0
            numbers[0] = model.embedding + state.tokens[state.sequence[b], position]
            add_list(work.x[thread], model.rows, model.scales, model.group, numbers, factors, 0, 1, 1 << b)
            if model.embedding_norm:
                norm_in_place(model, work.x[thread, b], 2 * model.first.shape[0] + 1)


@compiled()
def norm_in_place(model, x, number):
    """Norm ``number`` of x (D,), in its place."""
    layer_norm(x, model.norms[number, 0], model.norms[number, 1], model.eps, model.centred, x)


@compiled()
def normalise(model, state, work, number, thread):
    """Norm ``number`` of x, or x where none stands there, into this thread's normed, and the operand of it.

    Where x is not finite, the row's fault becomes the next position and fault_site the number plus 1, the first time.
    """
    weight, bias = model.norms[number, 0], model.norms[number, 1]
    here = not model.post_norm if number < 2 * model.first.shape[0] else model.final_norm != 0
    for b in range(state.row_state.shape[0]):
        if state.row_state[b] != DONE:
            x, out = work.x[thread, b], work.normed[thread, b]
            if here:
                squares = layer_norm(x, weight, bias, model.eps, model.centred, out)
            else:
                copy(out, x)
                squares = norm(x)
            if thread == 0 and not np.isfinite(squares) and state.fault[b] == 0 and state.position[b] >= 0:
                state.fault[b], state.fault_site[b] = state.position[b] + 1, number + 1
            if model.rows.itemsize == 1:
                unit = round_to_levels(work.normed[thread, b], LEVELS, work.operand[thread, b])
                work.operand_unit[thread, b] = unit


@compiled()
def add_partials(model, state, work, number, bias, thread, n_threads):
    """x += bias + what all threads summed, in the same order in every thread. Norm ``number`` may stand behind it."""
    half = number % 2
    for b in range(state.row_state.shape[0]):
        if state.row_state[b] != DONE:
            add(work.x[thread, b], bias)
            for other in range(n_threads):
                add(work.x[thread, b], work.partial[half, other, b])
            if model.post_norm:
                norm_in_place(model, work.x[thread, b], number)


@compiled()
def live_rows(state):
    """Bits of the batch rows that are not done."""
    return ((1 << state.row_state.shape[0]) - 1) & ~rows_in_state(state, DONE)


@compiled()
def attention_half(model, selectors, state, work, control, layer, any_sparse, thread, n_threads):
    """x += the attention block of x."""
    normalise(model, state, work, 2 * layer, thread)
    if thread == 0:
        keep_input(selectors, state, work, layer)
    if any_sparse and selectors.sites[2 * layer + 1] > selectors.sites[2 * layer]:
        predict_down(model, selectors, state, work, 2 * layer, thread, n_threads)
        barrier(control, n_threads)
    n_units = select_heads(selectors, state, work, selectors.at[layer, HEADS], thread)
    project_qkv(model, selectors, state, work, layer, n_units, thread, n_threads)
    barrier(control, n_threads)
    if heads_change(model):
        compare_heads(model, selectors, state, work, layer, n_units, thread, n_threads)
        barrier(control, n_threads)
    if thread == 0:
        raise_watermarks(state, work, layer, n_units)
    attend(model, selectors, state, work, layer, n_units, thread, n_threads)
    barrier(control, n_threads)
    project_out(model, state, work, layer, n_units, thread, n_threads)
    barrier(control, n_threads)
    add_partials(model, state, work, 2 * layer, selectors.out_bias[layer], thread, n_threads)


@compiled()
def mlp_half(model, selectors, state, work, control, layer, any_sparse, thread, n_threads):
    """x += the MLP block of x."""
    normalise(model, state, work, 2 * layer + 1, thread)
    if any_sparse and selectors.sites[2 * layer + 2] > selectors.sites[2 * layer + 1]:
        predict_down(model, selectors, state, work, 2 * layer + 1, thread, n_threads)
        barrier(control, n_threads)
    number = selectors.at[layer, MLP]
    if any_sparse and number >= 0:
        select_neurons(model, selectors, state, work, control, layer, number, thread, n_threads)
        barrier(control, n_threads)
        n = take_share(model, work, thread, n_threads)
    else:
        n = take_all(model, work, live_rows(state), thread, n_threads)
    listed_neurons(model, selectors, work, layer, n, live_rows(state), thread)
    barrier(control, n_threads)
    add_partials(model, state, work, 2 * layer + 1, model.down_bias[layer], thread, n_threads)


@compiled()
def all_logits(model, state, work, live, start, stop, thread):
    """Logits of the tokens from start to stop, for the rows of the bits ``live``."""
    numbers, results, n = work.numbers[thread], work.results[thread], stop - start
    for i in range(n):
        numbers[i] = model.lm_head + start + i
    operands, units = work.operand[thread], work.operand_unit[thread]
    dot_list(model.rows, model.scales, model.group, numbers, n, operands, units, live, results)
    for b in range(state.row_state.shape[0]):
        if live >> b & 1:
            work.faulty[thread, b] = not_finite(results[b, :n])
            if model.logit_cap:
                cap(results[b, :n], model.logit_cap)
            if state.scored[b]:
                copy(work.raw[b, start:stop], results[b, :n])
            penalise(state, b, start, results[b, :n])
            bar_stops(state, b, start, results[b, :n])
            copy(work.logits[b, start:stop], results[b, :n])
            work.best_token[thread, b] = start + largest_of(results[b, :n])
    work.bytes_read[thread, LM_HEAD] += n * row_bytes(model, 0)


@compiled()
def likeliest_tokens(model, state, work, live, start, stop, thread):
    """The token with the largest logit from start to stop, by fp32 rows of those alone that can have it.

    Of the rows of the bits ``live``.

    A logit of the LM head in int8 is off by a known bound at most. Tokens whose logit cannot reach the largest by these
    bounds need no fp32 row, which are four times the bytes.
    """
    numbers, results, n = work.numbers[thread], work.results[thread], stop - start
    for b in range(state.row_state.shape[0]):
        if live >> b & 1:
            work.operand_unit[thread, b] = round_to_levels(work.normed[thread, b], LEVELS, work.levels[thread, b])
    for i in range(n):
        numbers[i] = start + i
    levels, units = work.levels[thread], work.operand_unit[thread]
    dot_list(model.screen, model.screen_scale, WIDEST_GROUP, numbers, n, levels, units, live, results)
    work.bytes_read[thread, LM_HEAD] += n * (model.screen.shape[1] + 4 * model.screen_scale.shape[1] + 8)
    for b in range(state.row_state.shape[0]):
        if not live >> b & 1:
            continue
        unit, length = units[b], norm(work.normed[thread, b])
        units[b] = 1
        work.faulty[thread, b] = not_finite(results[b, :n])
        bar_stops(state, b, start, results[b, :n])
        reached = -np.float32(np.inf)
        for i in range(n):
            off = model.screen_error[start + i, 0] * length + model.screen_error[start + i, 1] * unit
            reached = max(reached, results[b, i] - off)
        count = 0
        for i in range(n):
            off = model.screen_error[start + i, 0] * length + model.screen_error[start + i, 1] * unit
            numbers[count] = model.lm_head + start + i
            count += results[b, i] + off >= reached
        count = max(count, 1)  # none where logits are not finite, or all are of stop tokens
        dot_list(model.rows, model.scales, model.group, numbers, count, work.operand[thread], units, 1 << b, results)
        work.bytes_read[thread, LM_HEAD] += count * row_bytes(model, 0)
        best = largest_of(results[b, :count])
        work.best_token[thread, b] = numbers[best] - model.lm_head
        work.logits[b, work.best_token[thread, b]] = results[b, best]
        bar_stops(state, b, start, work.logits[b, start:stop])


@compiled()
def residual_stream(model, selectors, state, work, control, given, thread, n_threads):
    """x behind the last layer of every row that is not done: of its token, or as work.residual has it where given."""
    if given:
        for b in range(state.row_state.shape[0]):
            copy(work.x[thread, b], work.residual[b])
        return
    any_sparse = rows_in_state(state, SPARSE) != 0
    embed(model, state, work, thread)
    for layer in range(model.first.shape[0]):
        attention_half(model, selectors, state, work, control, layer, any_sparse, thread, n_threads)
        mlp_half(model, selectors, state, work, control, layer, any_sparse, thread, n_threads)


@compiled()
def head(model, state, work, control, mode, score, thread, n_threads):
    """Logits of x, or the largest of them, where a row needs them."""
    if head_needed(state, score):
        normalise(model, state, work, 2 * model.first.shape[0], thread)
        start, stop = model.vocab * thread // n_threads, model.vocab * (thread + 1) // n_threads
        live = live_rows(state)
        whole = live
        if model.rows.itemsize > 1 and mode == GREEDY and not score:
            whole = live & scored_rows(state)
        if live != whole:
            likeliest_tokens(model, state, work, live & ~whole, start, stop, thread)
        if whole:
            all_logits(model, state, work, whole, start, stop, thread)
    barrier(control, n_threads)


@compiled()
def step(model, selectors, state, work, control, mode, score, given, thread, n_threads):
    """The next token of every row that is not done."""
    residual_stream(model, selectors, state, work, control, given, thread, n_threads)
    head(model, state, work, control, mode, score, thread, n_threads)
    if thread == 0:
        advance(state, work, mode, score, n_threads)
    barrier(control, n_threads)


@compiled()
def run(model, selectors, state, work, control, command, thread, n_threads):
    """Run a command: some steps, or the tail alone from work.residual. Ends early when all rows are done."""
    mode, score = command[MODE], command[SCORE]
    everyone = (1 << state.row_state.shape[0]) - 1
    for _ in range(command[N_STEPS]):
        if rows_in_state(state, DONE) == everyone:
            break
        step(model, selectors, state, work, control, mode, score, command[TAIL_ONLY], thread, n_threads)
