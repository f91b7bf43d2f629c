"""Product of fc2 over all neurons with 4-bit weights, one to eight tokens:

    out[b, j] = residual[b, j] + bias[j] + sum_i h[b, i] scale[i, j // group] code[i, j]

    weight (n, d)    stripe 0          stripe 1     256 columns a warp
    rows of part 0   program (0, 0)    (1, 0)       each walks over its list of rows whose h is not zero,
    rows of part 1   program (0, 1)    (1, 1)       all its warps together, sixteen rows at a time

h (B, n), behind the activation. Parts add up in `add_partials`, in a fixed order. In plain torch: `int4_fc2_reference`.
The factor h * scale * 64 is rounded to fp16. Products with the codes are exact, sums in fp32:
|h * scale| must stay below 1023, or sums are NaN.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dejavu_train.kernels.common.assembly import ASSEMBLY, assembly
from dejavu_train.kernels.common.checks import check_device, check_dtype, check_int4, check_shape, require
from dejavu_train.kernels.common.int4_neurons import (
    factor_pairs,
    factor_sums,
    fc2_products,
    lane_places,
    nibble_unit,
    store_four,
    take_halves,
)
from dejavu_train.kernels.common.int4_tiles import FACTOR_UNIT, half_of
from dejavu_train.kernels.common.lane_queue import ask, even_room, fetch_ahead, lane_queue, take
from dejavu_train.kernels.common.launch import fetches_rows, n_sms, use_pdl, wait_for_predecessor
from dejavu_train.kernels.common.limits import MOST_TOKENS, takes_down, tokens_at_once
from dejavu_train.kernels.common.partial_sums import add_partials, most_splits, partial_sums
from dejavu_train.kernels.common.settings import Settings
from dejavu_train.kernels.common.shared_list import list_bytes, list_four, write_list
from dejavu_train.kernels.formats.matrix import Matrix

MOST_ROUNDS = 20  # rows of each thread, of which a list holds those to be read
COLUMNS = tl.constexpr(256)  # of a warp
ASKS = tl.constexpr(4)  # of a unit


@dataclass(frozen=True)
class Int4Fc2Settings(Settings, stage="down_int4"):
    """warps: of a program. ahead: units of sixteen rows on their way. programs: of a multiprocessor. registers: of a
    thread, at most. fetched: rows that the L2 is asked for early, a multiple of 8, at most as many as a program has
    threads."""

    warps: int
    ahead: int
    programs: int
    registers: int
    fetched: int


def int4_fc2_reference(
    h: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    unit: float = 1.0,
    every: bool = False,
) -> None:
    """Plain torch, any batch, in fp64 where h is."""
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    out.copy_(h.to(wide) / unit @ weight.dense(wide) + bias.to(wide) + residual)


@triton.constexpr_function
def queue_bytes(lanes, ahead):
    """Shared memory of the words and scales on their way."""
    return 80 * lanes * ahead


@triton.constexpr_function
def _row_at(size):
    """PTX: $0 = $2 + `size` $1, which becomes one instruction. Of mad.wide the assembler of CUDA 12.8 makes three in a
    loop: a product, and a sum in two halves. A word then takes one instruction more, and registers are spilled."""
    return (
        "{ .reg .b32 low, high; mov.b64 {low, high}, $2;"
        f"mad.lo.cc.u32 low, $1, {size}, low; madc.hi.u32 high, $1, {size}, high; mov.b64 $0, {{low, high}}; }}"
    )


@triton.jit
def _at_row(base, row, WIDTH: tl.constexpr, ASM: tl.constexpr = ASSEMBLY):
    """base + WIDTH row: pointers (L,) to a row of the program's, whose number is not negative."""
    if ASM:
        SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8 * WIDTH
        at = assembly(_row_at(SIZE), "=l,r,l", (row, base.to(tl.int64)), PURE=True)
        at = at.to(base.dtype, bitcast=True)
    else:
        at = base + row.to(tl.int64) * WIDTH
    return at


@triton.jit
def _four_rows(base, rows, WIDTH: tl.constexpr):
    """`_at_row` of each of four rows."""
    at = ()
    for j in tl.static_range(4):
        at = at + (_at_row(base, rows[j], WIDTH),)
    return at


