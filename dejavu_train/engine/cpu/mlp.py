"""Compiled MLP of one token: up, activation and down, neuron by neuron, over all neurons or over a list.

Of a gated MLP the gate's rows come first. Up and down rows are read of neurons whose gate is not zero alone. A thread
keeps its own neurons, so knowing the gate first costs no barrier.
"""

import math
from typing import Any

import numpy as np

from dejavu_train.engine.cpu.arrays import (
    GELU_KIND,
    GELU_TANH_KIND,
    MLP_DOWN,
    MLP_IN,
    MLP_UP,
    RELU2_KIND,
    WEIGHTS,
)
from dejavu_train.engine.cpu.attention import row_bytes
from dejavu_train.engine.cpu.threads import compiled
from dejavu_train.engine.cpu.vector_ops import dot_list, dot_stored, exp_negative, sum_stored

ROOT_HALF, ROOT_8_BY_PI = np.float32(math.sqrt(0.5)), np.float32(math.sqrt(8 / math.pi))


@compiled()
def activated(model, x):
    """The activation of one fp32 number. NaN stays, unlike with max()."""
    kind = model.activation
    if kind == GELU_KIND:
        return np.float32(0.5) * x * (np.float32(1) + np.float32(math.erf(x * ROOT_HALF)))
    if kind == GELU_TANH_KIND:  # x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))
        u = ROOT_8_BY_PI * (x + np.float32(0.044715) * x * x * x)
        power = exp_negative(-abs(u))
        return x * (power if u < np.float32(0) else np.float32(1)) / (np.float32(1) + power)
    value = np.float32(0) if x <= np.float32(model.threshold) else x
    return value * value if kind == RELU2_KIND else value


@compiled()
def listed_neurons(model, selectors, work, layer, n, live, thread):
    """work.partial[1] = sum of the outputs of n neurons, work.units with the batch rows in work.unit_rows.

    Of down the rows of neurons are read that are active in some batch row. Both lists are written over.
    """
    fine, f = selectors.fine[layer], model.up_bias.shape[1]
    units, bits = work.units[thread], work.unit_rows[thread]
    numbers, results = work.numbers[thread], work.results[thread]
    operands, scales_of = work.operand[thread], work.operand_unit[thread]
    first = fine * f if fine >= 0 else model.first[layer, MLP_IN]
    for i in range(n):
        numbers[i] = first + units[i]
    if fine >= 0:
        whole, scale = selectors.whole, selectors.whole_scale
        dot_list(whole, scale, whole.shape[1], numbers, n, work.normed[thread], work.ones, live, results)
    else:
        dot_stored(model, model.packed[layer, MLP_IN], numbers, 0, n, n, operands, scales_of, live, results)
    active = 0
    for i in range(n):
        found: Any = False
        unit = units[i]
        for b in range(results.shape[0]):
            value = np.float32(0)
            if bits[i] >> b & 1:
                value = activated(model, results[b, i] + model.in_bias[layer, unit])
            results[b, active] = value  # active <= i: what is overwritten was read
            found = found or value != np.float32(0)
        units[active] = unit
        active += found
    of_in = 2 * selectors.whole.shape[1] + 4 if fine >= 0 else row_bytes(model, model.packed[layer, MLP_IN])
    work.bytes_read[thread, WEIGHTS] += n * of_in
    if model.gated:
        work.bytes_read[thread, WEIGHTS] += active * row_bytes(model, model.packed[layer, MLP_UP])
        active = times_up(model, work, layer, active, live, thread)
    for i in range(active):
        numbers[i] = model.first[layer, MLP_DOWN] + units[i]
    work.partial[1, thread] = 0
    packed = model.packed[layer, MLP_DOWN]
    sum_stored(model, packed, work.partial[1, thread], numbers, results, 0, active, live, scales_of)
    work.bytes_read[thread, WEIGHTS] += active * row_bytes(model, packed)


@compiled()
def times_up(model, work, layer, n, live, thread):
    """Multiply the first n results, of gates that are not zero, with up's outputs. Returns how many are not zero."""
    units, numbers = work.units[thread], work.numbers[thread]
    results, second = work.results[thread], work.second[thread]
    for i in range(n):
        numbers[i] = model.first[layer, MLP_UP] + units[i]
    operands, scales_of = work.operand[thread], work.operand_unit[thread]
    dot_stored(model, model.packed[layer, MLP_UP], numbers, 0, n, n, operands, scales_of, live, second)
    active = 0
    for i in range(n):
        found: Any = False
        unit = units[i]
        for b in range(results.shape[0]):
            value = results[b, i]
            if value != np.float32(0):
                other = second[b, i] + model.up_bias[layer, unit]
                value *= np.float32(0) if model.activates_up and other <= np.float32(0) else other
            results[b, active] = value
            found = found or value != np.float32(0)
        units[active] = unit
        active += found
    return active


@compiled()
def take_all(model, work, live, thread, n_threads):
    """List this thread's share of all neurons, consecutive ones. Returns how many."""
    n = model.up_bias.shape[1]
    start, stop = n * thread // n_threads, n * (thread + 1) // n_threads
    for i in range(stop - start):
        work.units[thread, i] = start + i
        work.unit_rows[thread, i] = live
    return stop - start


@compiled()
def take_share(model, work, thread, n_threads):
    """List this thread's share of the neurons that all threads found. Returns how many.

    Of one row equal shares, whoever found them. Of several rows what the thread itself found. So the order of a row's
    sum does not follow from what other rows use. work.found and found_rows -> units and unit_rows.
    """
    total = 0
    for other in range(n_threads):
        total += work.counts[other, 0]
    start, stop = total * thread // n_threads, total * (thread + 1) // n_threads
    if work.residual.shape[0] > 1:
        start = 0
        for other in range(thread):
            start += work.counts[other, 0]
        stop = start + work.counts[thread, 0]
    before, n = 0, 0
    for other in range(n_threads):
        count, segment = work.counts[other, 0], model.up_bias.shape[1] * other // n_threads
        for i in range(max(start - before, 0), min(stop - before, count)):
            work.units[thread, n] = work.found[other, i]
            work.unit_rows[thread, n] = work.found_rows[other, segment + i]
            n += 1
        before += count
    return n
