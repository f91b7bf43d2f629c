"""Lossless decoding on a GPU: captured cycles, drafts of other weights, one look from the host a cycle.

python -m pytest -m gpu tests/engine/test_lossless_gpu.py
"""

import warnings

import pytest
import torch
from decode_helpers import mlp_ahead, random_bundle, random_opt, rows_of

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED, Draft
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.options import EngineOptions

pytestmark = pytest.mark.gpu
KINDS = {"greedy": Sampling(), "sampled": Sampling(1.0, seed=3), "top_p": Sampling(0.7, 0.9, top_k=50, seed=4)}
WEIGHTS = (None, "int4")
NEW = 60


@pytest.fixture(scope="module", params=["own site", "look-ahead"])
def engine(request):
    model = random_opt(d_model=256, n_heads=4, d_ffn=1024, n_layers=3, positions=160).half().cuda()
    bundle = random_bundle(model, rank=32, means=True, int4=True, lookahead=int(request.param == "look-ahead"))
    return DecodeEngine(model, mlp_ahead(bundle) if request.param == "look-ahead" else bundle)


def prompt():
    return rows_of(19)[0]


def write(engine, draft, sampling, **options):
    return engine.generate([prompt()], NEW, sampling=sampling, stop_tokens=(), lossless=draft, **options)[0]


@pytest.mark.parametrize("how", KINDS)
def test_the_text_is_that_of_no_draft(engine, how):
    expected = write(engine, Draft(0), KINDS[how])
    for weights in WEIGHTS:
        for length in (1, 2, 3, 5, MOST_DRAFTED, None):
            assert write(engine, Draft(length, weights), KINDS[how]) == expected, (weights, length)
            found = engine.acceptance
            assert found.tokens == NEW - 1 == found.accepted + found.cycles and (length is None or found.drafted)
        keys = [key for key in engine.pair(Draft(weights=weights)).step._graphs if key[0] == "cycle"]
        assert {(drafted, mode) for _, drafted, mode in keys} >= {(MOST_DRAFTED, KINDS[how].mode)}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("length", [1, 5])
def test_nothing_behind_the_new_position_is_read(engine, weights, length, monkeypatch):
    expected, pair, shown = write(engine, Draft(0), Sampling()), engine.pair(Draft(weights=weights)), []
    monkeypatch.setattr(pair, "ahead", False)

    def spoil(start, stop, tokens):
        state, at = engine.state, stop - 1
        assert (engine.core.watermark == at).all() and int(state.position) == at
        for cache in pair.step.caches:
            cache.k[:, :, at:], cache.v[:, :, at:] = float("nan"), float("nan")
            cache.attn_in[:, at:] = float("nan")
        pair.step.work.carried.inputs[:, at:] = float("nan")
        state.tokens[0, stop:] = 7
        assert state.tokens[0, start:stop].tolist() == list(tokens)
        shown.extend(tokens)

    pair.generate(Row.of_prompt(prompt(), 19 + NEW), (), length, spoil)
    assert shown == expected


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_host_waits_for_nothing_but_its_look(engine, weights):
    write(engine, Draft(3, weights), Sampling())  # graphs are recorded
    pair, verified = engine.pair(Draft(weights=weights)), []
    pair.begin(Row.of_prompt(prompt(), 19 + NEW), ())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            look = pair.queue(3, "greedy")
            for _ in range(4):
                following = pair.queue(3, "greedy")
                verified.append(look())
                look = following
            verified.append(look())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in waits if "synchroniz" in str(each.message)]
    expected, shown = write(engine, Draft(0), Sampling()), [token for each in verified for token in each.new]
    assert expected[1 : 1 + len(shown)] == shown


def test_stop_tokens_and_the_context_end_a_text_inside_a_draft():
    model = random_opt(d_model=256, n_heads=4, d_ffn=1024, n_layers=2, positions=64).half().cuda()
    engine = DecodeEngine(model, random_bundle(model, rank=32), EngineOptions(context=48))
    (short,) = rows_of(9)
    text = engine.generate([short], 39, stop_tokens=(), lossless=Draft(0))[0]
    assert len(text) == 39, "the context is full"
    for weights in WEIGHTS:
        assert engine.generate([short], 39, stop_tokens=(), lossless=Draft(7, weights))[0] == text
        for place in (3, 4, 9):
            stop, first = text[place], text.index(text[place]) + 1
            for length in (3, 7):
                draft = Draft(length, weights)
                assert engine.generate([short], 39, stop_tokens=(stop,), lossless=draft)[0] == text[:first]
                assert engine.generate([short], place, stop_tokens=(), lossless=draft)[0] == text[:place]


def test_memory_of_a_draft_is_said(engine):
    engine.pair(Draft(weights="int4"))
    assert 0 < engine.memory["weights of the draft"] < engine.memory["weights"] / 2
