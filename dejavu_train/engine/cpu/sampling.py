"""Compiled choice of the next token from the logits, with the rules of `dejavu_train.kernels.sample.sampling`.

greedy:      the largest logit, ties to the lowest id.
temperature: argmax(logits / temperature + Gumbel noise), noise from (seed[b], t, id).
top-p:       the same over the smallest set of most likely tokens whose probability reaches top_p.
top-k:       the same over the top_k most likely tokens (ties stay), and among these as top-p.
min-p:       of what these leave, tokens whose probability is at least min_p times the largest.

A temperature of 0 is greedy. Before all of it the logits of tokens that a row holds are made less likely: see
`penalise`. Before position `least` the tokens of `stops` are not chosen.
tokens[b, t + 1] = known there (a prompt, or teacher forcing) or chosen. position[b] = t + 1 while the row is not done.
"""

from typing import Any

import numpy as np

from dejavu_train.engine.cpu.arrays import DENSE, DONE, GREEDY, SPARSE
from dejavu_train.engine.cpu.threads import bits_from_float, compiled, float_from_bits
from dejavu_train.engine.cpu.vector_ops import SUMS, exp_negative

LOWEST = np.finfo(np.float32).min  # a logit below it is -inf


@compiled(fastmath=SUMS)
def largest_of(logits):
    """The id of the largest logit (V,), the lowest of equal ones. 0 where all are NaN."""
    best = -np.float32(np.inf)
    for i in range(logits.shape[0]):
        value = logits[i]
        best = value if value > best else best  # no max(), whose rules for NaN and zeros keep it from vectors
    for i in range(logits.shape[0]):
        if logits[i] == best:
            return i
    return 0


@compiled(fastmath=SUMS)
def to_weights(logits, best, cut, temperature):
    """logits (V,) -> exp((logits - best) / temperature) in place, 0 of those below ``cut``. Returns their sum."""
    total: Any = 0.0
    for i in range(logits.shape[0]):
        weight = exp_negative((logits[i] - best) / temperature) if logits[i] >= cut else np.float32(0)
        logits[i] = weight
        total += weight
    return total


@compiled(fastmath=SUMS)
def mass_from(weights, bits):
    """Sum of the weights (V,) whose bit pattern is at least ``bits``: of positive numbers, the larger ones."""
    total: Any = 0.0
    for i in range(weights.shape[0]):
        weight = weights[i]
        total += weight if bits_from_float(weight) >= bits else np.float32(0)
    return total


@compiled()
def top_p_bits(weights, mass):
    """The bit pattern of the smallest weight in the smallest set of largest weights whose sum reaches ``mass``."""
    low, high = np.int32(0), np.int32(0x3F800001)  # weights lie in 0..1; the sum from low reaches it, from high not
    while high - low > 1:
        middle = low + (high - low) // np.int32(2)
        if mass_from(weights, middle) >= mass:
            low = middle
        else:
            high = middle
    return low


@compiled()
def bar_stops(state, b, start, logits):
    """Where row b may not end yet: its stop tokens to -inf in logits (n,), those of the tokens from ``start`` on."""
    if state.position[b] + 1 < state.least[b]:
        for stop in state.stops:
            if start <= stop < start + logits.shape[0]:
                logits[stop - start] = -np.float32(np.inf)


@compiled()
def penalise(state, b, start, logits):
    """Make tokens that row b holds less likely, in logits (n,), those of the tokens from ``start`` on.

    seen: twice as often as the token was generated, and 1 where the prompt holds it.
    """
    repetition, presence, frequency = state.repetition[b], state.presence[b], state.frequency[b]
    if repetition == np.float32(1) and presence == np.float32(0) and frequency == np.float32(0):
        return
    seen = state.seen[state.sequence[b]]
    for i in range(logits.shape[0]):
        times = seen[start + i]
        if times > 0:
            value = logits[i]
            value = value * repetition if value < np.float32(0) else value / repetition
            if times > 1:
                value -= presence + frequency * np.float32(times >> 1)
            logits[i] = value


@compiled()
def count_from(logits, cut):
    """How many logits (V,) are at least ``cut``."""
    count: Any = 0
    for i in range(logits.shape[0]):
        count += logits[i] >= cut
    return count


@compiled()
def ordered(bits):
    """The 32 bits of an fp32 number as a whole number that is larger for a larger number, and the other way round."""
    return np.int32(bits) ^ (np.int32(bits) >> 31 & 0x7FFFFFFF)


@compiled()
def top_k_cut(logits, best, top_k):
    """A number that exactly the ``top_k`` largest logits (V,) reach, the smallest of them where others equal it."""
    low, high = ordered(bits_from_float(LOWEST)), ordered(bits_from_float(best)) + 1
    while high - low > 1:  # low is reached by top_k or more, if any number is, and high by fewer
        middle = low + (high - low) // 2
        cut = float_from_bits(np.int32(ordered(middle)))
        count = count_from(logits, cut)
        if count == top_k:
            return cut
        if count > top_k:
            low = middle
        else:
            high = middle
    return float_from_bits(np.int32(ordered(low)))


