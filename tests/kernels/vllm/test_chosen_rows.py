"""The map into chosen neurons that vLLM runs, against float64."""

import pytest
import torch
from dejavu_vllm.kernels.chosen_rows import Scorer, chosen_rows, chosen_rows_reference
from dejavu_vllm.kernels.lists import RowsSettings

NAN = float("nan")
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def problem(device, tokens, n, d, dtype, halves=1, rank=12, cut=0.4):
    torch.manual_seed(tokens + n + d)
    x = torch.randn(tokens, d, device=device).to(dtype)
    weight = (torch.randn(halves * n, d, device=device) * d**-0.5).to(dtype)
    bias = torch.randn(halves * n, device=device).to(dtype)
    down = (torch.randn(rank, d, device=device) * d**-0.5).to(dtype)
    up = (torch.randn(n, rank, device=device) * rank**-0.5).to(dtype)
    return x, weight, bias, Scorer(down, up, torch.randn(n, device=device).to(dtype), rank % 2 == 0, cut)


def exact_scores(x, scorer):
    hidden = x.double() @ scorer.down.double().T
    return (hidden.relu() if scorer.relu else hidden) @ scorer.up.double().T + scorer.offset.double()


def check(out, x, weight, bias, scores, cut, dtype):
    """Where scores are clear of the cut, numbers are a dense product's or zero."""
    n = scores.shape[1]
    clear, keep = ((scores - cut).abs() > 0.05), scores > cut
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    want = want * keep.repeat(1, len(weight) // n)
    clear = clear.repeat(1, len(weight) // n)
    assert clear.float().mean() > 0.8
    torch.testing.assert_close(out.double()[clear], want[clear], rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert bool((out[clear & (want == 0)] == 0).all())


CASES = [
    (1, 70, 48, torch.float32, 1, 12, None),
    (1, 45, 33, torch.float16, 2, 7, RowsSettings(16, 4, 16)),
    (1, 66, 40, torch.bfloat16, 1, 12, None),
    (3, 70, 48, torch.float32, 1, 12, RowsSettings(32, 16, 16)),
    (8, 66, 40, torch.float16, 2, 12, None),
    (17, 70, 48, torch.float32, 1, 20, None),
    (64, 50, 32, torch.float16, 2, 12, None),
]


@pytest.mark.parametrize(("tokens", "n", "d", "dtype", "halves", "rank", "settings"), CASES)
def test_chosen_by_a_predictor(device, tokens, n, d, dtype, halves, rank, settings):
    x, weight, bias, scorer = problem(device, tokens, n, d, dtype, halves, rank)
    scores = exact_scores(x, scorer)
    for given in (bias, None):
        out = chosen_rows(x, weight, given, scorer, settings=settings)
        check(out, x, weight, given, scores, scorer.cut, dtype)
        check(chosen_rows_reference(x, weight, given, scores > scorer.cut), x, weight, given, scores, scorer.cut, dtype)


@pytest.mark.parametrize("tokens", [1, 5])
def test_chosen_by_scores_into_a_part_of_a_matrix(device, tokens):
    x, weight, bias, _ = problem(device, tokens, 70, 48, torch.float32)
    wide = torch.full((tokens, 140), NAN, device=device)
    wide[:, :70] = torch.randn(tokens, 70, device=device)
    chosen_rows(x, weight, bias, wide[:, :70], 0.3, out=wide[:, 70:])
    check(wide[:, 70:], x, weight, bias, wide[:, :70].double(), 0.3, torch.float32)


@pytest.mark.parametrize(("cut", "value"), [(1e9, 0.0), (NAN, 0.0)])
def test_nothing_is_chosen(device, cut, value):
    x, weight, bias, scorer = problem(device, 2, 40, 32, torch.float32, cut=cut)
    assert bool((chosen_rows(x, weight, bias, scorer) == value).all())


def test_rows_that_no_token_chose_are_not_read(device):
    x, weight, bias, _ = problem(device, 3, 40, 32, torch.float32)
    scores = torch.randn(3, 40, device=device)
    scores[:, 7] = -1.0
    weight[7] = NAN
    assert bool(chosen_rows(x, weight, bias, scores).isfinite().all())
    scores[1, 7] = 1.0
    made = chosen_rows(x, weight, bias, scores)
    assert bool(made[1, 7].isnan()) and made[0, 7] == 0  # the union is read, and each token keeps its own


def test_refusals(device):
    x, weight, bias, scorer = problem(device, 2, 40, 32, torch.float32)
    for wrong, words in (
        ((x[:, :31], weight, bias, scorer), r"x: expected \(B, 32\)"),
        ((x, weight[:39], bias, scorer), "weight: 39 rows, expected 40 or twice|bias"),
        ((x, weight, bias[:3], scorer), "bias: expected"),
        ((x, weight, bias, torch.zeros(3, 40, device=device)), "scores: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            chosen_rows(*wrong)
