"""Compiled MLP of one token: fc1, ReLU and fc2, neuron by neuron, over all neurons or over a list."""

import numpy as np

from dejavu_train.engine.cpu.arrays import FC1, FC2, WEIGHTS
from dejavu_train.engine.cpu.attention import row_bytes
from dejavu_train.engine.cpu.threads import compiled
from dejavu_train.engine.cpu.vector_ops import add_row, dot_row


@compiled()
def one_neuron(model, selectors, state, work, layer, neuron, bits, thread):
    """Add the neuron's output for the batch rows in ``bits`` to work.partial[1]; returns the bytes of weights read.

    Of fc2 a row is read where the neuron is active.
    """
    fine, n = selectors.fine[layer], model.fc1_bias.shape[1]
    active = False
    for b in range(state.row_state.shape[0]):
        if not bits >> b & 1:
            continue
        x = work.normed[thread, b]
        if fine >= 0:
            value = dot_row(selectors.whole, selectors.grid[:, 1:2], x.shape[0], fine * n + neuron, x)
        else:
            value = dot_row(model.rows, model.scales, model.group, model.first[layer, FC1] + neuron, x)
        value += model.fc1_bias[layer, neuron]
        if value > np.float32(0):
            active = True
            number = model.first[layer, FC2] + neuron
            add_row(work.partial[1, thread, b], model.rows, model.scales, model.group, number, value)
    one = row_bytes(model)
    return (2 * selectors.whole.shape[1] + 4 if fine >= 0 else one) + (one if active else 0)


@compiled()
def dense_mlp(model, selectors, state, work, layer, bits, thread, n_threads):
    """All neurons; a thread takes consecutive ones."""
    n = model.fc1_bias.shape[1]
    work.partial[1, thread], read = 0, 0
    for neuron in range(n * thread // n_threads, n * (thread + 1) // n_threads):
        read += one_neuron(model, selectors, state, work, layer, neuron, bits, thread)
    work.bytes_read[thread, WEIGHTS] += read


@compiled()
def sparse_mlp(model, selectors, state, work, layer, thread, n_threads):
    """The neurons that all threads selected together, in equal shares whichever thread found them."""
    n = model.fc1_bias.shape[1]
    work.partial[1, thread], read = 0, 0
    total = 0
    for other in range(n_threads):
        total += work.counts[other, 0]
    start, stop = total * thread // n_threads, total * (thread + 1) // n_threads
    before = 0
    for other in range(n_threads):
        count, segment = work.counts[other, 0], n * other // n_threads
        for i in range(max(start - before, 0), min(stop - before, count)):
            bits = work.unit_rows[other, segment + i]
            read += one_neuron(model, selectors, state, work, layer, work.units[other, i], bits, thread)
        before += count
    work.bytes_read[thread, WEIGHTS] += read