@triton.jit
def _ask_unit(
    queue, weight, scales, items, four, left, place, inside, K: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    AHEAD: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(the queue with a lane's words of four rows of the list on their way and their scales, the rows, which are there)

    weight, scales: where the lane's words and its pair of scales of the program's first row are. four: number of the
    rows in the list, in fours. left: rows of the list from the first of them on, if any. inside: the lane has columns.
    """
    rows = list_four(items, four, tl.arange(0, place.shape[0]), ROUNDS)
    live = (left > 0, left > 1, left > 2, left > 3)
    there = live
    if not WHOLE:
        there = (live[0] & inside, live[1] & inside, live[2] & inside, live[3] & inside)
    at = _four_rows(weight, rows, W)
    queue = ask(queue, place, at[0], at[1], there[0], there[1], 2 * K, 4, True)
    queue = ask(queue, place, at[2], at[3], there[2], there[3], 2 * K + 1, 4, True)
    at = _four_rows(scales.to(tl.pointer_type(tl.int32), bitcast=True), rows, G // 2)
    # Behind the words, which take as much room as four such slots each.
    queue = ask(queue, place, at[0], at[1], there[0], there[1], 8 * AHEAD + 2 * K, 1, True, True)
    queue = ask(queue, place, at[2], at[3], there[2], there[3], 8 * AHEAD + 2 * K + 1, 1, True, True)
    return queue, rows, live


@triton.jit
def _load_four(h, rows, live):
    """h of four rows for a lane's token, whose rows `h` points to. Zero where the rows are not."""
    at = _four_rows(h, rows, 1)
    found = ()
    for j in tl.static_range(4):
        found = found + (tl.load(at[j], mask=live[j], other=0.0),)
    return found


# Neurons lie along K of the tensor cores' m16n8k16, outputs along M, tokens along N. No code is converted
# (`int4_neurons`): by count 7 instructions a word, and 6 for list, addresses, words, scales and h.
# `stages.listed_int4` multiplies listed rows of down too. Its programs have all columns of their rows, and stripes of
# columns lie in B there, where several tokens would find no room for their sums.
@triton.jit(do_not_specialize=["n", "n_own"])
def _int4_fc2_kernel(
    h, weight, scales, partials, n, n_own, batch, D: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr,
    AHEAD: tl.constexpr, TOKENS: tl.constexpr, ROUNDS: tl.constexpr, FETCHED: tl.constexpr,
    ROOM: tl.constexpr, UNIT: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The rows begin .. begin + n_own - 1; of the list, lane (g, t) has entries 16 u + 4 t .. 16 u + 4 t + 3 of unit u.
    # It reads four words of each, so that the eight lanes of a row read one line of 128 bytes.
    # Columns that share a scale are at least those of TOKENS lane groups, up to four. Column N of B has the factors of
    # token N % TOKENS, with the scale of the lane groups from N // TOKENS * TOKENS on. Eight tokens fill all columns.
    # Then a lane takes half of its words from each 128 columns, and each half has factors of its own. So a word is
    # multiplied once, whatever the number of tokens.
    W: tl.constexpr = D // 8
    G: tl.constexpr = D // GROUP
    WHOLE: tl.constexpr = W % L == 0  # 32 words a warp
    QUEUE: tl.constexpr = queue_bytes(L, AHEAD)
    HALVES: tl.constexpr = TOKENS // 8 + 1  # of a warp's columns, with factors of their own
    lane = tl.arange(0, L)
    g = lane % 32 // 4
    t = lane % 4
    place = lane_places(lane)
    begin = tl.program_id(1) * n_own
    end = tl.minimum(begin + n_own, n)
    stripe = tl.program_id(0)
    if FETCHED > 0:
        # What is to be read is not known before the predecessor has ended. Until then the L2 is asked for first rows.
        # A row for each lane, all warps with some. Of a row's last stripe, which may be shorter, as many words as of
        # others. Scales of all stripes are few, and lie side by side: one program asks for them, up to 15 bytes early.
        number = lane % 32 * (L // 32) + lane // 32
        own_words = weight + (begin + number).to(tl.int64) * W + tl.minimum(stripe * L, W - min(L, W))
        fetch_ahead(own_words, (number < FETCHED) & (begin + number < end), 4 * min(L, W))
        own_scales = (scales + begin.to(tl.int64) * G + lane).to(tl.int64) & -16  # lane 0's
        asks = (lane < 1) & (tl.program_id(0) == 0) & (begin + FETCHED <= n)
        fetch_ahead(own_scales, asks, 2 * G * FETCHED)
    begin_columns = stripe * (L // 32 * COLUMNS) + lane // 32 * COLUMNS
    column = begin_columns + 32 * g
    groups = ((column - g % TOKENS * 32) // GROUP,)
    if HALVES == 2:
        groups = (begin_columns // GROUP, (begin_columns + COLUMNS // 2) // GROUP)
    inside = column < D
    queue = lane_queue(lane, max(ROOM, QUEUE + list_bytes(L, ROUNDS)))
    at = lane
    if ASSEMBLY:
        at = queue[0] + QUEUE
    wait_for_predecessor(PDL)
    wanted = ()
    for r in tl.static_range(ROUNDS):
        own = begin + (lane // 32 * ROUNDS + r) * 32 + lane % 32
        for k in tl.static_range(TOKENS):
            if EVERY:
                live = own < end
            else:
                from_token = h + tl.minimum(batch - 1, k).to(tl.int64) * n
                live = tl.load(from_token + own, mask=own < end, other=0.0) != 0
            if k > 0:
                live = live | wanted[r]
            wanted = wanted[:r] + (live,)
    items, count = write_list(at, wanted, lane, ROUNDS)
    of_token = h + (tl.minimum(g % TOKENS, batch - 1).to(tl.int64) * n + begin)
    weight += begin.to(tl.int64) * W + column // 8
    scales += begin.to(tl.int64) * G + groups[0] // 2 * 2
    four = t
    left = count - 4 * t
    coming = ()  # h of the units on their way
    for k in tl.static_range(AHEAD):
        queue, rows, live = _ask_unit(
            queue, weight, scales, items, four, left, place, inside, k, W, G, AHEAD, ROUNDS, WHOLE
        )
        coming = coming + _load_four(of_token, rows, live)
        four += 4
        left -= 16
    zero = tl.zeros((L,), tl.float32)
    acc = ()
    ones = ()
    for _ in tl.static_range(64):  # sixteen for each word of a lane
        acc = acc + (zero,)
    for _ in tl.static_range(4 * HALVES):
        ones = ones + (zero,)
    for _ in range(0, tl.max(count, 0), 16 * AHEAD):
        for k in tl.static_range(AHEAD):
            if HALVES == 1:
                w01, queue = take(queue, place, 2 * k, 4, AHEAD * ASKS - 1)
                w23, queue = take(queue, place, 2 * k + 1, 4, AHEAD * ASKS - 2)
            else:
                w01, queue = take_halves(queue, lane, 2 * k, AHEAD * ASKS - 1)
                w23, queue = take_halves(queue, lane, 2 * k + 1, AHEAD * ASKS - 2)
            s01, queue = take(queue, place, 8 * AHEAD + 2 * k, 1, AHEAD * ASKS - 3)
            s23, queue = take(queue, place, 8 * AHEAD + 2 * k + 1, 1, AHEAD * ASKS - 4)
            factors = ()
            for half in tl.static_range(HALVES):
                odd = groups[half] % 2
                s0, s1 = half_of(s01[0], odd), half_of(s01[1], odd)
                factors = factors + factor_pairs((s0, s1, half_of(s23[0], odd), half_of(s23[1], odd)), coming[:4])
                ones = ones[4:] + factor_sums(ones[:4], factors[2 * half], factors[2 * half + 1])
            for v in tl.static_range(4):
                words = (w01[v], w01[4 + v], w23[v], w23[4 + v])
                b0 = factors[2 * (v * HALVES // 4)]
                acc = acc[16:] + fc2_products(acc[:16], words, b0, factors[2 * (v * HALVES // 4) + 1])
            queue, rows, live = _ask_unit(
                queue, weight, scales, items, four, left, place, inside, k, W, G, AHEAD, ROUNDS, WHOLE
            )
            coming = coming[4:] + _load_four(of_token, rows, live)
            four += 4
            left -= 16
    for p in tl.static_range(2):  # of C[g, 2 t + p] a lane group's own columns of B
        n_column = 2 * t + p
        own_token = n_column % TOKENS
        meant = (n_column // TOKENS == g // TOKENS) & (own_token < batch)
        numbers = ()
        for k in tl.static_range(32):  # columns of a lane group
            tile = acc[16 * (k // 8) + 8 * (k % 2) + k % 8 // 2 * 2 + p]
            lowered = tile * (1 / nibble_unit(k % 8 // 2)) - ones[4 * (k * HALVES // 32) + p] * 8.0
            numbers = numbers + (lowered * (1 / (FACTOR_UNIT * UNIT)),)
        to = partials + (tl.program_id(1) * batch + own_token) * D
        for k in tl.static_range(8):
            at = column + 4 * k
            if HALVES == 2:
                at = begin_columns + k // 4 * (COLUMNS // 2) + 16 * g + k % 4 * 4
            store_four(to + at, numbers[4 * k : 4 * k + 4], meant & inside)


def int4_fc2(
    h: Tensor,
    weight: Matrix,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    partials: Tensor | None = None,
    pdl: bool = False,
    unit: float = 1.0,
    every: bool = False,
) -> None:
    """h (1, n) fp32, or (B, n) fp16 with B from 2 to 8. residual and out (B, d) fp32, weight (n, d). Bitwise
    deterministic. h is stored times unit. every: no row is left out. See the module's docstring.

    Errors: shapes, dtypes, groups and batches that `takes_down` refuses, a CPU tensor.
    """
    check_device("h", h)
    batch = len(h)
    n, d = weight.shape
    check_shape("h", h, batch, n)
    check_dtype("h", h, (torch.float32 if batch == 1 else torch.float16,))
    rows = check_int4("weight", weight, (n, d), h)
    check_shape("residual", residual, batch, d)
    check_shape("out", out, batch, d)
    require(1 <= batch <= MOST_TOKENS, f"{batch} tokens, expected 1 to {MOST_TOKENS}")
    tokens = tokens_at_once(batch)
    if not takes_down(rows.group, d, batch):
        raise ValueError(
            f"groups of {rows.group} of {d} columns: expected an even number of multiples of {32 * min(4, tokens)}"
        )
    settings = Int4Fc2Settings.find(weight.format, h.device, tokens=batch)
    lanes = 32 * settings.warps
    fetched_fit = 0 <= settings.fetched <= lanes and settings.fetched % 8 == 0
    require(fetched_fit, f"{settings.fetched} rows fetched, expected a multiple of 8, at most {lanes}, one a thread")
    stripes = triton.cdiv(d, COLUMNS.value * settings.warps)
    # No program without rows to read ahead, none with more than its list should hold where partial sums have room.
    splits = min(settings.programs * n_sms(h.device) // stripes, triton.cdiv(n, 16 * settings.ahead))
    most = most_splits(out.device)
    splits = min(most // batch, max(1, splits, triton.cdiv(n, MOST_ROUNDS * lanes)))
    n_own = triton.cdiv(n, splits)
    splits = triton.cdiv(n, n_own)
    if partials is None:
        partials = partial_sums(d, out.device)
    check_shape("partials", partials, most, d)
    pdl = use_pdl(pdl, out.device)
    list_rounds = triton.cdiv(n_own, lanes)
    resident = triton.cdiv(stripes * splits, n_sms(out.device))  # of a multiprocessor, where the grid lies evenly
    needed = queue_bytes(lanes, settings.ahead) + list_bytes(lanes, list_rounds)
    _int4_fc2_kernel[(stripes, splits)](
        h, rows.words, rows.scales, partials, n, n_own, batch, D=d, GROUP=rows.group, L=lanes, AHEAD=settings.ahead,
        TOKENS=tokens, ROUNDS=list_rounds, FETCHED=settings.fetched if fetches_rows(out.device) else 0,
        ROOM=even_room(resident, d, pdl, needed), UNIT=unit, EVERY=every, PDL=pdl,
        num_warps=settings.warps, maxnreg=settings.registers, launch_pdl=pdl,
    )  # fmt: skip
    add_partials(partials, splits, bias, residual, out, pdl)
