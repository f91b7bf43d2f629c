"""How a program walks over rows of 4-bit words, sixteen at a time: with one normalised row, or with up to eight tokens.

The first words are on their way before the wait for the stage before. One row is normalised in the prologue and rounded
to fp16. Tokens (B, .) fp16 are as they are, all in registers, in passes where these do not hold them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.int4_neurons import store_four
from dejavu_train.kernels.common.int4_norm import normalised_units, unit_norms
from dejavu_train.kernels.common.int4_tiles import split_words
from dejavu_train.kernels.common.lane_queue import as_it_comes, emptied
from dejavu_train.kernels.common.launch import wait_for_predecessor
from dejavu_train.kernels.stages.int4_rows import (
    Int4Form,
    ask_first_rows,
    first_rows,
    int4_rows_step,
    no_sums,
    row_values,
    rows_of_list,
    token_planes,
)
from dejavu_train.kernels.stages.listed import constants_key


@triton.jit
def _walk_units(x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    m: tl.constexpr = how.form
    lane = tl.arange(0, m.lanes)
    rows = (tl.program_id(0) * 16, n_rows)
    queue, s = first_rows(words, scales, rows, lane, m)
    norms = unit_norms(norm, lane, m.words, m.group)
    wait_for_predecessor(PDL)
    n, _, _ = normalised_units(x, norms, norm, lane, m.words, m.group)
    step = tl.num_programs(0) * 16
    slot = 0
    for begin in range(tl.program_id(0) * 16, n_rows, step):
        lines = begin + tl.arange(0, 16)
        inside = lines < n_rows
        ahead = sink.ahead(sink, lines, 0, inside, inside, n_rows)
        sums, queue, slot, s = int4_rows_step(
            queue, slot, no_sums(lane, m), s, n, words, scales, (begin, n_rows), (begin + step, n_rows), 0, lane, m
        )
        sink.put(sink, row_values(sums, m), ahead, lines, 0, inside, n_rows)


class UnitWalk(NamedTuple):
    """One row."""

    form: Int4Form
    walk: Any = _walk_units

    @property
    def cache_key(self) -> str:
        return constants_key(self)


@triton.jit
def _store_zeros(sink, batch, n_rows, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in y (B, n_rows) for the program's part of the rows, where no bit is set."""
    each = (n_rows + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    b = tl.arange(0, TOKENS)
    for first in range(begin, tl.minimum(begin + each, n_rows), BLOCK):
        own = first + tl.arange(0, BLOCK)
        inside = own < tl.minimum(begin + each, n_rows)
        idle = inside & (tl.load(sink.row_bits + own, mask=inside, other=1) == 0)
        at = sink.y + b.to(tl.int64)[:, None] * n_rows + own[None, :]
        zeros = tl.zeros((TOKENS, BLOCK), sink.y.dtype.element_ty)
        tl.store(at, zeros, mask=(b < batch)[:, None] & idle[None, :])


@triton.jit
def _kept_at(scratch, number, lane):
    """Where a lane keeps its four sums of its program's sixteen rows number `number` between passes."""
    tile = number * tl.num_programs(0) + tl.program_id(0)
    return scratch + (tile * lane.shape[0] + lane).to(tl.int64) * 4


@triton.jit
def _pass(
    queue, s, x, words, scales, sink, source, all_rows, first_row, end, step, turn, lane, n_rows, how: tl.constexpr
):
    """Pass `turn` over a program's rows, of which the last one stores. The queue when it is over."""
    m: tl.constexpr = how.form
    PASSES: tl.constexpr = how.passes
    each = tl.arange(0, m.tokens)[None, :]
    b = tl.minimum(each, source.batch - 1)
    its = token_planes(x, source.batch, turn * m.pairs, lane, m)
    rows = all_rows
    slot = 0
    for first in range(first_row, end, step):
        entries = first + tl.arange(0, 16)[:, None]
        inside = entries < end
        stored = (each < source.batch) & inside
        if m.listed:
            lines = tl.load(source.ids + tl.minimum(entries, n_rows - 1), cache_modifier=".cg")
            next_rows = rows_of_list(source.ids, first + 16, end, n_rows - 1, lane)
        else:
            lines = entries
            next_rows = (first + step, n_rows)
        ahead = sink.ahead(sink, lines, b, inside, stored, n_rows)
        sums = no_sums(lane, m)
        if PASSES > 1:
            kept = _kept_at(source.scratch, (first - first_row) // step, lane)
            sums = split_words(tl.load(kept[:, None] + tl.arange(0, 4)[None, :], mask=turn > 0, other=0.0), 4)
        sums, queue, slot, s = int4_rows_step(
            queue, slot, sums, s, its, words, scales, rows, next_rows, turn * m.pairs, lane, m
        )
        if PASSES > 1:
            store_four(kept, sums, lane >= tl.where(turn < PASSES - 1, 0, lane.shape[0]))
        if turn == PASSES - 1:
            sink.put(sink, row_values(sums, m), ahead, lines, b, stored, n_rows)
        rows = next_rows
    return queue


@triton.jit
def _passes(queue, s, x, words, scales, sink, source, rows, begin, end, step, lane, n_rows, how: tl.constexpr):
    m: tl.constexpr = how.form
    if how.passes == 1:
        _pass(queue, s, x, words, scales, sink, source, rows, begin, end, step, 0, lane, n_rows, how)
    else:
        for turn in range(0, as_it_comes(how.passes)):
            queue = _pass(queue, s, x, words, scales, sink, source, rows, begin, end, step, turn, lane, n_rows, how)
            # Behind the last pass there is nothing to be read.
            queue, s = ask_first_rows(emptied(queue, lane), words, scales, rows, (turn + 1) * m.pairs, lane, m)


@triton.jit
def _walk_tokens(
    x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    m: tl.constexpr = how.form
    lane = tl.arange(0, m.lanes)
    begin = tl.program_id(0) * 16
    rows = (begin, n_rows)
    queue, s = first_rows(words, scales, rows, lane, m)
    wait_for_predecessor(PDL)
    _passes(queue, s, x, words, scales, sink, source, rows, begin, n_rows, tl.num_programs(0) * 16, lane, n_rows, how)


@triton.jit
def _walk_list(
    x, norm, words, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    # A program has a part of the list: neighbours, whose rows lie on few pages of memory.
    m: tl.constexpr = how.form
    lane = tl.arange(0, m.lanes)
    wait_for_predecessor(PDL)
    number = tl.load(source.count, cache_modifier=".cg")
    each = (number + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    end = tl.minimum(number, begin + each)
    rows = rows_of_list(source.ids, begin, end, n_rows - 1, lane)
    queue, s = first_rows(words, scales, rows, lane, m)
    _store_zeros(sink, source.batch, n_rows, m.tokens, 2 * m.lanes)
    _passes(queue, s, x, words, scales, sink, source, rows, begin, end, 16, lane, n_rows, how)


class TokenWalk(NamedTuple):
    """Up to eight tokens, in so many passes over the rows."""

    form: Int4Form
    passes: int
    walk: Any = _walk_tokens

    @property
    def cache_key(self) -> str:
        return constants_key(self)


class ListWalk(NamedTuple):
    """The same over the rows of a list."""

    form: Int4Form
    passes: int
    walk: Any = _walk_list

    @property
    def cache_key(self) -> str:
        return constants_key(self)


class TokenSource(NamedTuple):
    """batch: tokens that there are. scratch: (tiles, lanes, 4) fp32, of several passes.

    ids, count: of the rows that are read, where these are listed. The sink then has their bits."""

    batch: int
    scratch: Tensor | None
    ids: Tensor | None
    count: Tensor | None
