"""Predict and select for 2 to 8 batch rows with a predictor of nibbles, on the tensor cores.

    hidden[b, r] = act(scale[r] sum_j down[r, j] x[b, j])                                       `predict_down_nibbles`
    row b selects neuron i where up_scale[i] sum_r up[i, r] hidden[b, r] + bias[i] > threshold  `select_nibbles_batch`

x (B, d) fp16, down (rank, d / 2) and up (n, rank / 2) bytes as a bundle stores them (`codes`). A warp multiplies
sixteen rows with eight columns of B (`int4_mma`). Four bytes are a word, whose pairs of columns are bytes 0 and 2, low
and high nibbles, and bytes 1 and 3. Products are exact, sums in fp32. All words are on their way before the wait.

A program of `predict_down_nibbles` has sixteen rows and all their columns. It leaves hidden as the other kernel reads
it, "planes" (2, B, rank / 8, 4) of fp16 pairs: of each word of a row of `up` the four pairs that meet its codes, first
of the nearest fp16 numbers, then of what is left (`select_batch.saturated`). Up to four rows have their two parts in
neighbouring columns of B, more take a product each. |hidden| beyond 131,008, twice fp16's largest number, is cut off.

In plain torch: `select.predict_reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_tensor, require
from dejavu_train.kernels.common.int4_mma import int4_mma, tile_sums
from dejavu_train.kernels.common.int4_tiles import ASSEMBLY, neighbours, word_vector
from dejavu_train.kernels.common.launch import programmatic, start_dependents_and_wait, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS, takes_nibbles
from dejavu_train.kernels.mlp.predictor import Predictor
from dejavu_train.kernels.mlp.select_batch import saturated, store_chosen_rows

WARPS = 4  # of a program that selects
DOWN_WARPS = 8


@triton.jit
def _row_words(rows, at, there, first_unit, lane, W: tl.constexpr, UNITS: tl.constexpr, STRIDE: tl.constexpr):
    """A lane's words of UNITS units, every STRIDE-th from first_unit on: for each V of row g, then V of row g + 8.

    rows: how many words lie between rows g and g + 8. at: to a lane's row g. there: whether either row is one.
    """
    V: tl.constexpr = word_vector(W)
    words = ()
    for k in tl.static_range(UNITS):
        word = (first_unit + k * STRIDE) * (4 * V) + lane % 4 * V
        words = words + neighbours(at + word, there[0] & (word < W), V) + neighbours(
            at + rows + word, there[1] & (word < W), V
        )  # fmt: skip
    return words


@triton.jit
def _input_planes(x, word, W: tl.constexpr):
    """The planes of x for V words of a row from `word` on. x: to a lane's input, its pairs of fp16 as int32."""
    V: tl.constexpr = word_vector(W)
    planes = ()
    if V == 1:
        low = neighbours(x + 2 * word, word < W, 2)  # columns 4 w .. 4 w + 3
        high = neighbours(x + 2 * (W + word), word < W, 2)
        planes = (_evens(low), _evens(high), _odds(low), _odds(high))
    for v in tl.static_range(0, V // 2 * 2, 2):
        low = neighbours(x + 2 * (word + v), word < W, 4)
        high = neighbours(x + 2 * (W + word + v), word < W, 4)
        for k in tl.static_range(2):
            lows = low[2 * k : 2 * k + 2]
            highs = high[2 * k : 2 * k + 2]
            planes = planes + (_evens(lows), _evens(highs), _odds(lows), _odds(highs))
    return planes


@triton.jit
def _evens(pairs):
    """The pair of numbers 0 and 2 of two pairs."""
    return (pairs[0] & 0xFFFF) | (pairs[1] << 16)


@triton.jit
def _odds(pairs):
    """The pair of numbers 1 and 3."""
    return ((pairs[0] >> 16) & 0xFFFF) | (pairs[1] & -65536)


@triton.jit(do_not_specialize=["batch", "n_rows"])
def _predict_nibbles_kernel(
    x, down, scale, planes, count, batch, n_rows,
    D: tl.constexpr, L: tl.constexpr, RELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D // 8
    V: tl.constexpr = word_vector(W)
    ALL_WARPS: tl.constexpr = L // 32
    UNITS: tl.constexpr = (W + 4 * V * ALL_WARPS - 1) // (4 * V * ALL_WARPS)  # of a warp
    lane = tl.arange(0, L)
    group = lane % 32 // 4
    row = tl.program_id(0) * 16 + group
    at = down.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * W
    words = _row_words(8 * W, at, (row < n_rows, row + 8 < n_rows), lane // 32, lane, W, UNITS, ALL_WARPS)
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    own_scale = tl.load(scale + rows, mask=rows < n_rows, other=0.0)
    start_dependents_and_wait(PDL)  # what follows has words of its own to load
    if count is not None:
        tl.store(count, 0, mask=tl.program_id(0) == 0)
    its = x + tl.minimum(group, batch - 1).to(tl.int64) * (4 * W)
    zero = tl.zeros((L,), tl.float32)
    sums = (zero, zero, zero, zero)
    for k in tl.static_range(UNITS):
        word = (lane // 32 + k * ALL_WARPS) * (4 * V) + lane % 4 * V
        part = int4_mma(words[2 * V * k : 2 * V * k + 2 * V], _input_planes(its, word, W), V)
        sums = (sums[0] + part[0], sums[1] + part[1], sums[2] + part[2], sums[3] + part[3])
    values = tile_sums(sums, L, 8) * own_scale[:, None]
    if RELU:
        values = tl.where(values <= 0, 0.0, values)  # keeps a NaN
    # Column r of a row of `up` lies in byte b of word w: in its low nibble, or from rank / 2 on in the high one.
    half = n_rows // 2
    byte = rows % half
    place = byte // 4 * 8 + (byte % 2 * 2 + rows // half) * 2 + byte % 4 // 2
    b = tl.arange(0, 8)
    to = planes + b[None, :].to(tl.int64) * n_rows + place[:, None]
    there = (rows < n_rows)[:, None] & (b < batch)[None, :]
    nearest = saturated(values, tl.float16)
    tl.store(to, nearest, mask=there)
    tl.store(to + batch * n_rows, saturated(values - nearest.to(tl.float32), tl.float16), mask=there)


@triton.jit
def _touch(at, ASM: tl.constexpr = ASSEMBLY):
    """Loads what lies there, and 32 bytes around it, into the L1. Nobody waits for it."""
    if ASM:
        tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _hidden_planes(planes, word, W: tl.constexpr):
    """The planes of hidden for V words of a row of `up`. planes: to a lane's row and part."""
    V: tl.constexpr = word_vector(W)
    found = ()
    for v in tl.static_range(V):
        found = found + neighbours(planes + 4 * (word + v), word + v < W, 4)
    return found


@triton.jit(do_not_specialize=["n", "batch"])
def _select_nibbles_kernel(
    planes, up, up_scale, bias, threshold_ptr, threshold, row_state, ids, counts, row_bits, logits_ptr, listed, count,
    n, batch, RANK: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PAIRED: the two parts of hidden lie in neighbouring columns of B, of up to four batch rows."""
    W: tl.constexpr = RANK // 8
    V: tl.constexpr = word_vector(W)
    UNITS: tl.constexpr = (W + 4 * V - 1) // (4 * V)
    ROUNDS: tl.constexpr = BLOCK // (L // 2)
    T: tl.constexpr = 4 if PAIRED else 8
    PARTS: tl.constexpr = 1 if PAIRED else 2
    lane = tl.arange(0, L)
    group = lane % 32 // 4
    words = ()
    for k in tl.static_range(ROUNDS):
        row = tl.program_id(0) * BLOCK + k * (L // 2) + lane // 32 * 16 + group
        at = up.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * W
        words = words + _row_words(8 * W, at, (row < n, row + 8 < n), 0, lane, W, UNITS, 1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    scale = tl.load(up_scale + rows, mask=inside, other=0.0)
    offset = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    b = tl.arange(0, T)
    if threshold_ptr is not None:
        limit = tl.load(threshold_ptr)
    else:
        limit = threshold
    state = None
    if row_state is not None:
        state = tl.load(row_state + b, mask=b < batch, other=0)[None, :]
    if PAIRED:
        token = group // 2
        first = planes + group % 2 * batch * (4 * W)
    else:
        token = group
        first = planes
    first += tl.minimum(token, batch - 1) * (4 * W)
    zero = tl.zeros((L,), tl.float32)
    for k in tl.static_range((T * W + L - 1) // L):  # all of hidden comes to the L1 at once, not unit after unit
        _touch(planes + 8 * tl.minimum(k * L + lane, batch * W - 1))
    sums = ()
    for _ in tl.static_range(ROUNDS):
        sums = sums + (zero, zero, zero, zero)
    for unit in tl.static_range(UNITS):
        word = unit * (4 * V) + lane % 4 * V
        parts = (_hidden_planes(first, word, W),)
        if not PAIRED:
            parts = parts + (_hidden_planes(first + batch * (4 * W), word, W),)
        more = ()
        for k in tl.static_range(ROUNDS):
            own = words[(k * UNITS + unit) * 2 * V : (k * UNITS + unit + 1) * 2 * V]
            total = sums[4 * k : 4 * k + 4]
            for part in tl.static_range(PARTS):
                found = int4_mma(own, parts[part], V)
                total = (total[0] + found[0], total[1] + found[1], total[2] + found[2], total[3] + found[3])
            more = more + total
        sums = more
    rounds = ()
    for k in tl.static_range(ROUNDS):
        if PAIRED:  # a lane's two columns are the two parts of one batch row
            upper = sums[4 * k] + sums[4 * k + 1]
            lower = sums[4 * k + 2] + sums[4 * k + 3]
            lanes = tl.reshape(tl.join(upper, lower), (L // 32, 8, 4, 2))
            tile = tl.permute(lanes, (0, 3, 1, 2))
        else:
            evens = tl.join(sums[4 * k], sums[4 * k + 2])
            odds = tl.join(sums[4 * k + 1], sums[4 * k + 3])
            lanes = tl.reshape(tl.join(evens, odds), (L // 32, 8, 4, 2, 2))
            tile = tl.permute(lanes, (0, 3, 1, 2, 4))
        rounds = rounds + (tl.reshape(tile, (L // 2, T)),)
    if ROUNDS == 1:
        products = rounds[0]
    else:
        both = tl.permute(tl.join(rounds[0], rounds[1]), (2, 0, 1))
        products = tl.reshape(both, (BLOCK, T))
    logits = products * scale[:, None] + offset[:, None]
    some = store_chosen_rows(
        logits, limit, state, b, rows, tl.program_id(0), ids, counts, row_bits, logits_ptr, n, batch, BLOCK
    )
    if listed is not None:
        begin = tl.atomic_add(count, tl.sum(some, 0), sem="relaxed")
        place = begin + tl.cumsum(some, 0) - 1
        tl.store(listed + place, rows, mask=(some != 0) & (place < n))  # a count that was not zero writes nothing else


def predict_down_nibbles(
    x: Tensor, down: Tensor, scale: Tensor, planes: Tensor, relu: bool, pdl: bool, count: Tensor | None = None
) -> None:
    """x (B, d) fp16, down (rank, d / 2) uint8, scale (rank,) fp32 -> planes (2, B, rank) fp16. count (1): set to zero.

    Errors: shapes, dtypes, devices.
    """
    batch, d = x.shape
    rank = len(down)
    check_tensor("x", x, (batch, d), (torch.float16,), x)
    check_tensor("predictor.down", down, (rank, d // 2), (torch.uint8,), x)
    check_tensor("predictor.down_scale", scale, (rank,), (torch.float32,), x)
    check_tensor("planes", planes, (2, batch, rank), (torch.float16,), x)
    require(
        takes_nibbles(batch, rank, d),
        f"{batch} rows of {d} columns, rank {rank}: nibbles of several rows want {WANTED}",
    )
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_nibbles_kernel[(triton.cdiv(rank, 16),)](
        x.view(torch.int32), down, scale, planes, count, batch, rank, D=d, L=32 * DOWN_WARPS, RELU=relu, PDL=has_pdl,
        num_warps=DOWN_WARPS, launch_pdl=use_pdl,
    )  # fmt: skip


def check_block(block: int) -> None:
    """Raise ValueError for a number of neurons that a program cannot have."""
    lanes = 32 * WARPS
    require(block in (lanes // 2, lanes), f"blocks of {block} neurons, expected {lanes // 2} or {lanes}")


WANTED = f"2 to {MOST_TOKENS} rows, and a width and a rank that are multiples of 8"


def select_nibbles_batch(
    planes: Tensor, predictor: Predictor, row_state: Tensor | None, logits_out: Tensor | None, pdl: bool
) -> None:
    """The second half, of the planes that `predict_down_nibbles` leaves. The count of a list without gaps is zero.

    `select.predict_select`, which calls this, checks what it is given.
    """
    _, batch, rank = planes.shape
    weights, out = predictor.weights, predictor.selection
    has_pdl, use_pdl = programmatic(planes, pdl)
    _select_nibbles_kernel[(triton.cdiv(out.n, out.block),)](
        planes.view(torch.int32), weights.up, weights.up_scale, weights.bias, predictor.threshold, 0.0, row_state,
        out.ids, out.counts, out.row_bits, logits_out, *(predictor.listed or (None, None)), out.n, batch, RANK=rank,
        BLOCK=out.block, L=32 * WARPS, PAIRED=batch <= 4, PDL=has_pdl, num_warps=WARPS, launch_pdl=use_pdl,
    )  # fmt: skip
