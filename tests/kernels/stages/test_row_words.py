"""The second half of a predictor by nibbles as 4-bit rows: all rounds, warps and vectors, against plain torch."""

import pytest
import torch

from dejavu_train.kernels.common.int4_tiles import word_vector
from dejavu_train.kernels.common.limits import takes_row_words
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.stages.select import Lists, UpRows, _select_kernel, row_words_launch
from dejavu_train.predictors.quantization import int4_rows, pack_nibbles


def select_words(hidden, up, scale, bias, threshold, row_state, chosen, warps):
    """A grid of programs with so many warps, whatever a plan would choose."""
    block, rank = chosen.block, hidden.shape[1]
    own = UpRows(up, scale, bias, threshold, row_state)
    lists = Lists(chosen.ids, chosen.counts, chosen.row_bits)
    how = row_words_launch(block, rank, warps)
    _select_kernel[(chosen.counts.numel(),)](
        hidden, own, lists, chosen.n, 1, **how.constants, PDL=False, num_warps=how.warps
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
    assert takes_row_words(rank, block, 32 * warps)
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
    select_words(hidden, up, scale.float(), bias, threshold, row_state, chosen, warps)
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
    select_words(hidden, pack_nibbles(codes), scale.float(), zero, zero - 1e9, state, chosen, 2)
    assert not chosen.to_mask(1).any()


def test_what_does_not_fit_goes_another_way():
    assert [word_vector(words) for words in (9, 34, 32)] == [1, 2, 4]
    assert takes_row_words(576, 32, 64) and takes_row_words(256, 64, 64) and takes_row_words(768, 32, 64)
    assert not takes_row_words(15, 64, 64)  # no whole words
    assert not takes_row_words(64, 32, 128)  # fewer neurons than the warps' rows
    assert not takes_row_words(64, 128, 32)  # eight rounds
    assert not takes_row_words(1024, 64, 32)  # 256 words a lane
