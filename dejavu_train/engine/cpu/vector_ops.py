"""Compiled sums over rows of weights and vectors: products with a list of rows, norms, rotation, and exp.

Plain loops that LLVM turns into vector instructions: sums may be reordered (``SUMS``), which is what lets it.
"""

from typing import Any

import numpy as np

from dejavu_train.engine.cpu.arrays import FLOAT16, FLOAT32, INT4, INT8, LEVELS
from dejavu_train.engine.cpu.half_numbers import widened
from dejavu_train.engine.cpu.level_products import lay_levels
from dejavu_train.engine.cpu.packed_rows import put_floats
from dejavu_train.engine.cpu.row_kernels import ROWS
from dejavu_train.engine.cpu.row_tiles import (
    HAS_AVX512,
    add_one,
    add_quad,
    add_two,
    dot_one,
    dot_quad,
    dot_two,
    without_lowest,
)
from dejavu_train.engine.cpu.threads import bits_from_float, compiled, float_from_bits

SUMS = {"reassoc", "contract", "nsz", "arcp"}
"""Freedoms of the compiler with floating-point sums: reorder and fuse them, and take the sign of zero for either."""


@compiled()
def dot_rows(rows, scales, group, numbers, first, n, operands, units, live, out):
    """`dot_list` of the four rows from ``first`` on."""
    bits = live
    while bits:
        if HAS_AVX512 and without_lowest(bits, 3):
            dot_quad(rows, scales, group, numbers, first, n, operands, units, bits, out)
            bits = without_lowest(bits, 4)
        elif without_lowest(bits, 1):
            dot_two(rows, scales, group, numbers, first, n, operands, units, bits, out)
            bits = without_lowest(bits, 2)
        else:
            dot_one(rows, scales, group, numbers, first, n, operands, units, bits, out)
            bits = 0


@compiled()
def dot_list(rows, scales, group, numbers, n, operands, units, live, out):
    """out[b, i] = row numbers[i] times operands[b], for the first n of the list and every batch row b in ``live``.

    Args:
        numbers: (at least n) int32. operands (B + 1, D), units (at least B) fp32, out (B, at least n + 3) fp32.
    """
    dot_window(rows, scales, group, numbers, 0, n, n, operands, units, live, out)


@compiled()
def dot_window(rows, scales, group, numbers, start, stop, n, operands, units, live, out):
    """`dot_list` of a list of n, for i from start to stop alone."""
    for i in range(start, stop, ROWS):
        dot_rows(rows, scales, group, numbers, i, n, operands, units, live, out)


@compiled()
def add_list(out, rows, scales, group, numbers, factors, start, stop, live):
    """out[b] += factors[b, i] times row numbers[i], for i from start to stop and every batch row b in ``live``.

    A batch row whose next four factors are zero takes no part: in a union of several rows most are.

    Args:
        out: (B + 1, D) fp32. numbers (at least stop) int32, factors (B, at least stop) fp32.
    """
    for i in range(start, stop, ROWS):
        bits = live
        if without_lowest(live, 1):
            bits, last = 0, min(i + ROWS, stop)
            for b in range(factors.shape[0]):
                if live >> b & 1:
                    found: Any = False
                    for j in range(i, last):
                        found = found or factors[b, j] != np.float32(0)
                    bits |= np.int64(found) << b
        while bits:
            if HAS_AVX512 and without_lowest(bits, 3):
                add_quad(out, rows, scales, group, numbers, factors, i, stop, bits)
                bits = without_lowest(bits, 4)
            elif without_lowest(bits, 1):
                add_two(out, rows, scales, group, numbers, factors, i, stop, bits)
                bits = without_lowest(bits, 2)
            else:
                add_one(out, rows, scales, group, numbers, factors, i, stop, bits)
                bits = 0


@compiled()
def dot_stored(model, packed, numbers, start, stop, n, operands, units, live, out):
    """`dot_window` of rows of a model, of 4 bits where ``packed``."""
    if packed:
        scales, group = model.pair_scales, model.pair_group
        dot_window(model.pairs, scales, group, numbers, start, stop, n, operands, units, live, out)
    else:
        dot_window(model.rows, model.scales, model.group, numbers, start, stop, n, operands, units, live, out)


@compiled()
def sum_stored(model, packed, out, numbers, factors, start, stop, live, units):
    """`add_list` of rows of a model, of 4 bits where ``packed``, onto zeros. See `sum_packed`."""
    if packed:
        rows, scales, most, group = model.pairs, model.pair_scales, model.pair_most, model.pair_group
        sum_packed(out, rows, scales, most, group, numbers, factors, start, stop, live, units)
    else:
        add_list(out, model.rows, model.scales, model.group, numbers, factors, start, stop, live)


@compiled()
def sum_packed(out, rows, scales, most, group, numbers, factors, start, stop, live, units):
    """`add_list` of packed rows onto zeros. Factors and units (at least B) fp32 are written over.

    A row times its factor is off by at most half a unit times its codes.
    """
    for b in range(factors.shape[0]):
        if live >> b & 1:
            units[b] = divide_by_unit(most, numbers, factors[b], start, stop)
    add_list(out, rows, scales, group, numbers, factors, start, stop, live)
    for b in range(factors.shape[0]):
        if live >> b & 1:
            put_floats(out[b], units[b])


