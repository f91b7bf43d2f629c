"""The queue of words in shared memory. What it holds is tested where it is used: tests of queues in assembly."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.lane_queue import (
    SHARED_BYTES,
    even_room,
    fetch_ahead,
)


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
