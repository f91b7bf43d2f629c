# mypy: disable-error-code="assignment"
"""fc2 over all neurons with 4-bit weights, one token:

    out[j] = residual[j] + b2[j] + sum_i h[i] scale[i, j // group] code[i, j]

h (1, n) fp32, after the ReLU; weight (n, d), a row a neuron, of which columns are outputs. Rows whose h is zero are not
read, but for the first ones of each warp, which are asked for before h is known. For each row and group h * scale * 64
is rounded to fp16 and multiplied with the codes, two rows a tensor-core instruction, sums in fp32
(`int4_tiles.int4_outer`): |h * scale| must stay below 127, or the sum is infinite.

A program owns 1024 columns, of which each lane of a warp has 32, and takes ROUND rows a warp at a time, two by two;
what comes next is on its way in a queue of each lane (`lane_queue`), words and scales alike. Warps add up in the end,
and programs that share columns in `add_partials`, in a fixed order.

Why not in one grid with fc1 (`sparse_mlp` over the list of all rows): there a word takes 29 instructions, and a layer
of 66B 126 us, of 77 by bytes. `dense_rows` takes 13 for fc1, this kernel 21.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_shape
from kernels.common.int4 import Int4Rows
from kernels.common.int4_mma import from_lane
from kernels.common.int4_tiles import FACTOR_UNIT, half_of, int4_outer, pairs_of
from kernels.common.lane_queue import add_warps, ask, even_room, lane_queue, take
from kernels.common.launch import n_sms, use_pdl, wait_for_predecessor
from kernels.mlp.sparse_fc2 import MAX_SPLITS, add_partials, partial_sums

PAYS_FROM = 4096
WORDS = tl.constexpr(128)  # of a program's columns


@dataclass(frozen=True)
class Int4Fc2Settings:
    """warps: of a program; ahead: pairs of rows of a warp on their way, 1 to 16, a power of two; programs: a grid's;
    round: rows of a warp at a time, 2 ahead to 32, a power of two."""

    warps: int
    ahead: int
    programs: int
    round: int = 32


def int4_fc2_settings(d: int) -> Int4Fc2Settings:
    """Launch settings by width, from whole steps (`benchmarks/int4_settings.py`)."""
    if INTERPRET:
        return Int4Fc2Settings(1, 2, 4, 8)
    return Int4Fc2Settings(8, 4, 264, 8 if 4096 < d <= 8192 else 32)  # so that all programs have as many rounds


def int4_fc2_reference(h, weight, bias, residual, out, partials=None, pdl=False) -> None:
    """Plain torch, any batch, in fp64 where h is."""
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    out.copy_(h.to(wide) @ weight.dequantised(wide) + bias.to(wide) + residual)


def takes(weight: Int4Rows) -> bool:
    """Whether the kernel multiplies such rows: a lane's 32 columns share a scale, and scales lie in pairs."""
    return weight.group % 32 == 0 and weight.shape[-1] % (2 * weight.group) == 0


def pays(weight: Int4Rows) -> bool:
    """Whether a dense step is faster with it than with `sparse_mlp`. Below 4096: not measured."""
    return takes(weight) and weight.shape[-1] >= PAYS_FROM


