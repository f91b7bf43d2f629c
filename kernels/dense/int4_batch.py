"""Up to eight tokens times 4-bit rows, which are read once and as codes.

    y[b, i]   = act(sum_j code[i, j] scale[i, j // group] x[b, j] + bias[i])            `int4_linear`, weight (n, d)
    y[b, i]   = relu(the same) where bit b of row_bits[i] is set, else 0                `int4_listed`
    out[b, i] = residual[b, i] + bias[i] + sum_h sum_j code[h, i, j] scale[h, i] x[b, h head_dim + j]
                                                                                        `int4_by_head`, (h, d, head_dim)
    q, k_cache, v_cache at position[b] <- the first, without act, weight (h, 3, head_dim, d)     `int4_qkv`

x (B, .) fp16. Products are exact, sums in fp32. Programs walk over the rows, sixteen at a time, with all tokens in
their registers (`int4_token_step`), where one token takes the place of two. `int4_listed` reads the rows that a list
names, those that one of the tokens has selected, and stores zeros for all others. fc2, whose rows are neurons, has a
kernel of its own (`int4_fc2`). More tokens than eight are worth writing the matrix out once (`int4_numbers`).
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    INTERPRET,
    check_device,
    check_dtype,
    check_int4,
    check_projection,
    check_shape,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.int4_mma import tile_sums, unit_vector
from dejavu_train.kernels.common.int4_neurons import store_four
from dejavu_train.kernels.common.int4_row_step import rows_of_list
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.int4_token_step import (
    ask_first_rows,
    int4_tokens_step,
    token_pairs_of_a_warp,
    token_planes,
    token_scales,
)
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.lane_queue import (
    MOST_BYTES,
    as_it_comes,
    emptied,
    even_room,
    lane_queue,
    line_slot_bytes,
)
from dejavu_train.kernels.common.launch import n_sms, next_power_of_two, registers_for, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix

ROWS = 16  # of a step


@dataclass(frozen=True)
class TokenSettings:
    """programs: per multiprocessor. warps: of one. pairs: of units that a warp takes in one pass over the rows, and
    ahead: that its queue has room for, both at most."""

    programs: int
    warps: int
    pairs: int
    ahead: int

    @property
    def registers(self) -> int:
        """Of a thread, at most, so that all programs have room."""
        return registers_for(self.programs, self.warps)


def token_settings(d: int, tokens: int, form: str = "rows") -> TokenSettings:
    """Launch settings by columns and tokens, 2, 4 or 8, of a matrix, of "heads" or of a "list"
    (`benchmarks/results/int4_batch.csv`). A thread of four warps holds tokens / 2 * 8 pairs of x for two units."""
    if INTERPRET:
        return TokenSettings(1, 1, 3, 2)
    if tokens == 8:
        return TokenSettings(2, 4, 3, 3)
    if form == "rows" and tokens == 2 and d > 5120:
        return TokenSettings(3, 4, 16, 3)
    return TokenSettings(2, 4, 36 // tokens, 5)


def int4_linear_reference(x: Tensor, weight: Matrix, bias: Tensor | None, activation: str) -> Tensor:
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.dense(wide).flatten(0, -2).T
    if bias is not None:
        y = y + bias
    return y.relu() if activation == "relu" else y


def int4_listed_reference(
    x: Tensor, weight: Matrix, bias: Tensor, ids: Tensor, count: Tensor, row_bits: Tensor, pdl: bool = False
) -> Tensor:
    """Plain torch, in fp64 where x is. The bits alone say what is selected."""
    y = int4_linear_reference(x, weight, bias, "relu")
    return y.masked_fill((row_bits >> torch.arange(len(x), device=x.device)[:, None]) & 1 == 0, 0.0)


def int4_by_head_reference(x: Tensor, weight: Int4Rows, bias: Tensor, residual: Tensor) -> Tensor:
    """Plain torch, in fp64 where x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n_heads, _, head_dim = weight.shape
    y = torch.einsum("bhj,hij->bi", x.to(wide).view(-1, n_heads, head_dim), weight.dense(wide))
    return y + bias.to(wide) + residual.to(wide)