@compiled()
def mixed(z):
    """Sixty-four bits that look random, of sixty-four that are counted: splitmix64."""
    z += np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled()
def draw(logits, best, state, b, at):
    """A random id from logits (V,), which are overwritten. Best is the largest.

    The id with the largest logit + Gumbel noise is the one with the smallest waiting time -log(1 - u) / weight. A time
    is at least u / weight, so that most ids need no logarithm. Two close distributions choose the same id mostly.
    """
    top_k, top_p, min_p = state.top_k[b], state.top_p[b], state.min_p[b]
    cut = top_k_cut(logits, best, top_k) if top_k > 0 else LOWEST
    total = to_weights(logits, best, cut, state.temperature[b])
    bits = bits_from_float(min_p)  # the weight of the likeliest token is 1
    if top_p < 1:
        bits = max(bits, top_p_bits(logits, total * np.float64(top_p)))
    start = mixed(mixed(np.uint64(state.seed[b])) + np.uint64(at))
    soonest, chosen = np.inf, 0
    for i in range(logits.shape[0]):
        weight = np.float64(logits[i])
        u = np.float64(mixed(start + np.uint64(i)) >> np.uint64(11)) * 2.0**-53
        if u < soonest * weight and bits_from_float(logits[i]) >= bits and weight > 0:
            time = -np.log1p(-u) / weight
            if time < soonest:
                soonest, chosen = time, i
    return chosen


@compiled(fastmath=SUMS)
def negative_log_likelihood(logits, token):
    """-log p(token) for logits (V,)."""
    best = logits[0]
    for i in range(logits.shape[0]):
        best = max(best, logits[i])
    total: Any = 0.0
    for i in range(logits.shape[0]):
        total += exp_negative(logits[i] - best)
    return np.log(total) + np.float64(best) - np.float64(logits[token])


@compiled()
def not_finite(logits):
    """Whether a logit (V,) is NaN or infinite."""
    largest = np.int32(0)
    for i in range(logits.shape[0]):
        largest = max(largest, bits_from_float(logits[i]) & np.int32(0x7FFFFFFF))
    return largest >= np.int32(0x7F800000)


@compiled()
def head_needed(state, score):
    """Whether any row needs logits: not where the next token is known and not scored."""
    for b in range(state.row_state.shape[0]):
        wanted = score or state.scored[b] or state.position[b] + 1 >= state.known[b]
        if state.row_state[b] != DONE and wanted:
            return True
    return False


@compiled()
def scored_rows(state):
    """Bits of the rows whose logits are kept."""
    found = 0
    for b in range(state.scored.shape[0]):
        if state.scored[b]:
            found |= 1 << b
    return found


@compiled()
def look_for_faults(state, work, b, n_threads):
    """The row's fault becomes its next position where a logit is not finite, if it has none."""
    for thread in range(n_threads):
        if state.fault[b] == 0 and work.faulty[thread, b]:
            state.fault[b] = state.position[b] + 1


@compiled()
def choose(state, work, b, mode, n_threads):
    """The next token of row b, from work.logits (B, V)."""
    logits = work.logits[b]
    likeliest = work.best_token[0, b]
    for thread in range(n_threads):
        token = work.best_token[thread, b]
        likeliest = token if logits[token] > logits[likeliest] else likeliest
    if mode == GREEDY or state.temperature[b] == np.float32(0):
        return np.int64(likeliest)
    return np.int64(draw(logits, logits[likeliest], state, b, state.position[b] + 1))


@compiled()
def is_stop(state, token):
    """Whether a token ends a row."""
    found = False
    for stop in state.stops:
        found |= stop == token
    return found


@compiled()
def advance(state, work, mode, score, n_threads):
    """Give every row that is not done its next token."""
    for b in range(state.row_state.shape[0]):
        if state.row_state[b] == DONE:
            continue
        at, own = state.position[b] + 1, state.sequence[b]
        known = at < state.known[b]
        if score or not known:
            look_for_faults(state, work, b, n_threads)
        if known:
            token = np.int64(state.tokens[own, at])
            if score:
                state.nll[own, at] = negative_log_likelihood(work.logits[b], token)
        else:
            token = choose(state, work, b, mode, n_threads)
        state.tokens[own, at] = token
        state.seen[own, token] = (state.seen[own, token] | 1) if known else state.seen[own, token] + 2
        state.position[b] = at
        if (is_stop(state, token) and not known) or state.fault[b] or at + 1 >= state.limit[b]:
            state.row_state[b] = DONE
        else:
            state.row_state[b] = DENSE if at < state.sparse_from[b] else SPARSE
