# mypy: disable-error-code="assignment"
"""fc2 over all neurons with 4-bit weights, one token:

    out[j] = residual[j] + b2[j] + sum_i h[i] scale[i, j // group] code[i, j]

h (1, n) fp32, after the ReLU; weight (n, d), a row a neuron, of which columns are outputs. Rows whose h is zero are
neither read nor multiplied, but for the first ones of each warp, which are asked for before h is known. For each row
and group h * scale * 64 is rounded to fp16 and multiplied with the codes, two rows a tensor-core instruction, sums in
fp32 (`int4_tiles.int4_outer`): |h * scale| must stay below 127, or the sum is infinite.

A program owns 1024 columns, of which each lane of a warp has 32, and a range of rows. It lists those whose h is not
zero (`shared_list`), and its warps take them two by two; what comes next is on its way in a queue of each lane
(`lane_queue`), words and scales alike. Warps add up in the end, and programs that share columns in `add_partials`, in
a fixed order.

Why not in one grid with fc1 (`sparse_mlp` over the list of all rows): there a word takes 29 instructions, and a layer
of 66B 126 us, of 77 by bytes. `dense_rows` takes 13 for fc1, this kernel 23 for each that it reads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import INTERPRET, check_device, check_shape, require
from kernels.common.int4 import Int4Rows
from kernels.common.int4_mma import from_lane
from kernels.common.int4_tiles import ASSEMBLY, FACTOR_UNIT, half_of, int4_outer, pairs_of
from kernels.common.lane_queue import add_warps, ask, even_room, lane_queue, take
from kernels.common.launch import n_sms, use_pdl, wait_for_predecessor
from kernels.common.shared_list import list_bytes, list_pair, write_list
from kernels.mlp.sparse_fc2 import MAX_SPLITS, add_partials, partial_sums

PAYS_FROM = 4096
WORDS = tl.constexpr(128)  # of a program's columns
MOST_ROUNDS = 10  # rows of each thread, of which a list holds those to be read


@dataclass(frozen=True)
class Int4Fc2Settings:
    """warps: of a program; ahead: pairs of rows of a warp on their way, at most 16; programs: a grid's."""

    warps: int
    ahead: int
    programs: int