def takes(weight: Matrix, batch: int) -> TypeGuard[Int4Rows]:
    """Whether these kernels multiply so many tokens with this matrix."""
    return weight.format is Format.INT4 and batch <= MOST_TOKENS


@triton.jit
def _store_zeros(y, row_bits, n_rows, batch, T: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in y (B, n_rows) for the program's part of the rows, where no bit is set."""
    each = (n_rows + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    b = tl.arange(0, T)
    for first in range(begin, tl.minimum(begin + each, n_rows), BLOCK):
        own = first + tl.arange(0, BLOCK)
        inside = own < tl.minimum(begin + each, n_rows)
        idle = inside & (tl.load(row_bits + own, mask=inside, other=1) == 0)
        at = y + b.to(tl.int64)[:, None] * n_rows + own[None, :]
        tl.store(at, tl.zeros((T, BLOCK), y.dtype.element_ty), mask=(b < batch)[:, None] & idle[None, :])


@triton.jit
def _store_qkv(
    values, first, stored, b, q, k_cache, v_cache, position, capacity, n_rows, batch, HEAD_DIM: tl.constexpr
):
    """values (16, T) of rows first .. first + 15 of (h, 3, HEAD_DIM): one head's, and all of q, of k or of v."""
    head = first // (3 * HEAD_DIM)
    kind = ((first + tl.arange(0, 16)) // HEAD_DIM % 3)[:, None]
    column = (first % HEAD_DIM + tl.arange(0, 16))[:, None]
    pair = b * (n_rows // (3 * HEAD_DIM)) + head
    slot = (pair * capacity + tl.load(position + b, mask=b < batch, other=0)).to(tl.int64) * HEAD_DIM
    cached = slot[None, :] + column
    tl.store(q + pair[None, :] * HEAD_DIM + column, values, mask=stored & (kind == 0))
    tl.store(k_cache + cached, values.to(k_cache.dtype.element_ty), mask=stored & (kind == 1))
    tl.store(v_cache + cached, values.to(v_cache.dtype.element_ty), mask=stored & (kind == 2))


@triton.jit
def _kept_at(scratch, number, lane):
    """Where a lane keeps its four sums of its program's sixteen rows number `number` between passes."""
    tile = number * tl.num_programs(0) + tl.program_id(0)
    return scratch + (tile * lane.shape[0] + lane).to(tl.int64) * 4


@triton.jit
def _pass(
    queue, s, x, words, scales, bias, residual, y, k_cache, v_cache, position, capacity, scratch, ids, row_bits,
    all_rows, first_row, end, step, turn, lane, n_rows, batch, W: tl.constexpr, GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, PASSES: tl.constexpr, AHEAD: tl.constexpr,
    WHOLE: tl.constexpr, LISTED: tl.constexpr, RELU: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Pass `turn` over a program's rows, of which the last one stores y, or of q/k/v's rows (HEAD_DIM > 0) q, in y's
    place, and the caches. The queue when it is over."""
    b = tl.arange(0, T)
    its = token_planes(x, batch, turn * PAIRS, lane, W, GROUP, SEGMENTS, T, PAIRS)
    rows = all_rows
    slot = 0
    for first in range(first_row, end, step):
        entries = first + tl.arange(0, 16)
        there = entries < end
        if LISTED:
            own = tl.load(ids + tl.minimum(entries, n_rows - 1), cache_modifier=".cg")
            next_rows = rows_of_list(ids, first + 16, end, n_rows - 1, lane)
            bits = tl.load(row_bits + own)  # what is needed after the products is loaded before them
        else:
            own = entries
            next_rows = (first + step, n_rows)
        at = b.to(tl.int64)[None, :] * n_rows + own[:, None]
        stored = (b < batch)[None, :] & there[:, None]
        if bias is not None:
            offsets = tl.load(bias + own, mask=there, other=0.0).to(tl.float32)
        if residual is not None:
            before = tl.load(residual + at, mask=stored, other=0.0)
        zero = tl.zeros(lane.shape, tl.float32)
        sums = (zero, zero, zero, zero)
        if PASSES > 1:
            kept = _kept_at(scratch, (first - first_row) // step, lane)
            sums = split_words(tl.load(kept[:, None] + tl.arange(0, 4)[None, :], mask=turn > 0, other=0.0), 4)
        sums, queue, slot, s = int4_tokens_step(
            queue, slot, sums, s, its, words, scales, rows, next_rows, turn * PAIRS, lane, n_rows, W, GROUP, SEGMENTS,
            T, AHEAD, WHOLE, LISTED, PAIRS,
        )  # fmt: skip
        if PASSES > 1:
            store_four(kept, sums, lane >= tl.where(turn < PASSES - 1, 0, lane.shape[0]))
        if turn == PASSES - 1:
            values = tile_sums(sums, lane.shape[0], T)
            if bias is not None:
                values += offsets[:, None]
            if residual is not None:
                values += before
            if RELU:
                values = tl.where(values <= 0, 0.0, values)  # keeps a NaN
            if LISTED:
                values = tl.where(((bits[:, None] >> b[None, :]) & 1) != 0, values, 0.0)
            if HEAD_DIM > 0:
                _store_qkv(values, first, stored, b, y, k_cache, v_cache, position, capacity, n_rows, batch, HEAD_DIM)
            else:
                tl.store(y + at, values.to(y.dtype.element_ty), mask=stored)
        rows = next_rows
    return queue


@triton.jit
def _rows_kernel(
    x, words, scales, bias, residual, y, k_cache, v_cache, position, capacity, scratch, ids, count, row_bits, n_rows,
    batch, W: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr, T: tl.constexpr, L: tl.constexpr,
    PAIRS: tl.constexpr, PASSES: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
    ROOM: tl.constexpr, RELU: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, L)
    step = tl.num_programs(0) * 16
    begin = tl.program_id(0) * 16
    end = n_rows
    rows = (begin, n_rows)
    if LISTED:  # a program's part of the list: neighbours, whose rows lie on few pages of memory
        wait_for_predecessor(PDL)
        number = tl.load(count, cache_modifier=".cg")
        each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
        begin = tl.program_id(0) * each
        end = tl.minimum(number, begin + each)
        step = 16
        rows = rows_of_list(ids, begin, end, n_rows - 1, lane)
    queue = ask_first_rows(
        lane_queue(lane, ROOM), words, rows, 0, lane, n_rows, W, GROUP, SEGMENTS, AHEAD, WHOLE, LISTED
    )  # fmt: skip
    s = token_scales(scales, rows, 0, lane, n_rows, W, GROUP, SEGMENTS, T, LISTED, PAIRS)
    if LISTED:
        _store_zeros(y, row_bits, n_rows, batch, T, 2 * L)
    else:
        wait_for_predecessor(PDL)
    if PASSES == 1:
        _pass(
            queue, s, x, words, scales, bias, residual, y, k_cache, v_cache, position, capacity, scratch, ids, row_bits,
            rows, begin, end, step, 0, lane, n_rows, batch, W, GROUP, SEGMENTS, T, PAIRS, 1, AHEAD, WHOLE, LISTED, RELU,
            HEAD_DIM,
        )  # fmt: skip
    else:
        for turn in range(0, as_it_comes(PASSES)):
            queue = _pass(
                queue, s, x, words, scales, bias, residual, y, k_cache, v_cache, position, capacity, scratch, ids,
                row_bits, rows, begin, end, step, turn, lane, n_rows, batch, W, GROUP, SEGMENTS, T, PAIRS, PASSES,
                AHEAD, WHOLE, LISTED, RELU, HEAD_DIM,
            )  # fmt: skip
            # Behind the last pass there is nothing to be read.
            queue = ask_first_rows(
                emptied(queue, lane), words, rows, (turn + 1) * PAIRS, lane, n_rows, W, GROUP, SEGMENTS, AHEAD, WHOLE,
                LISTED,
            )  # fmt: skip
            s = token_scales(scales, rows, (turn + 1) * PAIRS, lane, n_rows, W, GROUP, SEGMENTS, T, LISTED, PAIRS)


@dataclass(frozen=True)
class _Epilogue:
    """What becomes of the products: y (B, n), or with a residual (B, n) their sum with it.

    listed: ids, count and row_bits of the rows that are read. cache: receives k and v at position, y then is q.
    """

    y: Tensor
    relu: bool = False
    residual: Tensor | None = None
    listed: tuple[Tensor, Tensor, Tensor] | None = None
    cache: KvCache | None = None
    position: Tensor | None = None


def _launch(
    x: Tensor,
    weight: Int4Rows,
    bias: Tensor | None,
    into: _Epilogue,
    pdl: bool,
    settings: TokenSettings | None,
    segments: int = 1,
) -> None:
    """One call of the kernel: as many rows of each segment, which has its own columns of x."""
    batch, d = x.shape
    n = weight.words.shape[:-1].numel() // segments
    cache, listed = into.cache, into.listed
    tokens = max(2, next_power_of_two(batch))
    form = "list" if listed is not None else "heads" if segments > 1 else "rows"
    settings = settings or token_settings(d, tokens, form)
    words, group, lanes = d // segments // 8, weight.group, 32 * settings.warps
    slot = line_slot_bytes(lanes, unit_vector(words, group))
    whole = token_pairs_of_a_warp(words, group, segments, settings.warps)
    passes = triton.cdiv(whole, settings.pairs)
    pairs = triton.cdiv(whole, passes)
    ahead = min(settings.ahead, MOST_BYTES // slot, pairs)
    programs = min(n_sms(x.device) * settings.programs, triton.cdiv(n, ROWS))
    scratch = None
    if passes > 1:
        tiles = programs * triton.cdiv(triton.cdiv(n, programs), ROWS)
        scratch = torch.empty(tiles, lanes, 4, dtype=torch.float32, device=x.device)
    require(ahead > 0, f"{settings}: no pair of units, or one of {slot} bytes, where a queue has {MOST_BYTES}")
    pdl = use_pdl(pdl, x.device)
    _rows_kernel[(programs,)](
        x.view(torch.int32),
        weight.words,
        weight.scales,
        bias,
        into.residual,
        into.y,
        *((None, None, None, 0) if cache is None else (cache.k, cache.v, into.position, cache.capacity)),
        scratch,
        *(listed or (None, None, None)),
        n,
        batch,
        W=words,
        GROUP=group,
        SEGMENTS=segments,
        T=tokens,
        L=lanes,
        PAIRS=pairs,
        PASSES=passes,
        AHEAD=ahead,
        WHOLE=int(n % ROWS == 0),
        LISTED=listed is not None,
        ROOM=max(ahead * slot, even_room(settings.programs, d, settings.programs > 1 and pdl, ahead * slot)),
        RELU=into.relu,
        HEAD_DIM=0 if cache is None else into.y.shape[2],
        PDL=pdl,
        num_warps=settings.warps,
        maxnreg=settings.registers,
        launch_pdl=pdl,
    )


def int4_linear(
    x: Tensor,
    weight: Int4Rows,
    bias: Tensor | None = None,
    activation: str = "none",
    pdl: bool = False,
    settings: TokenSettings | None = None,
) -> Tensor:
    """x (B, d) fp16, weight (..., d) -> (B, n) fp16. Errors: shapes, dtypes, a CPU tensor."""
    check_device("x", x)
    batch, d = x.shape
    n = weight.words.shape[:-1].numel()
    check_int4("weight", weight, (*weight.shape[:-1], d), x)
    _check_tokens(x, batch, d)
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    if activation not in ("none", "relu"):
        raise ValueError(f"activation must be none or relu, got {activation}")
    y = torch.empty(batch, n, dtype=torch.float16, device=x.device)
    _launch(x, weight, bias, _Epilogue(y, activation == "relu"), pdl, settings)
    return y


def int4_qkv(
    x: Tensor,
    weights: Linear,
    position: Tensor,
    q: Tensor,
    cache: KvCache,
    pdl: bool = False,
    settings: TokenSettings | None = None,
) -> None:
    """x (B, d) fp16, position (B) int32 -> q (B, h, head_dim) fp32, and the cache at the rows' positions.

    The weight has 4 bits, (h, 3, head_dim, d), and the bias is (h, 3, head_dim).

    Errors: shapes, dtypes, head dims, a CPU tensor.
    """
    batch, d = x.shape
    _, n_heads, head_dim = check_projection(x, weights, q, cache, position)
    weight = check_int4("weight", weights.weight, (n_heads, 3, head_dim, d), x)
    _check_tokens(x, batch, d)
    check_tensor("q", q, (batch, n_heads, head_dim), (torch.float32,), x)
    _launch(x, weight, weights.bias, _Epilogue(q, cache=cache, position=position), pdl, settings)


def int4_listed(
    x: Tensor,
    weight: Matrix,
    bias: Tensor,
    ids: Tensor,
    count: Tensor,
    row_bits: Tensor,
    pdl: bool = False,
    settings: TokenSettings | None = None,
) -> Tensor:
    """x (B, d) fp16, weight (n, d), bias (n), row_bits (n) int32 -> (B, n) fp16.

    ids (n) int32: the rows with a bit set, in any order, below count (1) int32, rows of the matrix beyond it as well.

    Errors: shapes, dtypes, a CPU tensor.
    """
    check_device("x", x)
    batch, d = x.shape
    n = weight.shape[0]
    rows = check_int4("weight", weight, (n, d), x)
    _check_tokens(x, batch, d)
    check_tensor("bias", bias, (n,), FLOAT_TYPES, x)
    for name, tensor, size in (("ids", ids, n), ("count", count, 1), ("row_bits", row_bits, n)):
        check_tensor(name, tensor, (size,), (torch.int32,), x)
    y = torch.empty(batch, n, dtype=torch.float16, device=x.device)
    _launch(x, rows, bias, _Epilogue(y, True, listed=(ids, count, row_bits)), pdl, settings)
    return y


def int4_by_head(
    x: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    pdl: bool = False,
    settings: TokenSettings | None = None,
) -> None:
    """x (B, h * head_dim) fp16, weight (h, d, head_dim) with a scale a row, bias (d), residual and out (B, d) fp32.

    Errors: shapes, dtypes, a CPU tensor.
    """
    check_device("x", x)
    batch = len(x)
    n_heads, d, head_dim = weight.shape
    check_int4("weight", weight, (n_heads, d, head_dim), x)
    check_shape("weight.scales", weight.scales, n_heads, d, 1)
    _check_tokens(x, batch, n_heads * head_dim)
    check_tensor("bias", bias, (d,), FLOAT_TYPES, x)
    for name, tensor in (("residual", residual), ("out", out)):
        check_tensor(name, tensor, (batch, d), (torch.float32,), x)
    _launch(x, weight, bias, _Epilogue(out, residual=residual), pdl, settings, n_heads)


def _check_tokens(x: Tensor, batch: int, n: int) -> None:
    check_dtype("x", x, (torch.float16,))
    check_shape("x", x, batch, n)
    require(1 <= batch <= MOST_TOKENS, f"{batch} tokens, expected 1 to {MOST_TOKENS}")
