"""The whole decoding step through the kernels (interpreter on the CPU) against the masked forward pass."""

import copy
import functools
from types import SimpleNamespace

import decode_helpers
import pytest
import torch
from decode_helpers import masked_nll, random_bundle, random_opt
from four_bit_models import four_bits

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Kernels, Packer
from dejavu_train.evaluation.timing import time_engine
from dejavu_train.kernels.common.settings import settings_file


@pytest.fixture(scope="module")
def model():
    return random_opt(d_model=32, n_heads=2, d_ffn=72, n_layers=2, vocab=60, positions=80)


rows_of = functools.partial(decode_helpers.rows_of, vocab=60)


@pytest.mark.parametrize(
    ("options", "engine_options"),
    [
        (None, {}),
        ({}, {}),
        ({"int8": True}, {}),
        ({"cascade": True}, {}),
        ({"lookahead": 1, "means": True}, {"look_ahead": "stream"}),
        ({"lookahead": 1}, {"look_ahead": "inline"}),
        ({"lookahead": 1, "means": True}, {"look_ahead": "fused"}),
        ({"lookahead": 1, "int8": True}, {"look_ahead": "fused"}),
        ({"lookahead": 1, "int4": True}, {"look_ahead": "fused"}),
        ({"lookahead": 2, "relu": True}, {}),
        ({"top_k": 0.4}, {}),
        ({"dense_layers": (0,)}, {"batch": 2}),
        (None, {"batch": 2}),
    ],
    ids=str,
)
def test_scores_equal_the_masked_forward_pass(model, device, options, engine_options):
    bundle = None if options is None else random_bundle(model, rank=5, **options)
    engine = DecodeEngine(model, bundle, EngineOptions(device=device, context=16, crossover=False, **engine_options))
    kept = [tensor for cache in engine.core.caches for tensor in (cache.k, cache.v, cache.attn_in)]
    for tensor in [*kept, engine.core.work.q, engine.core.work.heads_out, engine.core.x]:
        tensor.fill_(float("nan"))
    rows = rows_of(4 if engine.batch > 1 else 3, 3)[: engine.batch]
    for row, nll in zip(rows, engine.score(rows, 1), strict=True):
        torch.testing.assert_close(nll, masked_nll(model, bundle, row, 1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{"rank": 5}, {"rank": 8, "int4": True}, {"rank": 8, "int4": True, "lookahead": 1}])
def test_several_rows_with_4_bit_weights(device, options):
    """fc1 reads what the rows selected together, tokens that are computed densely (of the prompt) select everything."""
    model = four_bits(random_opt(d_model=64, n_heads=2, d_ffn=72, positions=32))
    bundle, rows = random_bundle(model, **options), rows_of(3, 3)
    found = {}
    for ops in ("triton", "reference"):
        engine = DecodeEngine(
            model, bundle, EngineOptions(device=device, context=16, batch=2, ops=ops, graph=False, dtype=torch.float16)
        )  # fmt: skip
        found[ops] = engine.score(rows, 1)
    plans = [half for half in engine.plan.halves if half.kernels is Kernels.LISTED_CODES]
    nibbles = "int4" in options
    assert {half.format == "int4" for half in plans} == {nibbles}
    assert {half.own for half in plans} == {"lookahead" not in options}
    assert {half.packer is Packer.PREDICTOR for half in plans} == {nibbles and "lookahead" not in options}
    for one, other in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("guarded", [False, True])
