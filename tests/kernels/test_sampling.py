"""The choice of the next token by the kernel: against the reference where nothing is drawn, by its sets where it is."""

import pytest
import torch

from dejavu_train.kernels.sample.sampling import (
    LEAST_PART,
    AdvanceSettings,
    TokenState,
    advance,
    advance_reference,
)

ROWS, VOCABULARY = 4, 50


def state_of(device, **values) -> TokenState:
    state = TokenState.empty(ROWS, 12, device, vocab=VOCABULARY)
    state.done.zero_()
    for name, value in {"position": 4, "known": 3, "limit": 12, **values}.items():
        getattr(state, name).copy_(torch.as_tensor(value))
    return state


def logits_of(device, seed=0):
    return (3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))).to(device)


def test_stop_tokens_wait_for_the_least_length(device):
    logits = logits_of(device)
    best = logits.topk(2, dim=1).indices
    stops = [int(best[0, 0]), int(best[1, 0]), *[-1] * 6]
    made = []
    for step in (advance, advance_reference):
        state = state_of(device, stops=stops, least=[6, 5, 0, 99])
        step(logits, state)
        made.append(state)
    for name, tensor in vars(made[0]).items():
        torch.testing.assert_close(tensor, getattr(made[1], name), msg=name)
    assert made[0].tokens[:2, 5].tolist() == [int(best[0, 1]), int(best[1, 0])]
    assert made[0].done.tolist()[:2] == [0, 1]


WIDE = 2 * LEAST_PART + 9  # tokens of three parts


def wide_logits(kind):
    """Rows whose largest logits lie in one part, in two, before a stop token that is barred, and beside a NaN."""
    logits = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(1)).clamp(max=3.0)
    logits[0, [LEAST_PART + 7, WIDE - 1]] = 5.0
    logits[1, [LEAST_PART - 1, 2 * LEAST_PART]] = 5.0
    logits[2, [3, WIDE - 2]], logits[2, [5, WIDE - 1]] = 6.0, 5.0
    logits[3] = float("-inf") if kind == "none" else logits[3]
    if kind == "nan":
        logits[3, WIDE - 1] = float("nan")
    return logits


@pytest.mark.parametrize("parts", [1, 2, 3, 128])
@pytest.mark.parametrize("kind", ["plain", "none", "nan"])
def test_a_greedy_row_that_programs_share(device, parts, kind):
    logits, made = wide_logits(kind).to(device), []
    stops = [3, WIDE - 2, *[-1] * 6]
    for step in (advance, advance_reference):
        state = state_of(device, stops=stops, least=[0, 0, 6, 9], known=[3, 3, 3, 3])
        for tensor in (state.best, state.best_ids):
            tensor.fill_(-1)
        with AdvanceSettings(4, parts).in_use():
            for _ in range(2):  # a second step with the same tickets
                step(logits, state)
        made.append(state)
    for name, tensor in vars(made[0]).items():
        if name not in ("best", "best_ids"):  # what token stands behind a NaN is open
            some = slice(0, 3) if name == "tokens" and kind == "nan" else slice(None)
            torch.testing.assert_close(tensor[some], getattr(made[1], name)[some], msg=name)
    wanted = [LEAST_PART + 7, LEAST_PART - 1, 5]
    assert made[0].tokens[:3, 5].tolist() == wanted, "the lowest id of the largest logits, but no barred one"
    assert made[0].tokens[2, 6] == 3 and made[0].done.tolist() == [0, 0, 1, int(kind == "nan")]
    assert made[0].fault.tolist() == [0, 0, 0, 5 * (kind == "nan")] and int(made[0].tokens[3].max()) < WIDE


@pytest.mark.parametrize("mode", ["greedy", "temperature", "top_p", "top_k"])
def test_a_nan_logit_ends_its_row_and_is_flagged(device, mode):
    for step in (advance, advance_reference):
        logits = logits_of(device)
        logits[1, 7], logits[2] = float("nan"), float("nan")
        logits[3] = float("nan")
        state = state_of(device, position=[4, 4, 4, -1], top_k=[5] * ROWS)
        step(logits, state, mode)
        assert state.fault.tolist() == [0, 5, 5, 0], "nothing stands before position 0: its logits are not looked at"
        assert state.done.tolist() == [0, 1, 1, 0] and int(state.tokens.max()) < VOCABULARY


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (10, 0.6), (VOCABULARY + 5, 1.0)])
def test_top_k_then_top_p(device, top_k, top_p):
    logits = logits_of(device)
    order = logits.sort(dim=1, descending=True)
    among = order.values[:, :top_k].softmax(1)
    seen = [set() for _ in range(ROWS)]
    for seed in range(12):
        state = state_of(device, top_k=[top_k] * ROWS, top_p=[top_p] * ROWS, seed=[4 * seed + b for b in range(ROWS)])
        advance(logits, state, "top_k")
        for b in range(ROWS):
            seen[b].add(int(state.tokens[b, 5]))
    for b in range(ROWS):
        number = int((among[b].cumsum(0) < top_p).sum()) + 1 if top_p < 1 else min(top_k, VOCABULARY)
        assert seen[b] <= set(order.indices[b, :number].tolist())
        assert int(order.indices[b, 0]) in seen[b]
    assert any(len(each) > 1 for each in seen)


