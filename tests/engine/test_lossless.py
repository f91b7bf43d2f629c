"""Lossless decoding of the decode engine, in plain torch and by kernels: the same text, whatever is drafted."""

import pytest
import torch
from decode_helpers import random_bundle, random_opt, reference_engine, rows_of

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED, Draft
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.lossless import Acceptance, Pace, Verified
from dejavu_train.engine.options import EngineOptions
from dejavu_train.errors import UserError

KINDS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, seed=3),
    "top_p": Sampling(0.7, 0.9, seed=4),
    "top_k": Sampling(1.3, 0.95, top_k=20, seed=5),
}


@pytest.fixture(scope="module")
def model():
    return random_opt()


@pytest.fixture(scope="module")
def engine(model):
    return reference_engine(model, random_bundle(model, means=True, lookahead=1))


@pytest.mark.parametrize("how", KINDS)
def test_the_text_is_the_dense_models_whatever_is_drafted(engine, model, how):
    (prompt,), options = rows_of(9), {"sampling": KINDS[how], "stop_tokens": (), "min_new_tokens": 5}
    expected = engine.generate([prompt], 40, lossless=Draft(0), **options)
    assert reference_engine(model).generate([prompt], 40, **options) == expected
    for length in (1, 3, 7, None):
        heard: list[int] = []

        def hear(row, token, heard=heard):
            heard.append(token)

        assert engine.generate([prompt], 40, lossless=Draft(length), callback=hear, **options) == expected == [heard]
        found = engine.acceptance
        assert found.tokens == 39 == found.accepted + found.cycles
        assert length is None or found.drafted > 0


def test_nothing_behind_the_new_position_is_read(engine):
    (prompt,), pair, shown = rows_of(9), engine.pair(Draft()), []
    expected = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(0))[0]

    def spoil(start, stop):
        state = engine.state
        assert (engine.core.watermark == stop - 1).all() and int(state.position) == stop - 1
        for cache in engine.core.caches:
            cache.k[:, :, stop - 1 :], cache.v[:, :, stop - 1 :] = float("nan"), float("nan")
            if cache.attn_in.shape[1]:
                cache.attn_in[:, stop - 1 :] = float("nan")
        state.tokens[0, stop:] = 7
        shown.extend(state.tokens[0, start:stop].tolist())

    pair.generate(prompt, 49, Sampling(), 0, (), 5, spoil)
    assert shown == expected


def test_stop_tokens_and_limits_end_a_text_inside_a_draft(engine):
    (prompt,) = rows_of(9)
    text = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(0))[0]
    for place in (3, 4, 9):
        stop, first = text[place], text.index(text[place]) + 1
        for length in (3, 7):
            assert engine.generate([prompt], 40, stop_tokens=(stop,), lossless=Draft(length))[0] == text[:first]
            assert engine.generate([prompt], place, stop_tokens=(), lossless=Draft(length))[0] == text[:place]


def test_kernels_give_the_text_of_the_dense_model(model):
    """Under the interpreter, or on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = random_opt(d_model=32, n_heads=2, d_ffn=64, n_layers=1, vocab=96, positions=40).to(device)
    engine = DecodeEngine(small, random_bundle(small), EngineOptions(ops="triton", context=40))
    (prompt,) = rows_of(6)
    prompt = [token % 96 for token in prompt]
    expected = engine.generate([prompt], 7, stop_tokens=(), lossless=Draft(0))
    assert engine.generate([prompt], 7, stop_tokens=(), lossless=Draft(3)) == expected
    assert engine.acceptance.drafted > 0


def test_refusals_are_one_line(engine, model):
    with pytest.raises(UserError, match="leave draft_weights out"):
        engine.generate(rows_of(5), 5, lossless=Draft(weights="int8"))
    always = reference_engine(model, random_bundle(model), kv_policy="always")
    with pytest.raises(UserError, match="needs kv_policy backfill"):
        always.generate(rows_of(5), 5, lossless=True)


def paced(a, step, verify, cycles=400, most=MOST_DRAFTED):
    """How often each length was drafted, where a token is accepted with probability a. Times as given, of g tokens."""
    pace, generator, lengths = Pace(most), torch.Generator().manual_seed(0), []
    for _ in range(cycles):
        g = pace.next()
        coins = (torch.rand(g, generator=generator) < a).int()
        pace.note(Verified(g, int(coins.cumprod(0).sum()), 0, False), g * step + verify(g))
        lengths.append(g)
    return lengths


def test_drafts_are_as_long_as_pays():
    assert sorted(paced(0.95, 0.2, lambda g: 1.2))[200] == 7, "cheap drafts that are accepted"
    assert 1 <= sorted(paced(0.6, 0.2, lambda g: 1.2))[200] <= 3
    useless = paced(0.3, 0.9, lambda g: 1.2 if g else 1.0)
    assert sum(g > 0 for g in useless[100:]) < 20, "it stops, and looks now and then"
    assert set(paced(1.0, 0.1, lambda g: 1.0, most=0)) == {0}
    pace = Pace(MOST_DRAFTED)
    for a in (0, 1):  # nothing is accepted, then everything
        for _ in range(600):
            g = pace.next()
            pace.note(Verified(g, a * g, 0, False), 0.3 * g + 1.0)
    assert pace.best() == MOST_DRAFTED, "it finds back"


def test_acceptance_is_counted():
    found = Acceptance()
    for verified, tokens in (
        (Verified(3, 3, 9, False), 4),
        (Verified(0, 0, 10, False), 1),
        (Verified(5, 0, 11, True), 1),
    ):
        found.add(verified, tokens, 0.5)
    report = found.report()
    assert report["tokens"] == 6 and report["tokens_per_second"] == 4.0 and report["drafted"] == 8
    assert report["acceptance"] == 3 / 8 and report["mean_length"] == 1.5 and report["saved"] == 0.5
    assert Acceptance().report()["saved"] == 0.0
