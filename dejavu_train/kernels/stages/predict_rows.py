"""The first half of a predictor for several rows: hidden[b, r] = act(scale[r] sum_j down[r, j] n[b, j]).

n (B, d) is normalised, down (rank, d) numbers or codes, sums in fp32. Two forms:

`predict_tiles`: a few hundred rows are too few programs for a GPU, so several share the columns of a row. A second
kernel adds their partial sums in a fixed order.

`predict_words`: nibbles for 2 to 8 rows of fp16. A warp multiplies sixteen rows with eight columns of B (`int4_mma`,
words as in `up_rows`). A program has sixteen rows and all their columns, whose words are on their way before the wait.
It leaves hidden as `up_rows.multiply_words` reads it: "planes" (2, B, rank / 8, 4) of fp16 pairs in the same bytes. Of
each word of a row of `up` these are the four pairs that meet its codes. The first plane has the nearest fp16 numbers,
the second what is left.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import FLOAT_TYPES, check_input, check_tensor, require
from dejavu_train.kernels.common.int4_mma import int4_mma, tile_sums
from dejavu_train.kernels.common.int4_tiles import neighbours, word_vector
from dejavu_train.kernels.common.launch import (
    dot_type,
    padded_batch,
    programmatic,
    start_dependents_and_wait,
    wait_for_predecessor,
)
from dejavu_train.kernels.common.limits import MOST_TOKENS, Products, takes_nibbles
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.stages.predictor import Predictor, check_down, down_reference
from dejavu_train.kernels.stages.select import check_selects
from dejavu_train.kernels.stages.up_rows import row_words, saturated, units_of

DOWN_WARPS = 8


@dataclass(frozen=True)
class PredictRowsSettings(Settings, stage="predict_rows"):
    """Settings of `predict_tiles`. block: columns of a step. stages: of its pipeline."""

    block: int
    stages: int
    warps: int


def predict_rows_reference(x: Tensor, predictor: Predictor) -> None:
    """Plain torch, in place, any number of rows: predictor.hidden of normalised x (B, d)."""
    predictor.hidden.copy_(down_reference(x.float(), predictor.weights))


@triton.jit(do_not_specialize=["batch", "n_rows"])
def _predict_tiles_kernel(
    x_ptr, w_ptr, partials_ptr, batch, n_rows, D: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial products of ROWS rows over STEPS x BLOCK columns."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BATCH)
    k = split * STEPS * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n_rows)[:, None]
    there = (b < batch)[None, :]
    wait_for_predecessor(PDL)
    at = w_ptr + rows.to(tl.int64)[:, None] * D + k[None, :]
    x_at = x_ptr + b[None, :] * D + k[:, None]
    acc = tl.zeros((ROWS, BATCH), tl.float32)
    for step in tl.range(0, STEPS * BLOCK, BLOCK, num_stages=STAGES):
        if D % (STEPS * BLOCK) == 0:
            w = tl.load(at + step, mask=inside, other=0.0)
            x = tl.load(x_at + step, mask=there, other=0.0)
        else:
            w = tl.load(at + step, mask=inside & (k + step < D)[None, :], other=0.0)
            x = tl.load(x_at + step, mask=there & (k + step < D)[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
    place = split * batch * n_rows + b[None, :] * n_rows + rows[:, None]
    tl.store(partials_ptr + place, acc, mask=inside & there)


@triton.jit(do_not_specialize=["size", "n_rows"])
def _add_splits_kernel(
    partials_ptr, scale_ptr, out_ptr, size, n_rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr, RELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    y = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        y += tl.load(partials_ptr + s * size + i, mask=i < size, other=0.0)
    if scale_ptr is not None:
        y = y * tl.load(scale_ptr + i % n_rows, mask=i < size, other=0.0)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps a NaN
    tl.store(out_ptr + i, y, mask=i < size)


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
def _predict_words_kernel(
    x, down, scale, planes, count, batch, n_rows, D: tl.constexpr, L: tl.constexpr, RELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D // 8
    V: tl.constexpr = word_vector(W)
    ALL_WARPS: tl.constexpr = L // 32
    UNITS: tl.constexpr = (units_of(W) + ALL_WARPS - 1) // ALL_WARPS  # of a warp
    lane = tl.arange(0, L)
    group = lane % 32 // 4
    row = tl.program_id(0) * 16 + group
    at = down.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * W
    words = row_words(8 * W, at, (row < n_rows, row + 8 < n_rows), lane // 32, lane, W, UNITS, ALL_WARPS)
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


def predict_rows(x: Tensor, predictor: Predictor, pdl: bool = False) -> None:
    """predictor.hidden (B, rank) of normalised x (B, d), in tiles or by words as the predictor's products say.

    Tiles take x in fp32 or 16 bits, and multiply in its dtype. Words take fp16, and set the count of a list without
    gaps to zero.

    Raises:
        ValueError: shapes, dtypes, a CPU tensor, or products that do not fit.
    """
    batch, d = check_input("x", x)
    own = predictor.weights
    check_down(predictor, batch, d)
    words = predictor.products is Products.WORDS
    wanted = f"2 to {MOST_TOKENS} rows, and a width and a rank that are multiples of 8"
    fits = not words or takes_nibbles(batch, len(own.down), d)
    require(fits, f"{batch} rows of {d} columns, rank {len(own.down)}: {wanted}")
    check_selects(predictor)
    if words:
        _predict_words(x, predictor, pdl)
    else:
        _predict_tiles(x, predictor, pdl)


def _predict_tiles(x: Tensor, predictor: Predictor, pdl: bool) -> None:
    own, (batch, d) = predictor.weights, x.shape
    rank = len(own.down)
    check_tensor("weight", own.down, (rank, d), (*FLOAT_TYPES, torch.int8), x)
    settings = PredictRowsSettings.find("float", x.device, bytes=x.element_size())
    block = settings.block
    blocks = -(-d // block)
    steps = -(-blocks // min(8, blocks))
    splits = -(-blocks // steps)
    partials = torch.empty(splits, batch, rank, dtype=torch.float32, device=x.device)
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_tiles_kernel[(-(-rank // 16), splits)](
        x, own.down, partials, batch, rank, D=d, BATCH=padded_batch(batch), ROWS=16, BLOCK=block, STEPS=steps,
        STAGES=settings.stages, DOT=dot_type(x.dtype), PDL=has_pdl, num_warps=settings.warps, launch_pdl=use_pdl,
    )  # fmt: skip
    _add_splits_kernel[(-(-batch * rank // 256),)](
        partials, own.down_scale, predictor.hidden, batch * rank, rank, SPLITS=splits, BLOCK=256, RELU=own.relu,
        PDL=has_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip


def _predict_words(x: Tensor, predictor: Predictor, pdl: bool) -> None:
    own, (batch, d) = predictor.weights, x.shape
    rank, count = len(own.down), None if predictor.listed is None else predictor.listed[1]
    check_tensor("x", x, (batch, d), (torch.float16,), x)
    check_tensor("predictor.down", own.down, (rank, d // 2), (torch.uint8,), x)
    has_pdl, use_pdl = programmatic(x, pdl)
    _predict_words_kernel[(triton.cdiv(rank, 16),)](
        x.view(torch.int32), own.down, own.down_scale, predictor.hidden.view(torch.float16), count, batch, rank, D=d,
        L=32 * DOWN_WARPS, RELU=own.relu, PDL=has_pdl, num_warps=DOWN_WARPS, launch_pdl=use_pdl,
    )  # fmt: skip
