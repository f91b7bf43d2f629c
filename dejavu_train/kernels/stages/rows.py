"""The kernel of a product of rows: a matrix of any format times one normalised row, or times up to eight tokens.

    v[b, i] = sum_j w[i, j] n[b, j]        one row: n = norm(x), x (1, d) fp32; tokens: n = x, (B, d) fp16

A format is a walk over rows (`stages.number_rows`, `stages.int4_rows`, `stages.int4_tokens`). It is handed the norm
(`common.layer_norm`) and the sink that takes the products (`stages.sink`). Sums in fp32, bitwise deterministic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.checks import check_device, check_tensor, require
from dejavu_train.kernels.common.int4_mma import pairs_of_a_warp, unit_vector
from dejavu_train.kernels.common.int4_norm import norm_bytes
from dejavu_train.kernels.common.lane_queue import MOST_BYTES, even_room, line_slot_bytes
from dejavu_train.kernels.common.launch import fetches_rows, n_sms, registers_for, use_pdl
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, RowNorm
from dejavu_train.kernels.common.limits import MOST_TOKENS
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix
from dejavu_train.kernels.stages.int4_rows import Int4Form, UnitWalk, pairs_ahead, row_queue_bytes
from dejavu_train.kernels.stages.int4_tokens import TokenSource, TokenWalk, pairs_a_turn, turns_of
from dejavu_train.kernels.stages.listed import constants
from dejavu_train.kernels.stages.number_rows import NumberWalk
from dejavu_train.kernels.stages.sink import Sink


@dataclass(frozen=True)
class RowSettings(Settings, stage="rows"):
    """programs: per multiprocessor. rows: of a step. width: columns of a piece of a row, at most."""

    programs: int
    rows: int
    warps: int
    width: int = 1024

    def block(self, d: int) -> int:
        """Columns of a piece of a row of d."""
        return min(self.width, max(16, triton.next_power_of_2(d)))

    def warps_for(self, d: int) -> int:
        """No more threads than a piece has columns: threads that hold the same value would write it to one place."""
        return min(self.warps, max(1, self.block(d) // 32))


@dataclass(frozen=True)
class Int4RowSettings(Settings, stage="rows_int4"):
    """programs: per multiprocessor. warps: of one. ahead: pairs of units that a warp's queue has room for, at most.

    A pair takes 2 KB: a line of each of sixteen rows (`stages.int4_rows`).
    fetched: words of each of a program's first rows that the L2 is asked for behind those, before the wait.
    """

    programs: int
    warps: int
    ahead: int
    fetched: int = 0


@dataclass(frozen=True)
class TokenSettings(Settings, stage="tokens_int4"):
    """programs: per multiprocessor. warps: of one. tiles: of sixteen rows that share what is read of the tokens, and
    ahead: pairs of units that a warp's queue has room for, both at most. form: of the rows of a matrix, of "heads" or
    of a "list"."""

    programs: int
    warps: int
    tiles: int
    ahead: int

    @property
    def registers(self) -> int:
        """Registers of a thread, at most, so that all programs have room."""
        return registers_for(self.programs, self.warps)


@triton.jit
def _rows_kernel(x, norm, weight, scales, sink, source, n_rows, how: tl.constexpr, PDL: tl.constexpr):
    how.walk(x, norm, weight, scales, sink, source, n_rows, how, PDL)


def launch_walk(
    programs: int | tuple[int, ...], x: Tensor, norm: RowNorm | None, parts: Sequence[Tensor], sink: Sink, source: Any,
    n: int, how: Any, pdl: bool, **options: Any,
) -> None:  # fmt: skip
    """parts: of a matrix of n rows, numbers or words and scales. source: which tokens or heads, where `how` asks."""
    grid = (programs,) if isinstance(programs, int) else programs
    weight, scales = (*parts, None, None)[:2]
    pdl = use_pdl(pdl, x.device)
    _rows_kernel[grid](x, norm, weight, scales, sink, source, n, constants(how), PDL=pdl, launch_pdl=pdl, **options)


def launch_row(x: Tensor, ln: LayerNormWeights, weight: Matrix, sink: Sink, n: int, pdl: bool) -> None:
    d, sms = x.shape[1], n_sms(x.device)
    how: NumberWalk | UnitWalk
    if weight.format is not Format.INT4:
        plain = RowSettings.find(weight.format, x.device, d=d)
        together = sink.together.value
        require(plain.rows % together == 0, f"{plain.rows} rows of a step are no multiple of {together}")
        grid, warps = min(sms * plain.programs, triton.cdiv(n, plain.rows)), plain.warps_for(d)
        how = NumberWalk(d, plain.block(d), plain.rows)
    else:
        chosen = Int4RowSettings.find(weight.format, x.device, d=d)
        words, group, warps, fetches = d // 8, weight.group, chosen.warps, fetches_rows(x.device)
        beside = norm_bytes(words, group, warps)
        ahead = pairs_ahead(words, group, warps, chosen.ahead, MOST_BYTES - beside)
        room = even_room(chosen.programs, d, fetches, row_queue_bytes(words, group, 32 * warps, ahead) + beside)
        form = Int4Form(
            words, group, 32 * warps, pairs_of_a_warp(words, unit_vector(words, group), warps), ahead,
            whole=n % 16 == 0, fetched=chosen.fetched if fetches else 0, room=max(0, room - beside),
        )  # fmt: skip
        grid, how = min(sms * chosen.programs, triton.cdiv(n, 16)), UnitWalk(form)
    launch_walk(grid, x, ln.args(), weight.parts(), sink, None, n, how, pdl, num_warps=warps)


def launch_tokens(
    x: Tensor,
    weight: Int4Rows,
    sink: Sink,
    pdl: bool,
    listed: tuple[Tensor | None, Tensor | None] = (None, None),
    segments: int = 1,
) -> None:
    """One call of the kernel: as many rows of each segment, which has its own columns of x. listed: ids and count.

    x (B, d) fp16. Errors: its shape and dtype, more than eight tokens, a CPU tensor.
    """
    check_device("x", x)
    batch, d = x.shape
    check_tensor("x", x, (batch, d), (torch.float16,), weight.words)
    require(1 <= batch <= MOST_TOKENS, f"{batch} tokens, expected 1 to {MOST_TOKENS}")
    n = weight.words.shape[:-1].numel() // segments
    tokens = max(2, triton.next_power_of_2(batch))
    form = "list" if listed[0] is not None else "heads" if segments > 1 else "rows"
    settings = TokenSettings.find(weight.format, x.device, d=d, tokens=tokens, form=form)
    words, group, lanes = d // segments // 8, weight.group, 32 * settings.warps
    slot = line_slot_bytes(lanes, unit_vector(words, group))
    programs = min(n_sms(x.device) * settings.programs, triton.cdiv(n, 16))
    most = triton.cdiv(triton.cdiv(n, 16), programs)  # tiles of a program
    tiles = triton.cdiv(most, triton.cdiv(most, settings.tiles))
    block = tiles * pairs_a_turn(tokens) * turns_of(words, group, settings.warps, tokens, segments)
    ahead = min(settings.ahead, MOST_BYTES // slot, block)
    require(weight.words.numel() < 1 << 31, "a matrix has fewer than 2^31 words")
    require(ahead > 0, f"{settings}: no pair of units, or one of {slot} bytes, where a queue has {MOST_BYTES}")
    resident = triton.cdiv(programs, n_sms(x.device))  # of a multiprocessor, where the grid lies evenly
    room = even_room(resident, d, resident > 1 and use_pdl(pdl, x.device), ahead * slot)
    how = TokenWalk(words, group, lanes, tokens, tiles, ahead, segments, n % 16 == 0, listed[0] is not None, room)
    launch_walk(
        programs, x.view(torch.int32), None, weight.parts(), sink, TokenSource(batch, *listed), n, how, pdl,
        num_warps=settings.warps, maxnreg=settings.registers,
    )  # fmt: skip
