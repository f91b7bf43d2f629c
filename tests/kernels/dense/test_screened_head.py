"""The screened LM head: the token and the logit that all logits would give, and how few rows are read for it."""

import pytest
import torch

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.dense.dense_rows import dense_rows
from dejavu_train.kernels.dense.screened_head import (
    ScreenedHead,
    TokenCandidates,
    screened_head,
    screened_head_reference,
)
from dejavu_train.kernels.formats.matrix import Rows
from dejavu_train.kernels.sample.sampling import TokenState, advance, advance_reference

NAN = float("nan")


def norm(d, device, dtype=torch.float32):
    return LayerNormWeights(
        1 + 0.1 * torch.randn(d, device=device, dtype=dtype), 0.1 * torch.randn(d, device=device, dtype=dtype)
    )


def state_of(device, **values):
    state = TokenState.empty(1, 12, device)
    for name, value in {"done": 0, "position": 4, "known": 3, "limit": 12, **values}.items():
        getattr(state, name).copy_(torch.as_tensor(value))
    return state


def asked(state):
    return state.position, state.least, state.stops


def case(device, n, d, dtype, outliers=False):
    x, weight = 2 * torch.randn(1, d, device=device) + 1, torch.randn(n, d, device=device) / d**0.5
    if outliers:  # a few columns as OPT has them
        x[:, :: d // 3] *= 50
        weight[:, :: d // 3] *= 20
    return x, norm(d, device, dtype), weight.to(dtype)


def token_of(best, state, logits):
    advance(logits, state, chosen=best)
    return int(state.tokens[0, int(state.position[0])])


@pytest.mark.parametrize(
    ("n", "d", "dtype", "outliers"),
    [(301, 64, torch.float16, False), (97, 80, torch.float32, True), (130, 2064, torch.bfloat16, False)],
)
def test_the_largest_logit_of_all(device, n, d, dtype, outliers):
    x, ln, weight = case(device, n, d, dtype, outliers)
    head, state = ScreenedHead.of(weight, ln), state_of(device)
    for tensor in (head.upper, head.lows, head.best.values):
        tensor.fill_(NAN)
    logits = torch.full((1, n), NAN, device=device)
    dense_rows(x, ln, Rows(weight), None, "none", logits)
    screened_head(x, head, *asked(state))
    assert float(head.best.values.max()) == float(logits.max()), "the same sums in the same order"
    assert token_of(head.best, state, logits) == int(logits.argmax())
    exact = layer_norm_reference(x.double(), ln, torch.float64) @ weight.double().T
    assert bool((head.upper.double() >= exact[0] - 1e-12).all()), "no logit is above its bound"
    assert float(head.lows.max()) <= float(exact.max())
    read = head.rows_read()
    assert read < n, "the screen leaves rows out"


def test_ties_go_to_the_lowest_token_and_barred_ones_to_none(device):
    x, ln, weight = case(device, 200, 64, torch.float16)
    plain = layer_norm_reference(x, ln, torch.float16)
    weight[[180, 7, 90]] = (plain[0] / plain.float().norm()).half()  # the largest logit, three times
    head = ScreenedHead.of(weight, ln)
    for least, stops, expected in ((0, [7], 7), (9, [7], 90), (9, [7, 90, 180], None), (0, [], 7)):
        state = state_of(device, least=least, stops=stops + [-1] * (8 - len(stops)))
        screened_head(x, head, *asked(state))
        logits = torch.empty(1, 200, device=device)
        dense_rows(x, ln, Rows(weight), None, "none", logits)
        if expected is None:
            expected = int(logits[0].index_fill(0, torch.tensor(stops, device=device), float("-inf")).argmax())
        assert token_of(head.best, state, logits) == expected
        again = state_of(device, least=least, stops=stops + [-1] * (8 - len(stops)))
        screened_head_reference(x, head, *asked(again))
        advance_reference(logits, again, chosen=head.best)
        assert again.tokens.equal(state.tokens)


@pytest.mark.parametrize("where", ["input", "weight"])
def test_a_nan_ends_the_row(device, where):
    x, ln, weight = case(device, 70, 48, torch.float32)
    (x if where == "input" else weight)[0, 5] = NAN
    head = ScreenedHead.of(weight, ln)
    for run, choose in ((screened_head, advance), (screened_head_reference, advance_reference)):
        state = state_of(device)
        run(x, head, *asked(state))
        choose(torch.empty(1, 70, device=device), state, chosen=head.best)
        assert int(state.fault[0]) == 5 and int(state.done[0]) == 1 and int(state.tokens.max()) < 70


@pytest.mark.parametrize("sign", [0, -1, 1])
def test_an_input_beyond_fp16_is_that_of_all_logits(device, sign):
    """It is infinite when it is rounded: logits are, or are no numbers where two of them meet."""
    x, ln, weight = case(device, 60, 64, torch.float16)
    ln.weight[3], ln.weight[9] = 6e4, 6e4 if sign else 1.0
    x[0, 3], x[0, 9] = 40.0, 40.0 * sign
    head, state, expected = ScreenedHead.of(weight, ln), state_of(device), state_of(device)
    logits = torch.empty(1, 60, device=device)
    dense_rows(x, ln, Rows(weight), None, "none", logits)
    assert not bool(logits.isfinite().all())
    advance(logits, expected)
    screened_head(x, head, *asked(state))
    advance(logits, state, chosen=head.best)
    for name, tensor in vars(expected).items():
        assert getattr(state, name).equal(tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bounds_hold_where_a_layer_norm_cancels(device, dtype):
    d, n = 208, 200
    x, _, weight = case(device, n, d, dtype)
    z = torch.nn.functional.layer_norm(x, (d,))[0]
    ln = LayerNormWeights(torch.full((d,), 100.0, device=device), -100 * z + 1e-3 * torch.randn(d, device=device))
    head, state, logits = ScreenedHead.of(weight, ln), state_of(device), torch.empty(1, n, device=device)
    dense_rows(x, ln, Rows(weight), None, "none", logits)
    screened_head(x, head, *asked(state))
    assert bool((head.upper >= logits[0]).all()) and float(head.lows.max()) <= float(logits.max())
    assert token_of(head.best, state, logits) == int(logits.argmax())


def test_where_all_tokens_are_barred_the_first_is_taken(device):
    x, ln, weight = case(device, 4, 32, torch.float16)
    head, logits, made = ScreenedHead.of(weight, ln), torch.empty(1, 4, device=device), []
    dense_rows(x, ln, Rows(weight), None, "none", logits)
    for chosen in (None, head.best):
        state = state_of(device, least=9, stops=[0, 1, 2, 3, -1, -1, -1, -1])
        screened_head(x, head, *asked(state))
        advance(logits, state, chosen=chosen)
        made.append(int(state.tokens[0, 5]))
    assert made == [0, 0]


def test_equal_logits_are_all_read(device):
    x, ln, weight = case(device, 90, 32, torch.float16)
    head, state = ScreenedHead.of(torch.zeros_like(weight), ln), state_of(device)
    screened_head(x, head, *asked(state))
    assert token_of(head.best, state, torch.empty(1, 90, device=device)) == 0
    assert head.rows_read() == 90
    weight[7, 3] = float("inf")  # no bound holds
    head = ScreenedHead.of(weight, ln)
    screened_head(x, head, *asked(state_of(device)))
    assert head.rows_read() == 90


def test_what_does_not_fit_is_refused(device):
    with pytest.raises(ValueError, match="16 divides, got 40"):
        ScreenedHead.of(torch.zeros(8, 40, device=device), norm(40, device))
    with pytest.raises(ValueError, match="contiguous"):
        ScreenedHead.of(torch.zeros(8, 96, device=device)[:, :48], norm(48, device))
    with pytest.raises(ValueError, match="float64"):
        ScreenedHead.of(torch.zeros(8, 48, device=device).double(), norm(48, device))
    head = ScreenedHead.of(torch.zeros(8, 48, device=device), norm(48, device))
    with pytest.raises(ValueError, match="expected shape"):
        screened_head(torch.zeros(2, 48, device=device), head, *asked(state_of(device)))
    with pytest.raises(ValueError, match="greedy"):
        advance(torch.zeros(1, 8, device=device), state_of(device), "top_p", chosen=TokenCandidates.empty(3, device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        *((d, torch.float16) for d in (768, 1024, 2048, 2560, 4096, 5120, 7168, 9216, 12288)),
        *((d, torch.bfloat16) for d in (2048, 4096)),
    ],
)
def test_true_shapes(device, d, dtype):
    n = 50272
    for seed in range(3):
        torch.manual_seed(seed)
        x, ln, weight = case(device, n, d, dtype, seed == 2)
        head, state, logits = ScreenedHead.of(weight, ln), state_of(device), torch.empty(1, n, device=device)
        dense_rows(x, ln, Rows(weight), None, "none", logits, pdl=True)
        screened_head(x, head, *asked(state), pdl=True)
        assert float(head.best.values.max()) == float(logits.max())
        assert token_of(head.best, state, logits) == int(logits.argmax())
        read = head.rows_read()
        print(d, seed, "rows read", read)
        assert read < n // 2, "worth less than all logits"
