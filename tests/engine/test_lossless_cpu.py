"""Lossless decoding on a CPU: the dense model's text, byte for byte, whatever is drafted."""

import numpy as np
import pytest
import torch
from bundles import make_bundle
from decode_helpers import KINDS, random_opt, tokens

from dejavu_train.engine.cpu import CpuEngine, CpuWeights
from dejavu_train.engine.cpu.arrays import DENSE, MLP_DOWN, MLP_UP, OUT, QKV, new_scratch, new_state
from dejavu_train.engine.cpu.entry_point import enter
from dejavu_train.engine.cpu.prefill import PromptPass
from dejavu_train.engine.cpu.selectors import make_selectors
from dejavu_train.engine.cpu.team import Team
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Row
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model

SLOTS = 8


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt, means=True, cascade=True).at(0.3, 0.4)


class Slots:
    """A pass of the dense model over eight positions of one sequence behind its first ``known`` tokens."""

    def __init__(self, weights, row, known, threads=2):
        self.weights, self.row, self.known = weights, row, known
        self.rules, shape = make_selectors(weights, []), weights.shape
        self.state = new_state(shape, 1, len(row) + 1, 0, weights.operand, cached=weights.cached)
        self.slots = new_state(shape, SLOTS, len(row) + 1, 0, weights.operand, self.state)
        self.work = new_scratch(shape, SLOTS, len(row) + 1, threads, self.rules, weights.operand)
        self.team = Team(enter, (weights.model, self.rules, self.slots, self.work), threads)

    def logits(self, live, noise, order=range(SLOTS)):
        """(live, V): of the positions behind ``known`` in turn, where position i has the slot order[i].

        The other slots' buffers and everything behind the prompt hold ``noise``.
        """
        self.slots.clear()
        self.state.tokens[0, : len(self.row)] = self.row
        PromptPass(self.weights, self.rules, self.state, len(self.row) + 1, self.team.n_threads).run(0, self.known)
        for behind in (self.state.keys[..., self.known :], self.state.values[:, :, :, self.known :]):
            behind[:] = np.float16(noise).view(np.uint16) if behind.dtype == np.uint16 else noise
        for name in ("x", "partial", "results", "heads_out", "q", "logits", "residual"):
            getattr(self.work, name)[:] = noise
        for i in range(live):
            self.slots.position[order[i]], self.slots.row_state[order[i]] = self.known + i, DENSE
        self.slots.limit[:], self.slots.known[:] = len(self.row) + 1, len(self.row) + 1
        self.team.call(1, "greedy", score=True)
        assert not self.slots.fault[self.slots.position > self.known].any()
        return torch.from_numpy(self.work.logits[list(order[:live])])


@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_slot_depends_on_its_own_input_alone(stored, heads):
    """One to eight live slots, in any order, the others' buffers full of noise or NaN: equal bit for bit.

    They are equal to those of the engine of one row as well.
    """
    model = random_opt(d_model=10 * heads, n_heads=heads, d_ffn=13, n_layers=3, vocab=101)
    weights, row = CpuWeights.from_model(model, stored), tokens(40, vocab=101)
    slots = Slots(weights, row, 31)
    expected = slots.logits(SLOTS, 0.0)
    for live in range(1, SLOTS + 1):
        for noise in (np.nan, 1e30, -3.0):
            assert torch.equal(slots.logits(live, noise), expected[:live])
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(SLOTS)
        for live in (1, 3, SLOTS):
            assert torch.equal(slots.logits(live, np.nan, order), expected[:live])
    one = CpuEngine(weights, context=slots.state.tokens.shape[1], threads=2)
    one.begin([Row(row, len(row) + 1, sparse_from=len(row), prefilled=31)], score=True)
    for i in range(SLOTS):
        one.step(score=True)
        assert torch.equal(torch.from_numpy(one.scratch.logits[0]), expected[i])