@compiled(fastmath=SUMS)
def divide_by_unit(most, numbers, factors, start, stop):
    """Divide factors by a unit in which their products with scales are levels, and no sum of codes overflows.

    The unit is not finite where a factor is not.
    """
    largest, total = np.float32(0), np.float32(0)
    for i in range(start, stop):
        size = abs(factors[i]) * most[numbers[i]]
        largest = max(largest, size)
        total += size
    unit, least = largest / np.float32(LEVELS), total * np.float32(8 / 2**30)  # the largest code, half of int32
    if not least <= unit:
        unit = least
    if unit == np.float32(0):
        unit = np.float32(1)
    factor = np.float32(1) / unit
    for i in range(start, stop):
        factors[i] *= factor
    return unit


@compiled()
def round_to_levels(x, most, levels):
    """x (D,) as whole numbers in -most..most into levels (D,) int16: x ~ level * unit. Returns the unit.

    Levels lie as products of codes take them, see `level_products`.

    Off by at most half a unit a column, so a product with weights w by at most unit / 2 * sum |w|. NaN makes the unit
    NaN, and so all that is multiplied with it.
    """
    largest = np.int32(0)
    for j in range(x.shape[0]):
        largest = max(largest, bits_from_float(x[j]) & np.int32(0x7FFFFFFF))  # whole numbers, as vectors take them
    if largest == 0:
        largest = bits_from_float(np.float32(1))
    factor = np.float32(most) / float_from_bits(largest)
    for j in range(x.shape[0]):
        levels[j] = np.int16(np.int32(np.rint(x[j] * factor)))
    lay_levels(levels)
    return float_from_bits(largest) / np.float32(most)


@compiled(fastmath=SUMS)
def stored_products(float32, float16, int8, int4, kind, offset, scale, x, start, stop, out):
    """Rows ``start`` to ``stop`` of a predictor's matrix times x (n,), times scale (rows,), into out (rows,).

    The matrix starts at element ``offset`` of the flat array of its kind.
    """
    n = x.shape[0]
    if kind == FLOAT32:
        for r in range(start, stop):
            floats, total = float32[offset + r * n : offset + (r + 1) * n], np.float32(0)
            for j in range(n):
                total += floats[j] * x[j]
            out[r] = total * scale[r]
    elif kind == FLOAT16:
        for r in range(start, stop):
            halves, total = float16[offset + r * n : offset + (r + 1) * n], np.float32(0)
            for j in range(n):
                total += widened(halves[j]) * x[j]
            out[r] = total * scale[r]
    elif kind == INT8:
        for r in range(start, stop, 4):  # four at once read x once; of what is no multiple, the last row again
            second, third, fourth = min(r + 1, stop - 1), min(r + 2, stop - 1), min(r + 3, stop - 1)
            codes, total = int8[offset + r * n : offset + (r + 1) * n], np.float32(0)
            codes_2, total_2 = int8[offset + second * n : offset + (second + 1) * n], np.float32(0)
            codes_3, total_3 = int8[offset + third * n : offset + (third + 1) * n], np.float32(0)
            codes_4, total_4 = int8[offset + fourth * n : offset + (fourth + 1) * n], np.float32(0)
            for j in range(n):
                total += np.float32(codes[j]) * x[j]
                total_2 += np.float32(codes_2[j]) * x[j]
                total_3 += np.float32(codes_3[j]) * x[j]
                total_4 += np.float32(codes_4[j]) * x[j]
            out[r], out[second] = total * scale[r], total_2 * scale[second]
            out[third], out[fourth] = total_3 * scale[third], total_4 * scale[fourth]
    else:
        low, high = (n + 1) // 2, n // 2
        first, second = x[:low], x[low:]
        raised = np.float32(0)
        for j in range(n):
            raised += x[j]
        for r in range(start, stop):
            pairs, total = int4[offset + r * low : offset + (r + 1) * low], np.float32(0)
            for j in range(high):
                pair = np.int32(pairs[j])
                total += np.float32(pair & 15) * first[j] + np.float32(pair >> 4) * second[j]
            if high < low:
                total += np.float32(pairs[high] & 15) * first[high]
            out[r] = (total - np.float32(8) * raised) * scale[r]