def test_one_row_whose_programs_own_neurons(device, guarded):
    """A guard's dense steps select without them."""
    model = four_bits(random_opt(d_model=64, n_heads=2, d_ffn=72, positions=32))
    bundle, rows, found = random_bundle(model, rank=8, int4=True), rows_of(4), {}
    for ops in ("triton", "reference"):
        kept = []
        guard = SimpleNamespace(
            threshold=lambda key: torch.full((1,), 0.3, device=device), due=lambda: True, tensors=lambda: [],
            measure=lambda key, rows, keep, *_, to=kept: to.append((key.target, keep)), move=lambda rows: None,
        ) if guarded else None  # fmt: skip
        options = EngineOptions(device=device, context=8, ops=ops, graph=False, dtype=torch.float16, guard=guard)
        engine = DecodeEngine(model, bundle, options)
        assert {half.kernels for half in engine.plan.halves[1::2]} == {Kernels.OWNED_GRID}
        found[ops] = engine.score(rows, 1)[0], kept
    (one, selected), (other, expected) = found.values()
    torch.testing.assert_close(one, other, atol=0.05, rtol=0.01)
    assert len(selected) == len(expected) == (4 * 3 if guarded else 0)
    for (target, mask), (_, wanted) in zip(selected, expected, strict=True):
        assert target == "heads" or (mask.any() and (mask == wanted).float().mean() > 0.9)


@pytest.mark.parametrize("options", [{"means": True}, {"relu": True}], ids=str)
def test_layers_that_compute_all_select_the_same(model, device, options, monkeypatch):
    """The forms of several rows that a GPU takes where the union leaves little out."""
    monkeypatch.setattr("dejavu_train.engine.plan.crossover_measured", lambda engine: True)
    bundle = random_bundle(model, rank=5, **options)
    engine = DecodeEngine(model, bundle, EngineOptions(device=device, context=16, batch=2))
    rows = rows_of(4, 3)
    for row, nll in zip(rows, engine.score(rows, 1), strict=True):
        torch.testing.assert_close(nll, masked_nll(model, bundle, row, 1), atol=1e-3, rtol=1e-3)


def test_sampling_kernels(model, device):
    engine = DecodeEngine(model, options=EngineOptions(device=device, context=16))
    prompt = rows_of(2)
    greedy = engine.generate(prompt, 2, stop_tokens=())
    assert engine.generate(prompt, 2, sampling=Sampling(1.0, 1e-6), stop_tokens=()) == greedy
    warm = Sampling(2.0, 0.9, seed=5)
    assert engine.generate(prompt, 2, sampling=warm, stop_tokens=()) == engine.generate(
        prompt, 2, sampling=warm, stop_tokens=()
    )


def test_timing_of_the_engine(model, device):
    made = time_engine(copy.deepcopy(model).to(device), None, "dense-engine", torch.tensor([[2, 5, 7]]), 2)
    assert (made.backend, made.batch, made.prompt, made.new_tokens) == ("dense-engine", 1, 3, 2)
    assert 0 < made.ms_per_token["p20"] <= made.ms_per_token["p50"] <= made.ms_per_token["p80"]


def test_a_screen_of_the_lm_head_changes_no_token(model, device):
    """Greedy tokens with stop tokens that must wait. Logits, which need all of the LM head."""
    prompt = rows_of(4)
    plain = DecodeEngine(model, options=EngineOptions(device=device, context=16, ops="reference", screen=False))
    screened = DecodeEngine(model, options=EngineOptions(device=device, context=16, screen=True))
    first = plain.generate(prompt, 3, stop_tokens=())[0]
    asked = {"stop_tokens": first[:2], "min_new_tokens": 2}
    made = [engine.generate(prompt, 3, **asked) for engine in (plain, screened)]
    assert made[0] == made[1] and len(made[0][0]) >= 2 and first[0] not in made[0][0][:1]
    torch.testing.assert_close(screened.logits([prompt[0][:2]]), plain.logits([prompt[0][:2]]), atol=1e-3, rtol=1e-3)
    assert f"\nlaunch settings: {settings_file(screened.device)}\n" in screened.describe()
    assert "greedy tokens through a screen" in screened.describe() and "through a screen" not in plain.describe()
    assert (
        DecodeEngine(model, options=EngineOptions(device=device, context=16, batch=2, screen=True)).core.screen is None
    )
    assert DecodeEngine(model, options=EngineOptions(device=device, context=16, ops="reference")).core.screen is None
