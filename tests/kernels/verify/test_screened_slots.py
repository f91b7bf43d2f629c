"""The screened LM head of eight slots: logits of the whole head where they may win, and how few rows are read."""

import pytest
import torch

from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.dense.screened_head import ScreenedHead
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.stages.norm import layer_norm
from dejavu_train.kernels.verify.screened_slots import ScreenScratch, screened_slots
from dejavu_train.kernels.verify.slot_products import slot_linear
from dejavu_train.kernels.verify.slot_walk import SLOTS, ProductScratch

S, NAN = SLOTS.value, float("nan")


def case(device, n, d, dtype, outliers=False):
    torch.manual_seed(n)
    x, weight = 2 * torch.randn(S, d, device=device) + 1, torch.randn(n, d, device=device) / d**0.5
    if outliers:  # a few columns as OPT has them
        x[:, :: d // 3] *= 50
        weight[:, :: d // 3] *= 20
    gain, shift = 1 + 0.1 * torch.randn(d, device=device), 0.1 * torch.randn(d, device=device)
    return x, LayerNormWeights(gain.to(dtype), shift.to(dtype)), weight.to(dtype)


def both(x, ln, weight, stops=()):
    """Logits behind the screen, and of the whole head."""
    n = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    layer_norm(x, ln, n)
    head = ScreenedHead.of(weight, ln)
    screened, whole = torch.full((2, S, len(weight)), NAN, device=x.device)
    barred = torch.tensor([*stops, *[-1] * (8 - len(stops))], dtype=torch.int32, device=x.device)
    scratch = ScreenScratch.empty(*weight.shape, x.device)
    screened_slots(x, n, head, barred, screened, scratch)
    slot_linear(n, Rows(weight), None, whole, None, ProductScratch.empty(x.shape[1], x.device))
    return screened, whole


@pytest.mark.parametrize(
    ("n", "d", "dtype", "outliers"), [(301, 64, torch.float16, False), (197, 80, torch.float32, True)]
)
def test_the_largest_logit_is_that_of_the_whole_head(device, n, d, dtype, outliers):
    screened, whole = both(*case(device, n, d, dtype, outliers))
    kept = screened > float("-inf")
    assert torch.equal(screened[kept], whole[kept]), "the same sums in the same order"
    assert torch.equal(screened.argmax(1), whole.argmax(1))
    assert bool(kept.any(1).all()) and not bool(kept.all()), "the screen leaves rows out"


def test_ties_are_all_there(device):
    x, ln, weight = case(device, 260, 64, torch.float16)
    n = torch.empty(x.shape, dtype=weight.dtype, device=device)
    layer_norm(x, ln, n)
    for slot, places in enumerate(((250, 7, 90), (3, 200), (100, 101))):
        weight[list(places)] = (n[slot] / n[slot].float().norm()).half()  # the largest logit of this slot
    screened, whole = both(x, ln, weight)
    for slot, lowest in enumerate((7, 3, 100)):
        assert int((screened[slot] == screened[slot].max()).nonzero()[0]) == lowest
        assert float(screened[slot].max()) == float(whole[slot].max())


def test_no_bound_is_taken_from_tokens_that_may_be_barred(device):
    x, ln, weight = case(device, 260, 64, torch.float16)
    n = torch.empty(x.shape, dtype=weight.dtype, device=device)
    layer_norm(x, ln, n)
    weight[5] = (8 * n[2].float() / n[2].float().norm()).half()  # far above all others of slot 2
    screened, whole = both(x, ln, weight, stops=(5,))
    screened[:, 5], whole[:, 5] = float("-inf"), float("-inf")
    assert torch.equal(screened.argmax(1), whole.argmax(1))


def test_a_slot_that_is_not_finite_reads_all_rows_and_changes_no_other(device):
    x, ln, weight = case(device, 260, 64, torch.float16)
    expected = both(x, ln, weight)[1].argmax(1)
    x[3] = NAN
    x[6] = 0.0
    screened, _ = both(x, ln, weight)
    assert bool(screened[3].isnan().all())
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(screened[others].argmax(1), expected[others])