@pytest.fixture(scope="module")
def engine(model, bundle):
    return CpuEngine(model, bundle, threads=2)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_text_is_the_dense_models_whatever_is_drafted(engine, model, weights, how):
    sampling, prompt = KINDS[how], tokens(12)
    options = {"sampling": sampling, "stop_tokens": (), "min_new_tokens": 9}
    expected = engine.generate([prompt], 60, lossless=Draft(0, weights), **options)
    assert engine.acceptance.tokens == 59 and engine.acceptance.drafted == 0
    assert CpuEngine(model, threads=2).generate([prompt], 60, **options) == expected
    for length in (1, 2, 7, None):
        assert engine.generate([prompt], 60, lossless=Draft(length, weights), **options) == expected
        found = engine.acceptance
        assert found.tokens == 59 == found.accepted + found.cycles and found.accepted <= found.drafted
        assert length is None or found.drafted > 0
    heard = []
    engine.generate([prompt], 60, lossless=True, callback=lambda row, token: heard.append(token), **options)
    assert [heard] == expected


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_nothing_behind_the_new_position_is_read(engine, how):
    """NaN in K, V and kept inputs behind every cycle, and in the tokens that were drafted too many."""
    prompt, pair = tokens(12), engine.pair(Draft())
    expected = engine.generate([prompt], 50, sampling=KINDS[how], stop_tokens=(), lossless=Draft(0))[0]
    shown = []

    def spoil(start, stop, tokens):
        state = pair.draft_state
        assert (state.watermark == stop - 1).all() and state.position[0] == stop - 1
        state.keys[..., stop - 1 :], state.values[:, :, :, stop - 1 :] = np.nan, np.nan
        state.attn_in[:, :, stop - 1 :], state.attn_unit[:, :, stop - 1 :] = np.nan, np.nan
        state.tokens[0, stop:] = 7
        assert state.tokens[0, start:stop].tolist() == list(tokens)
        shown.extend(tokens)

    pair.generate(Row.of_prompt(prompt, 62, KINDS[how]), (), 5, spoil)
    assert shown == expected


def test_a_draft_that_is_not_finite_costs_speed_alone(model, tiny_opt, bundle):
    weights = CpuWeights.from_model(model)
    engine, prompt = CpuEngine(weights, bundle, threads=2), tokens(12)
    expected = engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(0))
    weights.rounded("int8").model.norms[3] = np.nan
    assert engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(4, "int8")) == expected
    assert engine.acceptance.accepted < engine.acceptance.drafted
    weights.model.norms[3] = np.nan
    with pytest.raises(UserError, match="layer 1"):
        engine.generate([prompt], 20, stop_tokens=(), lossless=Draft(4))


def test_a_text_may_fill_the_context(model, bundle):
    engine, prompt = CpuEngine(model, bundle, context=40, threads=2), tokens(12)
    expected = engine.generate([prompt], 28, stop_tokens=(), lossless=Draft(0))
    assert len(expected[0]) == 28
    for draft in (Draft(7), Draft(), Draft(7, "int8")):
        assert engine.generate([prompt], 28, stop_tokens=(), lossless=draft) == expected


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_weights_of_a_draft_are_those_that_are_rounded_at_load(model, stored):
    made, loaded = CpuWeights.from_model(model).rounded(stored), CpuWeights.from_model(model, stored)
    assert made.formats.layers == stored and made.model.packed.all() == (stored == "int4")
    for layer in range(made.shape.n_layers):
        for part in (QKV, OUT, MLP_UP, MLP_DOWN):
            assert torch.equal(made.part(layer, part), loaded.part(layer, part))
    words = made.shape.vocab_size
    assert torch.equal(made.rows(made.model.lm_head, words), loaded.rows(loaded.model.lm_head, words))


def test_equal_logits_give_the_lowest_id(tiny_opt, bundle):
    """Planted ties, through the screen of the LM head."""
    model = load_model(str(tiny_opt))
    with torch.no_grad():
        model.lm_head.weight[200:] = model.lm_head.weight[: len(model.lm_head.weight) - 200]
    engine, prompt = CpuEngine(model, bundle, threads=2), tokens(12, vocab=200)
    for length in (0, 5):
        (text,) = engine.generate([prompt], 40, stop_tokens=(), lossless=Draft(length))
        assert max(text) < 200


def test_refusals_are_one_line(engine, model, bundle, tmp_path):
    prompt, several = tokens(12), CpuEngine(model, bundle, batch=2, threads=2)
    with pytest.raises(UserError, match="0 to 7"):
        Draft(8)
    with pytest.raises(UserError, match="a folder of the model in 4 bits, got int3"):
        Draft(weights="int3")
    with pytest.raises(UserError, match="on a CPU draft_weights is int4, int8 or left out"):
        engine.generate([prompt], 5, lossless=Draft(weights=str(tmp_path)))
    for asked in (engine, several):
        with pytest.raises(UserError, match="one sequence at a time"):
            asked.generate([prompt, prompt], 5, lossless=True)
    with pytest.raises(UserError, match="sparse_from"):
        engine.generate([prompt], 5, sparse_from=0, lossless=True)
    with pytest.raises(UserError, match="leave it out"):
        CpuEngine(model, bundle, stored="int8", threads=2).generate([prompt], 5, lossless=Draft(weights="int8"))
