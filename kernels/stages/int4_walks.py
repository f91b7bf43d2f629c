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
