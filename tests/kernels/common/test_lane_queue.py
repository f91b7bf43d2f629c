"""The queue of words in shared memory: what a lane takes is what it asked for, in order, zero where it did not."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.common.lane_queue import SHARED_BYTES, add_warps, ask, even_room, fetch_ahead, lane_queue, take


@triton.jit
def _copy_kernel(
    words, out, n, V: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, L: tl.constexpr, AGAIN: tl.constexpr
):
    lane = tl.arange(0, L)
    queue = lane_queue(lane, L * SLOTS * 8 * V)
    for step in tl.static_range(SLOTS):
        at = words + step * (2 * V * L) + lane * V
        queue = ask(queue, lane, at, at + V * L, lane < 0, lane < 0, step, V, False, AGAIN)
    for step in tl.static_range(STEPS):
        found, queue = take(queue, lane, step % SLOTS, V, SLOTS - 1)
        for piece in tl.static_range(2):
            for v in tl.static_range(V):
                tl.store(out + (2 * step + piece) * V * L + lane * V + v, found[piece * V + v])
        place = (step + SLOTS) * (2 * V * L) + lane * V
        one, two = place < n, place + V * L < n - 8 * V
        queue = ask(queue, lane, words + place, words + place + V * L, one, two, step % SLOTS, V, True, AGAIN)


@pytest.mark.parametrize(
    ("vector", "slots", "warps", "again"), [(4, 3, 1, False), (4, 2, 1, True), (2, 2, 2, True), (1, 4, 1, False)]
)
def test_words_arrive_in_order_and_zeros_beyond_the_end(device, vector, slots, warps, again):
    lanes, steps = 32 * warps, 3 * slots - 1
    n = 2 * vector * lanes * (2 * slots + 1) - vector * lanes // 2  # ends within a piece
    words = torch.randint(-(2**31), 2**31 - 1, (2 * vector * lanes * 4 * slots,), dtype=torch.int32, device=device)
    out = torch.full((2 * vector * lanes * steps,), 7, dtype=torch.int32, device=device)
    if device == "cpu":  # without assembly an unmasked ask reads what its masks say
        words[: 2 * vector * lanes * slots] = 0
    _copy_kernel[(1,)](words, out, n, V=vector, SLOTS=slots, STEPS=steps, L=lanes, AGAIN=again, num_warps=warps)
    place = torch.arange(len(out), device=device)
    first = place // (2 * vector * lanes) < slots
    piece = place // (vector * lanes) % 2
    end = torch.where(piece == 0, n, n - 8 * vector)
    whole = (place - place % vector) < end  # a piece's V words come together
    assert torch.equal(out, torch.where(first | whole, words[: len(out)], 0))


@triton.jit
def _sums_kernel(words, out, N: tl.constexpr, L: tl.constexpr):
    lane = tl.arange(0, L)
    queue = lane_queue(lane, 4 * N * L)
    tiles = ()
    for k in tl.static_range(N):
        tiles = tiles + (tl.load(words + k * L + lane),)
    for again in tl.static_range(2):  # a second sum in the same room
        sums = add_warps(queue, lane, tiles, N)
        for j in tl.static_range(N // (L // 32)):
            tl.store(out + (again * (N // (L // 32)) + j) * L + lane, sums[j])


@pytest.mark.parametrize(("n", "warps"), [(4, 1), (4, 4), (32, 8)])
def test_sums_over_warps(device, n, warps):
    tiles = torch.randn(n, warps, 32, device=device)
    out = torch.full((2, n // warps, warps, 32), float("nan"), device=device)
    _sums_kernel[(1,)](tiles, out, N=n, L=32 * warps, num_warps=warps)
    want = tiles.double().sum(1).view(n // warps, warps, 32)
    for found in out:
        torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)


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
    assert even_room(programs, 4096, True) == even_room(programs, 9216, False) == 0
