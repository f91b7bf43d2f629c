"""The queue of words in shared memory: what is taken is what was asked for, in order, zero where it was not."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.lane_queue import (
    SHARED_BYTES,
    ask,
    ask_lines,
    even_room,
    fetch_ahead,
    lane_queue,
    line_slot_bytes,
    take,
    take_unit,
)


@triton.jit
def _copy_kernel(
    words, out, n, V: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, L)
    queue = lane_queue(lane, L * SLOTS * 8 * V, ASM)
    for step in tl.static_range(SLOTS):
        at = words + step * (2 * V * L) + lane * V
        queue = ask(queue, lane, at, at + V * L, lane < 0, lane < 0, step, V, False, AGAIN, ASM)
    for step in tl.static_range(STEPS):
        found, queue = take(queue, lane, step % SLOTS, V, SLOTS - 1, ASM)
        for piece in tl.static_range(2):
            for v in tl.static_range(V):
                tl.store(out + (2 * step + piece) * V * L + lane * V + v, found[piece * V + v])
        place = (step + SLOTS) * (2 * V * L) + lane * V
        one, two = place < n, place + V * L < n - 8 * V
        queue = ask(queue, lane, words + place, words + place + V * L, one, two, step % SLOTS, V, True, AGAIN, ASM)


@pytest.mark.parametrize(
    ("vector", "slots", "warps", "again"), [(4, 3, 1, False), (4, 2, 1, True), (2, 2, 2, True), (1, 4, 1, False)]
)
def test_words_arrive_in_order_and_zeros_beyond_the_end(device, asm, vector, slots, warps, again):
    lanes, steps = 32 * warps, 3 * slots - 1
    n = 2 * vector * lanes * (2 * slots + 1) - vector * lanes // 2  # ends within a piece
    words = torch.randint(-(2**31), 2**31 - 1, (2 * vector * lanes * 4 * slots,), dtype=torch.int32, device=device)
    out = torch.full((2 * vector * lanes * steps,), 7, dtype=torch.int32, device=device)
    if not asm:  # without assembly an unmasked ask reads what its masks say
        words[: 2 * vector * lanes * slots] = 0
    _copy_kernel[(1,)](
        words, out, n, V=vector, SLOTS=slots, STEPS=steps, L=lanes, AGAIN=again, ASM=asm, num_warps=warps
    )
    place = torch.arange(len(out), device=device)
    first = place // (2 * vector * lanes) < slots
    piece = place // (vector * lanes) % 2
    end = torch.where(piece == 0, n, n - 8 * vector)
    whole = (place - place % vector) < end  # a piece's V words come together
    assert torch.equal(out, torch.where(first | whole, words[: len(out)], 0))


@triton.jit
def _lines_kernel(
    words, out, N: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr, L: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, L)
    queue = lane_queue(lane, SLOTS * line_slot_bytes(L, V), ASM)
    BESIDE: tl.constexpr = L // 4 * V  # words of a row that the warps take at once
    PAIRS: tl.constexpr = (W + BESIDE - 1) // BESIDE
    place = lane // 32 * (8 * V)
    for k in tl.static_range(PAIRS + SLOTS):
        if k >= SLOTS:
            for unit in tl.static_range(2):
                found, queue = take_unit(queue, lane, k % SLOTS, unit, V, SLOTS - 1, ASM)
                for j in tl.static_range(2 * V):
                    tl.store(out + (((k - SLOTS) * 2 + unit) * 2 * V + j) * L + lane, found[j])
        left = W - k * BESIDE - place
        queue = ask_lines(
            queue,
            lane,
            words + place,
            N,
            left,
            k % SLOTS,
            V,
            W,
            k * BESIDE,
            (k + 1) * BESIDE > W or N < 16,
            ASM,
        )


@pytest.mark.parametrize(
    ("vector", "n_rows", "width", "slots", "warps"),
    [
        (4, 16, 256, 3, 1),
        (4, 16, 336, 2, 2),
        (4, 11, 144, 2, 1),
        (2, 5, 150, 4, 4),
        (2, 16, 64, 1, 2),
        (1, 16, 51, 2, 2),
    ],
)
def test_units_of_lines_arrive_in_order_and_zeros_beyond_the_matrix(device, asm, vector, n_rows, width, slots, warps):
    lanes, line = 32 * warps, 8 * vector
    pairs = -(-width // (line * warps))
    words = torch.randint(-(2**31), 2**31 - 1, (n_rows, width), dtype=torch.int32, device=device)
    out = torch.full((pairs, 2, 2, vector, warps, 8, 4), 7, dtype=torch.int32, device=device)
    _lines_kernel[(1,)](words, out, n_rows, vector, width, slots, lanes, asm, num_warps=warps)
    whole = torch.zeros(16, pairs * warps * line, dtype=torch.int32, device=device)
    whole[:n_rows, :width] = words
    want = whole.view(2, 8, pairs, warps, 2, 4, vector).permute(2, 4, 0, 6, 3, 1, 5)
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_fetching_ahead_changes_nothing(device):
    @triton.jit
    def kernel(words, out, L: tl.constexpr):
        lane = tl.arange(0, L)
        fetch_ahead(words + lane * 64, lane < 16, 256)
        tl.store(out + lane, tl.load(words + lane))

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    words = torch.arange(1024, dtype=torch.int32, device=device)
    out = torch.empty(32, dtype=torch.int32, device=device)
    kernel[(1,)](words, out, L=32, num_warps=1)
    assert torch.equal(out, words[:32])


@pytest.mark.parametrize("programs", [2, 3, 4, 6])
def test_no_more_programs_fit_than_are_meant(programs):
    reserved = 1024  # of shared memory, by the driver for each program
    taken = even_room(programs, 9216, True) + reserved
    assert programs * taken <= SHARED_BYTES < (programs + 1) * taken
    assert even_room(programs, 2048, True) == even_room(programs, 9216, False) == 0
    assert even_room(programs, 9216, True, needed=taken) == 0
