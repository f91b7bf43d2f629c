"""The second half of an MLP predictor whose rows are nibbles, by the tensor cores' form of 4-bit rows (`int4_mma`).

    up[i] . hidden + bias[i] > threshold,   hidden (rank,) fp32, up (n, rank / 2) bytes, see `codes`

A warp multiplies 16 rows, a program L / 2 of them at a time. Byte b of a row holds column b in its low nibble and
column rank / 2 + b in its high one. Four bytes are a word of `int4_mma`, whose pairs of columns are then bytes 0 and 2,
low and high nibbles, and bytes 1 and 3. hidden is a sum of two fp16 numbers (`select_batch.saturated`), which lie in
neighbouring columns of B. Four units of a row lie side by side there, of which a lane group holds one part of one.
Products are exact, sums in fp32. All words are on their way before the wait.

In plain torch: `select.predict_select_reference`.
"""

import triton
import triton.language as tl

from dejavu_train.kernels.common.int4_mma import fp16_pairs, int4_mma
from dejavu_train.kernels.common.int4_tiles import neighbours, word_vector
from dejavu_train.kernels.common.launch import THROUGH_L1, wait_for_count, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_WORDS
from dejavu_train.kernels.mlp.select_batch import saturated, store_chosen


def takes(rank: int, block: int, lanes: int) -> bool:
    """Whether a program of so many threads can select `block` neurons by rows of this rank, all in registers."""
    rounds, vector = block // (lanes // 2), word_vector(rank // 8)
    words = 2 * rounds * vector * -(-rank // (32 * vector))
    return rank % 8 == 0 and block % (lanes // 2) == 0 and rounds in (1, 2, 4) and words <= MOST_WORDS


@triton.jit
def _part(z, part):
    """Of z (L,) fp32 the nearest fp16 number, or where `part` is 1 that of the rest."""
    rest = z - saturated(z, tl.float16).to(tl.float32)
    return tl.where(part == 0, z, rest)


@triton.jit
def _halves(low, high):
    """int32 pairs of fp16 of two tiles, beyond fp16's range its largest number."""
    return fp16_pairs(saturated(low, tl.float16).to(tl.float32), saturated(high, tl.float16).to(tl.float32))


@triton.jit
def hidden_planes(hidden, lane, W: tl.constexpr, CACHE: tl.constexpr = THROUGH_L1):
    """4 V planes for each four units of a row of W words: of the unit and the part that are a lane group's."""
    V: tl.constexpr = word_vector(W)
    part = lane % 32 // 4 % 2
    planes = ()
    for four in tl.static_range((W + 16 * V - 1) // (16 * V)):
        word = (4 * four + lane % 32 // 8) * (4 * V) + lane % 4 * V
        for v in tl.static_range(V):
            there = word + v < W
            low = neighbours(hidden + 4 * (word + v), there, 4, CACHE)
            high = neighbours(hidden + 4 * W + 4 * (word + v), there, 4, CACHE)
            planes = planes + (
                _halves(_part(low[0], part), _part(low[2], part)),
                _halves(_part(high[0], part), _part(high[2], part)),
                _halves(_part(low[1], part), _part(low[3], part)),
                _halves(_part(high[1], part), _part(high[3], part)),
            )
    return planes


@triton.jit
def select_nibbles(
    block_number,
    hidden,
    up,
    up_scale,
    bias,
    threshold,
    row_state,
    ids,
    counts,
    row_bits,
    n,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    PDL: tl.constexpr,
    arrived,
    COUNT: tl.constexpr,
):
    """A program's whole work, its wait included: list and bits of neurons block_number * BLOCK .. + BLOCK - 1.

    up: pointer to bytes, of rows whose words are whole (`takes`). COUNT: so many programs of this grid make hidden, and
    count themselves in `arrived`. 0: it is there.
    """
    W: tl.constexpr = RANK // 8
    V: tl.constexpr = word_vector(W)
    UNITS: tl.constexpr = (W + 4 * V - 1) // (4 * V)
    ROUNDS: tl.constexpr = BLOCK // (L // 2)
    lane = tl.arange(0, L)
    words = ()
    for k in tl.static_range(ROUNDS):
        for half in tl.static_range(2):
            row = block_number * BLOCK + k * (L // 2) + lane // 32 * 16 + lane % 32 // 4 + 8 * half
            at = up.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * W
            for unit in tl.static_range(UNITS):
                word = unit * (4 * V) + lane % 4 * V
                words = words + neighbours(at + word, (row < n) & (word < W), V)
    rows = block_number * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    scale = tl.load(up_scale + rows, mask=inside, other=0.0)
    offset = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    limit = tl.load(threshold)
    state = tl.load(row_state)
    wait_for_predecessor(PDL)
    if COUNT > 0:
        wait_for_count(arrived, COUNT)
        planes = hidden_planes(hidden, lane, W, ".cg")
    else:
        planes = hidden_planes(hidden, lane, W)
    sums = ()
    for k in tl.static_range(ROUNDS):
        first = tl.zeros((L,), tl.float32)
        second = tl.zeros((L,), tl.float32)
        for unit in tl.static_range(UNITS):
            parts = int4_mma(
                words[(2 * k * UNITS + unit) * V : (2 * k * UNITS + unit + 1) * V]
                + words[((2 * k + 1) * UNITS + unit) * V : ((2 * k + 1) * UNITS + unit + 1) * V],
                planes[unit // 4 * 4 * V : unit // 4 * 4 * V + 4 * V],
                V,
            )
            mine = lane % 4 == unit % 4
            first = tl.where(mine, first + parts[0] + parts[1], first)
            second = tl.where(mine, second + parts[2] + parts[3], second)
        total = tl.sum(tl.reshape(tl.join(first, second), (L // 32, 8, 4, 2)), 2)
        sums = sums + (tl.reshape(tl.permute(total, (0, 2, 1)), (L // 2,)),)
    if ROUNDS == 1:
        products = sums[0]
    elif ROUNDS == 2:
        products = tl.reshape(tl.trans(tl.join(sums[0], sums[1])), (BLOCK,))
    else:
        both = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))  # (L / 2, high bit, low bit)
        products = tl.reshape(tl.permute(both, (1, 2, 0)), (BLOCK,))
    logits = products * scale + offset
    store_chosen(logits, limit, state, rows, inside, block_number, ids, counts, row_bits, BLOCK)
