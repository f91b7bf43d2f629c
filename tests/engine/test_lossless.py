"""Lossless decoding of the decode engine, in plain torch and by kernels: the same text, whatever is drafted."""

from itertools import count

import pytest
import torch
from conftest import save_tiny_opt
from decode_helpers import KINDS, random_bundle, random_opt, reference_engine, rows_of

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED, Draft
from dejavu_train.engine.draft_weights import draft_weights, rounded_bytes
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.lossless import Acceptance, Copies, Pace, Pair, Verified
from dejavu_train.engine.options import EngineOptions
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise


@pytest.fixture(scope="module")
def model():
    return random_opt()


@pytest.fixture(scope="module")
def engine(model):
    return reference_engine(model, random_bundle(model, means=True, lookahead=1))


@pytest.mark.parametrize("how", KINDS)
def test_the_text_is_the_dense_models_whatever_is_drafted(engine, model, how):
    (prompt,), options = rows_of(9), {"sampling": KINDS[how], "stop_tokens": (), "min_new_tokens": 5}
    expected = engine.generate([prompt], 24, lossless=Draft(0), **options)
    assert reference_engine(model).generate([prompt], 24, **options) == expected
    for length, weights in ((1, None), (7, "int4"), (None, None)):
        heard: list[int] = []

        def hear(row, token, heard=heard):
            heard.append(token)

        draft = Draft(length, weights)
        assert engine.generate([prompt], 24, lossless=draft, callback=hear, **options) == expected == [heard]
        found = engine.acceptance
        assert found.tokens == 23 == found.accepted + found.cycles
        assert length is None or found.drafted > 0


@pytest.mark.parametrize("weights", [None, "int4"])
def test_nothing_behind_the_new_position_is_read(engine, weights, monkeypatch):
    (prompt,), pair, shown = rows_of(9), engine.pair(Draft(weights=weights)), []
    monkeypatch.setattr(pair, "ahead", False)
    expected = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(0))[0]

    def spoil(start, stop, tokens):
        state = engine.state
        assert (engine.core.watermark == stop - 1).all() and int(state.position) == stop - 1
        for cache in pair.step.caches:
            cache.k[:, :, stop - 1 :], cache.v[:, :, stop - 1 :] = float("nan"), float("nan")
            if cache.attn_in.shape[1]:
                cache.attn_in[:, stop - 1 :] = float("nan")
        state.tokens[0, stop:] = 7
        assert state.tokens[0, start:stop].tolist() == list(tokens)
        shown.extend(tokens)

    for length in (5, None, None):
        shown.clear()
        pair.generate(Row.of_prompt(prompt, 49), (), length, spoil)
        assert shown == expected


@pytest.mark.parametrize("draft", ["accepts little", "accepts all"])
def test_a_cycle_is_queued_before_the_look_at_the_one_before(model, draft, monkeypatch):
    """What is shown is the dense model's, wherever the text ends, and the limit of tokens wastes no cycle."""
    (prompt,), options = rows_of(9), {"sampling": KINDS["sampled"], "stop_tokens": ()}
    expected = reference_engine(model).generate([prompt], 40, **options)[0]
    engine = reference_engine(model, random_bundle(model) if draft == "accepts little" else None)
    pair, events = engine.pair(Draft()), []
    queue = pair.queue

    def logged(drafted, mode):
        events.append("queue")
        look, number = queue(drafted, mode), events.count("queue")
        return lambda: (events.append(f"look {number}"), look())[1]

    monkeypatch.setattr(pair, "queue", logged)
    assert engine.generate([prompt], 40, lossless=Draft(3), **options)[0] == expected
    assert events[:5] == ["queue", "queue", "look 1", "queue", "look 2"]
    assert events.count("queue") == len([each for each in events if each != "queue"])
    for place in (0, 9, 21):
        heard = []

        def hear(row, token, heard=heard, place=place):
            heard.append(token)
            return len(heard) > place

        found = engine.generate([prompt], 40, lossless=Draft(3), callback=hear, **options)[0]
        assert found == heard == expected[: place + 1]
        stopped = {**options, "stop_tokens": (expected[place],)}
        found = engine.generate([prompt], 40, lossless=Draft(3), **stopped)[0]
        assert found == expected[: expected.index(expected[place]) + 1]
    assert engine.generate([prompt], 40, lossless=Draft(5), **options)[0] == expected, "queued cycles left nothing"


def test_stop_tokens_and_limits_end_a_text_inside_a_draft(engine):
    (prompt,) = rows_of(9)
    text = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(0))[0]
    for place in (3, 4, 9):
        stop, first = text[place], text.index(text[place]) + 1
        for length in (3, 7):
            assert engine.generate([prompt], 40, stop_tokens=(stop,), lossless=Draft(length))[0] == text[:first]
            assert engine.generate([prompt], place, stop_tokens=(), lossless=Draft(length))[0] == text[:place]