PENALTIES = {"repetition": [1.0, 1.5, 1.0, 3.0], "presence": [0.0, 0.0, 2.0, 1.0], "frequency": [0.0, 0.5, 0.0, 1.0]}


def test_greedy_rows_of_a_mixed_step_take_penalties_as_the_reference(device):
    logits, seen = logits_of(device), torch.zeros(ROWS, VOCABULARY, dtype=torch.int32)
    best = logits.topk(3, dim=1).indices.cpu()
    for b in range(ROWS):
        seen[b, best[b]] = torch.tensor([2 * b, 1, 3], dtype=torch.int32)
    made = []
    for step in (advance, advance_reference):
        state = state_of(device, temperature=[0.0] * ROWS, seen=seen, known=[3, 3, 3, 9], **PENALTIES)
        for _ in range(2):
            step(logits, state, "mixed")
        made.append(state)
    for name, tensor in vars(made[0]).items():
        torch.testing.assert_close(tensor, getattr(made[1], name), msg=name)
    chosen = made[0].tokens[:3, 5].tolist()
    assert chosen[0] == int(best[0, 0]) and chosen[2] != int(best[2, 0]), "of row 2 presence is taken"
    row, token = logits[1].cpu().clone(), best[1].tolist()  # by hand: generated once, prompt alone, both
    for at, times in zip(token, (1, 0, 1), strict=True):
        row[at] = (row[at] / 1.5 if row[at] > 0 else row[at] * 1.5) - 0.5 * times
    assert chosen[1] == int(row.argmax())
    assert int(made[0].seen[0, chosen[0]]) == 4 and int(made[0].seen[3, 0]) == 1, "twice generated, and given"


def test_a_row_of_a_mixed_step_draws_what_it_draws_in_its_own_mode(device):
    logits = logits_of(device)
    own = {"temperature": (1.5, 0, 1.0), "top_p": (1.0, 0, 0.7), "top_k": (2.0, 5, 0.9), "greedy": (0.0, 0, 1.0)}
    numbers = dict(zip(("temperature", "top_k", "top_p"), zip(*own.values(), strict=True), strict=True))
    for seed in range(6):
        seeds = [ROWS * seed + b for b in range(ROWS)]
        together = state_of(device, seed=seeds, **numbers)
        advance(logits, together, "mixed")
        for b, mode in enumerate(own):
            alone = state_of(device, seed=seeds, **numbers)
            advance(logits, alone, mode)
            assert int(alone.tokens[b, 5]) == int(together.tokens[b, 5]), mode


def test_min_p_leaves_what_is_likely_enough(device):
    logits = logits_of(device)
    likely = logits.softmax(1)
    for step in (advance, advance_reference):
        seen = [set() for _ in range(ROWS)]
        for seed in range(12):
            seeds = [4 * seed + b for b in range(ROWS)]
            state = state_of(device, temperature=[1.0] * ROWS, top_k=[0] * ROWS, min_p=[0.3] * ROWS, seed=seeds)
            step(logits, state, "mixed")
            for b in range(ROWS):
                seen[b].add(int(state.tokens[b, 5]))
        for b in range(ROWS):
            assert all(likely[b, token] >= 0.29 * likely[b].max() for token in seen[b])
        assert any(len(each) > 1 for each in seen)


def test_noise_beyond_31_bits_is_noise(device):
    """Noise is numbered by position times tile and id. Of Persimmon's 262,144 words that passes 2^31 at 8,192."""
    vocabulary, seeds = 4096, 3
    first = 2**31 // vocabulary - 1
    state = TokenState.empty(seeds, first + 8, device, vocab=vocabulary)
    for name, value in {"done": 0, "position": first - 1, "known": 1, "limit": first + 8}.items():
        getattr(state, name).fill_(value)
    state.seed.copy_(torch.arange(seeds))
    for _ in range(3):
        advance(torch.zeros(seeds, vocabulary, device=device), state, "temperature")
    drawn = state.tokens[:, first : first + 3]
    assert drawn.unique().numel() == drawn.numel() and drawn.max() < vocabulary
    assert 0.2 < drawn.float().mean() / vocabulary < 0.8
