"""The second half of a predictor by nibbles as 4-bit rows: all rounds, warps and vectors, against plain torch."""

import pytest
import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.int4_tiles import word_vector
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.lookahead.select_nibbles import select_nibbles, takes
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles


@triton.jit
def _select_kernel(
    hidden, up, scale, bias, threshold, row_state, ids, counts, bits, n, RANK: tl.constexpr, BLOCK: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    select_nibbles(
        tl.program_id(0), hidden, up, scale, bias, threshold, row_state, ids, counts, bits, n, RANK, BLOCK, L, False,
        None, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "block", "warps", "n"),
    [
        (272, 32, 2, 70),  # 34 words: two at a time, five units
        (64, 32, 1, 70),  # two rounds
        (64, 64, 2, 130),
        (24, 64, 1, 129),  # four rounds, three words
        (128, 16, 1, 33),  # four words at a time
    ],
)
@pytest.mark.parametrize("state", [0, 1, 2])
def test_the_neurons_above_the_threshold_are_listed(device, rank, block, warps, n, state):
    torch.manual_seed(rank)
    assert takes(rank, block, 32 * warps)
    # The same numbers on every device: how many logits lie near the threshold depends on them.
    codes, scale = (each.to(device) for each in int4_rows(torch.randn(n, rank)))
    hidden, bias = (torch.randn(1, rank) * 3).to(device), torch.randn(n).to(device)
    hidden[0, 1] = 1e5  # beyond fp16
    logits = (hidden.double() @ (codes.double() * scale.double()[:, None]).T)[0] + bias
    threshold = logits.median().float().reshape(1) + 1e-2
    chosen = Selection.empty(n, device, block)
    # Behind the rows, what nothing may read.
    up = torch.cat((pack_nibbles(codes), torch.full((9, rank // 2), 255, dtype=torch.uint8, device=device)))[:n]
    row_state = torch.tensor([state], dtype=torch.int32, device=device)
    _select_kernel[(triton.cdiv(n, block),)](
        hidden, up, scale.float(), bias, threshold, row_state, chosen.ids, chosen.counts, chosen.row_bits, n, RANK=rank,
        BLOCK=block, L=32 * warps, num_warps=warps,
    )  # fmt: skip
    want = {0: torch.zeros_like(logits, dtype=torch.bool), 1: logits > threshold, 2: torch.ones_like(logits) > 0}[state]
    near = (logits - threshold).abs() < 1e-3 * logits.abs().max()
    got = chosen.to_mask(1)[0]
    assert (got == want)[~near].all() and int(near.sum()) < n // 4
    assert torch.equal(chosen.indices().sort().values, got.nonzero()[:, 0])


def test_a_hidden_value_that_is_no_number_selects_nothing(device):
    rank, n = 64, 32
    codes, scale = int4_rows(torch.randn(n, rank, device=device))
    hidden = torch.randn(1, rank, device=device)
    hidden[0, 40] = float("nan")
    chosen, zero = Selection.empty(n, device, 32), torch.zeros(n, device=device)
    state = torch.ones(1, dtype=torch.int32, device=device)
    _select_kernel[(1,)](
        hidden, pack_nibbles(codes), scale.float(), zero, zero - 1e9, state, chosen.ids, chosen.counts,
        chosen.row_bits, n, RANK=rank, BLOCK=32, L=64, num_warps=2,
    )  # fmt: skip
    assert not chosen.to_mask(1).any()


def test_what_does_not_fit_goes_another_way():
    assert [word_vector(words) for words in (9, 34, 32)] == [1, 2, 4]
    assert takes(576, 32, 64) and takes(256, 64, 64) and takes(768, 32, 64)
    assert not takes(15, 64, 64)  # no whole words
    assert not takes(64, 32, 128)  # fewer neurons than the warps' rows
    assert not takes(64, 128, 32)  # eight rounds
    assert not takes(1024, 64, 32)  # 256 words a lane