def int4_fc2_settings() -> Int4Fc2Settings:
    """Launch settings from whole steps of several widths (`benchmarks/int4_settings.py`)."""
    if INTERPRET:
        return Int4Fc2Settings(1, 2, 4)
    return Int4Fc2Settings(8, 2, 264)


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
    queue, weight, scales, row, other_row, first, second, word, lane, SLOT: tl.constexpr, W: tl.constexpr,
    GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The queue with a lane's four words of two rows on their way, where these are read, and their scales."""
    first = first & (word < W)
    second = second & (word < W)
    row = row.to(tl.int64)
    other_row = other_row.to(tl.int64)
    at = weight + word
    queue = ask(queue, lane, at + row * W, at + other_row * W, first, second, SLOT, 4, True)
    G: tl.constexpr = 8 * W // GROUP
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True) + word * 8 // (2 * GROUP)
    one = pairs + row * (G // 2)
    two = pairs + other_row * (G // 2)
    return ask(queue, lane, one, two, first, second, AHEAD * 4 + SLOT, 1, True)


@triton.constexpr_function
def queue_bytes(lanes, ahead):
    """Shared memory of the words and scales on their way, and in the end of the sums over warps."""
    return lanes * max(40 * ahead, 128)


@triton.jit
def _factor(scales, word, h, GROUP: tl.constexpr):
    """A pair of fp16, twice h times a lane's scale of two, times FACTOR_UNIT."""
    odd = word * 8 // GROUP % 2
    factor = (half_of(scales, odd) * FACTOR_UNIT * h).to(tl.float16)
    return pairs_of(factor, factor)


@triton.jit(do_not_specialize=["n", "n_own"])
def _int4_fc2_kernel(
    h,
    weight,
    scales,
    partials,
    n,
    n_own,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    AHEAD: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    # The rows begin .. begin + n_own - 1, of which each warp has the next 32 ROUNDS.
    W: tl.constexpr = D // 8
    WARPS: tl.constexpr = L // 32
    QUEUE: tl.constexpr = queue_bytes(L, AHEAD)
    lane = tl.arange(0, L)
    warp = lane // 32
    word = tl.program_id(0) * WORDS + lane % 32 * 4
    queue = lane_queue(lane, max(ROOM, QUEUE + list_bytes(L, ROUNDS)))
    begin = tl.program_id(1) * n_own
    end = tl.minimum(begin + n_own, n)
    row = begin + warp * (32 * ROUNDS)
    for k in tl.static_range(AHEAD):  # whether these rows are needed is not known yet
        one = row + 2 * k
        queue = _ask_pair(queue, weight, scales, one, one + 1, one < end, one + 1 < end, word, lane, k, W, GROUP, AHEAD)
    wait_for_predecessor(PDL)
    wanted = ()
    for r in tl.static_range(ROUNDS):
        own = row + 32 * r + lane % 32
        value = tl.load(h + own, mask=own < end, other=0.0)
        if r == 0:
            coming = ()  # h of the pairs on their way
            for k in tl.static_range(AHEAD):
                coming = coming + (from_lane(value, 2 * k), from_lane(value, 2 * k + 1))
            wanted = wanted + ((value != 0) & (lane % 32 >= 2 * AHEAD),)
        else:
            wanted = wanted + (value != 0,)
    at = lane
    if ASSEMBLY:
        at = queue[0] + QUEUE
    items, count = write_list(at, wanted, lane, ROUNDS)
    acc = ()
    for _ in tl.static_range(32):
        acc = acc + (tl.zeros((L,), tl.float32),)
    pair = warp  # of the list: warps take pairs in turn
    for _ in range(0, (tl.max(count, 0) + 2 * WARPS - 1) // (2 * WARPS) + AHEAD, AHEAD):
        for k in tl.static_range(AHEAD):
            words, queue = take(queue, lane, k, 4, 2 * AHEAD - 1)
            both, queue = take(queue, lane, AHEAD * 4 + k, 1, 2 * AHEAD - 2)
            one = _factor(both[0], word, coming[0], GROUP)
            two = _factor(both[1], word, coming[1], GROUP)
            for v in tl.static_range(4):
                acc = acc[8:] + int4_outer(acc[:8], words[v], words[4 + v], one, two)
            first, second = list_pair(items, pair, lane, ROUNDS)
            there = 2 * pair < count
            other = 2 * pair + 1 < count
            queue = _ask_pair(
                queue, weight, scales, begin + first, begin + second, there, other, word, lane, k, W, GROUP, AHEAD
            )
            h_first = tl.load(h + begin + first, mask=there, other=0.0)
            h_second = tl.load(h + begin + second, mask=other, other=0.0)
            coming = coming[2:] + (h_first, h_second)
            pair += WARPS
    sums = add_warps(queue, lane, acc, 32)
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
    settings = settings or int4_fc2_settings()
    require(1 <= settings.ahead <= 16, f"1 to 16 pairs of rows are on their way, not {settings.ahead}")
    lanes = 32 * settings.warps
    stripes = triton.cdiv(d, 1024)
    # No program without rows to read ahead, none with more than its list should hold.
    splits = min(settings.programs // stripes, triton.cdiv(n, 2 * settings.ahead * settings.warps))
    splits = min(MAX_SPLITS, max(1, splits, triton.cdiv(n, MOST_ROUNDS * lanes)))
    n_own = triton.cdiv(n, splits)
    splits = triton.cdiv(n, n_own)
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, MAX_SPLITS, d)
    pdl = use_pdl(pdl, out.device)
    list_rounds = triton.cdiv(n_own, lanes)
    needed = queue_bytes(lanes, settings.ahead) + list_bytes(lanes, list_rounds)
    _int4_fc2_kernel[(stripes, splits)](
        h,
        weight.words,
        weight.scales,
        partials,
        n,
        n_own,
        D=d,
        GROUP=weight.group,
        L=lanes,
        AHEAD=settings.ahead,
        ROUNDS=list_rounds,
        ROOM=even_room(triton.cdiv(settings.programs, n_sms(out.device)), d, pdl, needed),
        PDL=pdl,
        num_warps=settings.warps,
        launch_pdl=pdl,
    )
    add_partials(partials, splits, bias, residual, out, pdl)
