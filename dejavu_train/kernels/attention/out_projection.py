"""The output projection over the selected heads: y[b, i] = residual[b, i] + bias[i] + sum_j w[i, j] mixed[b, j].

j runs over the columns of the selected heads, or groups of heads. mixed (B, h * head_dim) is zero elsewhere. Numbers
are (d, h * head_dim) and take mixed in fp32 (`stages.columns`). 4-bit rows lie head by head, Int4Rows (h, d, head_dim)
(`stages.int4_heads`). They take mixed in fp16, as attention rounds it. Every program reads it whole, and in fp32 that
took twice the loads.

The attention kernel lets this one start before it has waited for q/k/v itself. What is older than q/k/v is read before
the wait: selection, bias, residual. So a program's first columns are loaded while q/k/v ends and attention runs.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dejavu_train.kernels.common.checks import (
    FLOAT_TYPES,
    check_device,
    check_head_dim,
    check_int4,
    check_numbers,
    check_tensor,
    require,
)
from dejavu_train.kernels.common.lane_queue import even_room
from dejavu_train.kernels.common.launch import n_sms, use_pdl
from dejavu_train.kernels.common.limits import HEAD_DIMS, MOST_TOKENS
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.dense.dense_batch import dense_add
from dejavu_train.kernels.dense.unpack import unpack
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix, Rows
from dejavu_train.kernels.stages.columns import VECTOR, ColumnWalk, HeadSource, walk_tiles
from dejavu_train.kernels.stages.int4_heads import HeadWalk, queue_bytes
from dejavu_train.kernels.stages.rows import launch_tokens, launch_walk
from dejavu_train.kernels.stages.sink import LinearSink


@dataclass(frozen=True)
class ProjectSettings(Settings, stage="project"):
    """Measured in whole steps under the carveout of `launch.share_carveout`. rows: of a program.

    stages: of the pipeline over heads, in tiles on the tensor cores. 0 = rows in registers. width: columns of a step of
    those, at most.
    """

    rows: int
    width: int
    stages: int
    warps: int


@dataclass(frozen=True)
class HeadRowSettings(Settings, stage="project_int4"):
    """warps: of a program. span: heads of a warp that are on their way, a power of two up to 8.

    tiles: of 8 outputs of a program. registers: of a thread, at most: programs that are not resident at once wait for a
    second round.
    """

    warps: int
    span: int
    tiles: int = 2
    registers: int = 128


def project_heads_reference(
    mixed: Tensor, weight: Matrix, bias: Tensor, residual: Tensor, selection: Selection | None, out: Tensor
) -> None:
    """Plain torch. mixed is zero in heads that are not selected. Of 4-bit rows in fp64 where mixed is."""
    wide = torch.float64 if mixed.dtype == torch.float64 else torch.float32
    if weight.format is Format.INT4:
        numbers, x = weight.dense(wide).transpose(0, 1).flatten(1), mixed.half().to(wide)
    else:
        numbers, x = weight.numbers, mixed.to(weight.numbers.dtype)
    out.copy_(torch.nn.functional.linear(x, numbers).to(wide) + bias.to(wide) + residual)


def project_heads(
    mixed: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    selection: Selection | None,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """mixed (B, h * head_dim), residual and out (B, d) fp32, bias (d). selection None = all heads.

    One row runs in one kernel, bitwise deterministic. Several are a matrix product over all columns: the union of the
    heads of several rows leaves little out. Up to eight read codes, more do after these were written out in fp16.
    Selection and residual must be older than the two launches before this one. Errors: shapes, dtypes, head dims,
    groups other than a head, a CPU tensor.
    """
    check_device("mixed", mixed)
    batch, width = mixed.shape
    d = weight.shape[-2]
    for name, tensor in (("residual", residual), ("out", out)):
        check_tensor(name, tensor, (batch, d), (torch.float32,), mixed)
    if weight.format is Format.INT4:
        n_heads = weight.shape[0]
        fits = selection is None or n_heads % selection.n == 0
        require(fits, f"a selection of other heads than the weight's {n_heads}")
        _check_by_head(mixed, weight, bias)
    else:
        check_numbers("weight", weight, d, width)
        n_heads = 1 if selection is None else selection.n
    if batch > 1:
        if weight.format is not Format.INT4:
            dense_add(mixed, weight, bias, residual, out, pdl=pdl)
        elif batch <= MOST_TOKENS:
            launch_tokens(mixed, weight, LinearSink(out, bias, residual), pdl, segments=n_heads)
        else:
            dense_add(mixed, Rows(unpack(weight, torch.float16, True, pdl)), bias, residual, out, pdl=pdl)
        return
    sink, source = LinearSink(out, bias, residual), None if selection is None else HeadSource(selection.row_bits)
    if weight.format is Format.INT4:
        chosen = HeadRowSettings.find(weight.format, out.device, d=d, all=selection is None)
        share = 1 if selection is None else n_heads // selection.n  # heads that are selected together
        programs, walk = head_walk(weight, chosen, share, selection is None and use_pdl(pdl, out.device))
        launch_walk(
            programs, mixed.view(torch.int32), None, weight.parts(), sink, source, d, walk, pdl,
            num_warps=chosen.warps, maxnreg=chosen.registers,
        )  # fmt: skip
        return
    plain = ProjectSettings.find(weight.format, out.device, d=d, all=selection is None)
    how, warps = column_walk(plain, width, n_heads)
    require(source is not None or not plain.stages, "tiles of heads need a selection of heads")
    launch_walk(triton.cdiv(d, plain.rows), mixed, None, weight.parts(), sink, source, d, how, pdl, num_warps=warps)


def column_walk(settings: ProjectSettings, width: int, n_heads: int) -> tuple[ColumnWalk, int]:
    """(how a program walks over so many columns of so many heads, its warps)."""
    sizes = width, width // n_heads, triton.next_power_of_2(n_heads), settings.rows
    if settings.stages:
        head_dim = width // n_heads  # of a group of heads more columns than a step has
        parts = next(n for n in range(1, head_dim + 1) if head_dim % n == 0 and head_dim // n <= HEAD_DIMS[-1])
        block = triton.next_power_of_2(head_dim // parts)
        return ColumnWalk(*sizes, block, VECTOR, settings.stages, parts, walk_tiles), settings.warps
    block = min(settings.width, triton.next_power_of_2(width))
    return ColumnWalk(*sizes, block), min(settings.warps, max(1, settings.rows * block // (32 * VECTOR)))


def head_walk(weight: Int4Rows, settings: HeadRowSettings, share: int, dependent: bool) -> tuple[int, HeadWalk]:
    """(programs, how each walks over heads)."""
    n_heads, d, head_dim = weight.shape
    require(settings.span in (2, 4, 8), f"a span is of 2, 4 or 8 heads, not {settings.span}")
    programs, lanes = triton.cdiv(d, 8 * settings.tiles), 32 * settings.warps
    needed = queue_bytes(lanes, settings.span, settings.tiles, head_dim)
    room = even_room(triton.cdiv(programs, n_sms(weight.words.device)), d, dependent, needed)
    tile = triton.next_power_of_2(n_heads)
    return programs, HeadWalk(n_heads, tile, head_dim, lanes, settings.span, settings.tiles, room, share)


def _check_by_head(mixed: Tensor, weight: Int4Rows, bias: Tensor) -> None:
    n_heads, d, head_dim = weight.shape
    check_head_dim(head_dim)
    check_tensor("mixed", mixed, (len(mixed), n_heads * head_dim), (torch.float16,), mixed)
    check_int4("weight", weight, (n_heads, d, head_dim), mixed)
    require(weight.scales.shape[-1] == 1, f"weight: {weight.scales.shape[-1]} groups a head, expected one")
    check_tensor("bias", bias, (d,), FLOAT_TYPES, mixed)