@compiled(fastmath=SUMS)
def stored_sums(float32, float16, int8, int4, kind, offset, x, units, start, stop, out):
    """x (rank,) times columns ``start`` to ``stop`` of a predictor's matrix (rank, units), into out (units,).

    The matrix starts at element ``offset`` of the flat array of its kind. Of int4 a byte holds rows k and k + half the
    rank. Sums run along the units: ranks are too short for vector instructions.
    """
    # Slices, because an index that counts from ``start`` might be negative for all that the compiler knows.
    sums, rank = out[start:stop], x.shape[0]
    n = sums.shape[0]
    for i in range(n):
        sums[i] = 0
    if kind == INT4:
        low, raised = (rank + 1) // 2, np.float32(0)
        for k in range(rank):
            raised += x[k]
        for k in range(low):
            pairs = int4[offset + k * units + start : offset + k * units + stop]
            first, second = x[k], x[low + k] if low + k < rank else np.float32(0)
            for i in range(n):
                pair = np.int32(pairs[i])
                sums[i] += np.float32(pair & 15) * first + np.float32(pair >> 4) * second
        for i in range(n):
            sums[i] -= np.float32(8) * raised
        return
    if kind == INT8:
        for k in range(0, rank, 4):  # four at once read the sums once; what is no multiple is read again, times 0
            second, third, fourth = min(k + 1, rank - 1), min(k + 2, rank - 1), min(k + 3, rank - 1)
            codes = int8[offset + k * units + start : offset + k * units + stop]
            codes_2 = int8[offset + second * units + start : offset + second * units + stop]
            codes_3 = int8[offset + third * units + start : offset + third * units + stop]
            codes_4 = int8[offset + fourth * units + start : offset + fourth * units + stop]
            factor, factor_2 = x[k], x[second] if second > k else np.float32(0)
            factor_3 = x[third] if third > second else np.float32(0)
            factor_4 = x[fourth] if fourth > third else np.float32(0)
            for i in range(n):
                sums[i] += (np.float32(codes[i]) * factor + np.float32(codes_2[i]) * factor_2) + (
                    np.float32(codes_3[i]) * factor_3 + np.float32(codes_4[i]) * factor_4
                )
        return
    for k in range(rank):
        here, factor = offset + k * units + start, x[k]
        if kind == FLOAT32:
            floats = float32[here : here + n]
            for i in range(n):
                sums[i] += floats[i] * factor
        else:
            halves = float16[here : here + n]
            for i in range(n):
                sums[i] += widened(halves[i]) * factor


@compiled(fastmath=SUMS)
def layer_norm(x, weight, bias, eps, centred, out):
    """x -> out, fp32, both at least as long as weight (d,). Returns the sum of squares around x's mean, or around 0.

    ``centred``: LayerNorm, else RMSNorm. Out may be x.
    """
    d = weight.shape[0]
    total = np.float32(0)
    for j in range(d):
        total += x[j]
    mean = total / np.float32(d) if centred else np.float32(0)
    squares = np.float32(0)
    for j in range(d):
        squares += (x[j] - mean) * (x[j] - mean)
    factor = np.float32(1) / np.sqrt(squares / np.float32(d) + np.float32(eps))
    for j in range(d):
        out[j] = (x[j] - mean) * factor * weight[j] + bias[j]
    return squares


@compiled(fastmath=SUMS)
def norm(x):
    """The Euclidean length of x (n,)."""
    squares = np.float32(0)
    for j in range(x.shape[0]):
        squares += x[j] * x[j]
    return np.sqrt(squares)


@compiled()
def turn(x, cosines, sines):
    """Turn the first r of x (e,), in place, by angles with these cosines and sines (r / 2)."""
    half = cosines.shape[0]
    for k in range(half):
        low, high = x[k], x[half + k]
        x[k] = low * cosines[k] - high * sines[k]
        x[half + k] = high * cosines[k] + low * sines[k]


@compiled()
def copy(out, values):
    """values (n,) into out (at least n)."""
    for j in range(values.shape[0]):
        out[j] = values[j]


@compiled()
def scale_and_shift(out, scale, bias):
    """out (n,) times scale (n,) plus bias (n,)."""
    for i in range(out.shape[0]):
        out[i] = out[i] * scale[i] + bias[i]


@compiled()
def add(out, values):
    """Add values (n,) to out (at least n)."""
    for j in range(values.shape[0]):
        out[j] += values[j]


@compiled()
def move_product(out, values, scale):
    """Add values times scale, both (n,), to out (at least n), and leave values zero."""
    for j in range(scale.shape[0]):
        out[j] += values[j] * scale[j]
        values[j] = 0


@compiled()
def exp_negative(x):
    """exp(x) of an fp32 x of at most 0, to 2 units in the last place: 2^k times a polynomial (Cephes' expf)."""
    x = max(x, np.float32(-87.0))
    k = np.rint(x * np.float32(1.44269504088896341))
    r = (x - k * np.float32(0.693359375)) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * float_from_bits((np.int32(k) + np.int32(127)) << np.int32(23))


@compiled()
def tanh(x):
    """Hyperbolic tangent of an fp32 x, off by some 1e-7 at most."""
    power = exp_negative(np.float32(-2) * abs(x))
    size = (np.float32(1) - power) / (np.float32(1) + power)
    return -size if x < np.float32(0) else size


@compiled()
def cap(values, most):
    """most * tanh(values / most) of values (n,), in place."""
    for i in range(values.shape[0]):
        values[i] = np.float32(most) * tanh(values[i] / np.float32(most))