@pytest.mark.parametrize("screen", [pytest.param(False, marks=pytest.mark.long), True])
def test_kernels_give_the_text_of_the_dense_model(model, screen):
    """Under the interpreter, or on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = random_opt(d_model=32, n_heads=2, d_ffn=64, n_layers=1, vocab=96, positions=40).to(device)
    engine = DecodeEngine(small, random_bundle(small), EngineOptions(ops="triton", context=40, screen=screen))
    (prompt,) = rows_of(6)
    prompt = [token % 96 for token in prompt]
    expected = engine.generate([prompt], 5, stop_tokens=(), lossless=Draft(0))
    assert engine.generate([prompt], 5, stop_tokens=(), lossless=Draft(3)) == expected
    assert engine.acceptance.drafted > 0
    assert (engine.pair(Draft()).dense.screen is not None) == screen


def test_a_draft_of_other_weights_shares_tokens_and_keys_and_values(model):
    engine = reference_engine(model, random_bundle(model, means=True))
    before = engine.memory
    pair = engine.pair(Draft(weights="int4"))
    assert pair.step.weights.packed and not pair.weights.packed and pair is engine.pair(Draft(weights="int4"))
    for draft, own in zip(pair.step.caches, engine.core.caches, strict=True):
        assert draft.k.data_ptr() == own.k.data_ptr() and draft.watermark.data_ptr() == own.watermark.data_ptr()
    assert pair.step.state is engine.state and pair.step.weights.lm_head is engine.weights.lm_head
    added = engine.memory["weights of the draft"]
    assert added == rounded_bytes(engine.weights) and "weights of the draft" in engine.describe()
    assert not any("K/V" in name for name in engine.memory.keys() - before.keys())
    longer = reference_engine(model).weights.drafts
    assert longer is not engine.weights.drafts and list(engine.weights.drafts) == ["int4"]


def test_a_folder_in_four_bits_drafts_as_rounding_does(tmp_path):
    """The folder is rounded to nearest, so its words are those that are made at load."""
    dense, folder = (
        str(save_tiny_opt(tmp_path / "dense", hidden_size=128, word_embed_proj_dim=128)),
        str(tmp_path / "4"),
    )
    quantise(QuantizeConfig(model=dense, output=folder, quantizer="rtn", device="cpu"))
    model = load_model(dense)
    engine = reference_engine(model, random_bundle(model))
    read, made = (draft_weights(engine.weights, asked) for asked in (folder, "int4"))
    for a, b in zip(read.tensors(), made.tensors(), strict=True):
        assert torch.equal(a, b)
    prompts, options = rows_of(9), {"stop_tokens": ()}
    expected = engine.generate(prompts, 20, lossless=Draft(0), **options)
    assert engine.generate(prompts, 20, lossless=Draft(3, folder), **options) == expected
    assert engine.acceptance.drafted > 0
    with pytest.raises(UserError, match="no weights in 4 bits"):
        engine.generate(prompts, 20, lossless=Draft(3, dense))
    other = reference_engine(random_opt(n_layers=1))
    with pytest.raises(UserError, match="another shape"):
        other.generate(prompts, 20, lossless=Draft(3, folder))
    with pytest.raises(UserError, match="not in 4 bits itself"):
        reference_engine(load_model(folder)).generate(prompts, 20, lossless=Draft(3, "int4"))


def test_a_draft_that_is_not_finite_costs_speed_alone(model):
    (prompt,), engine = rows_of(9), reference_engine(model, random_bundle(model))
    expected = engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(0))
    for layer in draft_weights(engine.weights, "int4").layers:
        layer.up.weight.scales.fill_(float("nan"))
    assert engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(4, "int4")) == expected
    engine.weights.final_norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="hold NaN"):
        engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(4, "int4"))


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_first_call_may_be_in_inference_mode(model, weights):
    engine, (prompt,) = reference_engine(model, random_bundle(model)), rows_of(9)
    expected = reference_engine(model).generate([prompt], 20, stop_tokens=())
    with torch.inference_mode():
        assert engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(3, weights)) == expected
    assert engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(3, weights)) == expected


def test_an_interrupt_leaves_an_engine_that_goes_on(engine):
    (prompt,), heard = rows_of(9), []
    expected = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(0))

    def interrupt(row, token):
        heard.append(token)
        if len(heard) == 10:
            raise KeyboardInterrupt

    for weights in (None, "int4"):
        heard.clear()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(5, weights), callback=interrupt)
        assert heard == expected[0][:10], "verified tokens alone were shown"
        assert engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(5, weights)) == expected


def test_a_text_may_fill_the_context(model):
    engine, (prompt,) = reference_engine(model, random_bundle(model), context=40), rows_of(12)
    expected = engine.generate([prompt], 28, stop_tokens=(), lossless=Draft(0))
    assert engine.generate([prompt], 28, stop_tokens=(), lossless=Draft(7)) == expected and len(expected[0]) == 28
    assert engine.generate([prompt], 28, stop_tokens=(), lossless=Draft(7, "int4")) == expected


def test_refusals_are_one_line(engine, model):
    with pytest.raises(UserError, match="pass draft_weights='int4'"):
        engine.generate(rows_of(5), 5, lossless=Draft(weights="int8"))


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


def test_copies_are_what_followed_the_last_three_tokens():
    copies = Copies([5, 6, 7, 8, 9, 5, 6])
    assert copies.draft(3) == []
    copies.add([7])
    assert copies.draft(3) == [8, 9, 5] and copies.draft(9) == [8, 9, 5, 6, 7]
    copies.add([1, 5, 6, 7])
    assert copies.draft(2) == [1, 5], "the last place counts"
    assert Copies([1, 2]).draft(3) == []


@pytest.mark.parametrize("weights", [None, "int4"])
def test_text_that_repeats_is_copied_and_is_the_dense_models(model, weights, monkeypatch):
    """The model repeats what it reads as soon as one token follows another always. All cycles take as long."""
    monkeypatch.setattr(Pair, "clock", staticmethod(count().__next__))
    engine = reference_engine(model, random_bundle(model))
    (prompt,) = rows_of(9)
    expected = engine.generate([prompt], 90, stop_tokens=(), lossless=Draft(0))[0]
    assert len({tuple(expected[i : i + 4]) for i in range(60, 86)}) < 20, "greedy text of a random model goes round"
    for _ in range(2):
        assert engine.generate([prompt], 90, stop_tokens=(), lossless=Draft(None, weights))[0] == expected
    found = engine.acceptance
    assert 0 < found.copied <= found.drafted and found.report()["copied"] == found.copied


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