@triton.jit
def _ask_pair(
    queue, weight, scales, row, first, second, word, lane, SLOT: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The queue with a lane's four words of rows `row` and row + 1 on their way, where these are read, and scales."""
    there = word < W
    at = weight + row.to(tl.int64) * W + word
    queue = ask(queue, lane, at, at + W, first & there, second & there, SLOT, 4, True)
    G: tl.constexpr = 8 * W // GROUP
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * (G // 2) + word * 8 // (2 * GROUP)
    return ask(queue, lane, pairs, pairs + G // 2, first & there, second & there, AHEAD * 4 + SLOT, 1, True)


@triton.jit
def _factor(scales, word, h, GROUP: tl.constexpr):
    """A pair of fp16, twice h times a lane's scale of two, times FACTOR_UNIT."""
    odd = word * 8 // GROUP % 2
    factor = (half_of(scales, odd) * FACTOR_UNIT * h).to(tl.float16)
    return pairs_of(factor, factor)


@triton.jit(do_not_specialize=["n"])
def _int4_fc2_kernel(
    h,
    weight,
    scales,
    partials,
    n,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    AHEAD: tl.constexpr,
    ROUND: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = D // 8
    PAIRS: tl.constexpr = ROUND // 2
    lane = tl.arange(0, L)
    word = tl.program_id(0) * WORDS + lane % 32 * 4
    queue = lane_queue(lane, max(ROOM, (AHEAD if AHEAD > 4 else 4) * L * 40))  # and room for the sums
    step = tl.num_programs(1) * (L // 32 * ROUND)  # rows of all programs together
    begin = tl.program_id(1) * (L // 32 * ROUND)
    row = begin + lane // 32 * ROUND
    for k in tl.static_range(AHEAD):  # whether these rows are needed is not known yet
        first = row + 2 * k < n
        second = row + 2 * k + 1 < n
        queue = _ask_pair(queue, weight, scales, row + 2 * k, first, second, word, lane, k, W, GROUP, AHEAD)
    wait_for_predecessor(PDL)
    own = row + lane % 32
    values = tl.load(h + own, mask=own < n, other=0.0)
    coming = ()  # h of the pairs on their way
    for k in tl.static_range(AHEAD):
        coming = coming + (from_lane(values, 2 * k), from_lane(values, 2 * k + 1))
    acc = ()
    for _ in tl.static_range(32):
        acc = acc + (tl.zeros((L,), tl.float32),)
    for _ in range(begin, n, step):
        own += step
        after = tl.load(h + own, mask=own < n, other=0.0)
        for pair in range(0, PAIRS, AHEAD):
            last = pair == PAIRS - AHEAD  # the pairs asked for are those of the next rows
            source = tl.where(last, after, values)
            start = tl.where(last, row + step, row + 2 * (pair + AHEAD))
            number = tl.where(last, 0, 2 * (pair + AHEAD))
            for k in tl.static_range(AHEAD):
                words, queue = take(queue, lane, k, 4, 2 * AHEAD - 1)
                both, queue = take(queue, lane, AHEAD * 4 + k, 1, 2 * AHEAD - 2)
                one = _factor(both[0], word, coming[0], GROUP)
                two = _factor(both[1], word, coming[1], GROUP)
                for v in tl.static_range(4):
                    acc = acc[8:] + int4_outer(acc[:8], words[v], words[4 + v], one, two)
                h_first = from_lane(source, number + 2 * k)
                h_second = from_lane(source, number + 2 * k + 1)
                queue = _ask_pair(
                    queue, weight, scales, start + 2 * k, h_first != 0, h_second != 0, word, lane, k, W, GROUP, AHEAD
                )
                coming = coming[2:] + (h_first, h_second)
        row += step
        values = after
    sums = add_warps(queue, lane, acc, 32)
    WARPS: tl.constexpr = L // 32
    for j in tl.static_range(32 // WARPS):
        column = (tl.program_id(0) * WORDS + lane % 32 * 4) * 8 + WARPS * j + lane // 32
        tl.store(partials + tl.program_id(1) * D + column, sums[j] * (1 / FACTOR_UNIT), mask=column < D)


def int4_fc2(
    h: Tensor,
    weight: Int4Rows,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
    settings: Int4Fc2Settings | None = None,
) -> None:
    """h (1, n), residual and out (1, d) fp32, weight (n, d); bitwise deterministic. See the module's docstring.

    Errors: shapes, groups that `takes` refuses, a CPU tensor.
    """
    check_device("h", h)
    n, d = weight.shape
    check_shape("h", h, 1, n)
    weight.check("weight", (n, d), h)
    check_shape("residual", residual, 1, d)
    check_shape("out", out, 1, d)
    if not takes(weight):
        raise ValueError(f"groups of {weight.group} of {d} columns: expected an even number of multiples of 32")
    settings = settings or int4_fc2_settings(d)
    stripes = triton.cdiv(d, 1024)
    rounds = triton.cdiv(n, settings.round * settings.warps)
    splits = min(MAX_SPLITS, max(1, settings.programs // stripes), rounds)
    splits = triton.cdiv(rounds, triton.cdiv(rounds, splits))  # as many rounds each, with as few programs
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, MAX_SPLITS, d)
    pdl = use_pdl(pdl, out.device)
    _int4_fc2_kernel[(stripes, splits)](
        h,
        weight.words,
        weight.scales,
        partials,
        n,
        D=d,
        GROUP=weight.group,
        L=32 * settings.warps,
        AHEAD=settings.ahead,
        ROUND=settings.round,
        ROOM=even_room(triton.cdiv(settings.programs, n_sms(out.device)), d, pdl),
        PDL=pdl,
        num_warps=settings.warps,
        launch_pdl=pdl,
    )
    add_partials(partials, splits, bias, residual, out, pdl)
