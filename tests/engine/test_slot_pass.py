"""A pass over eight slots: a slot's logits are its own, and those of the dense model."""

import dataclasses

import pytest
import torch
from decode_helpers import random_opt
from family_models import random_family

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.slot_pass import SLOTS, SlotPass
from dejavu_train.ground.errors import UserError

ROW = [5, 7, 11, 13, 17, 19]


def engine_of(ops, layers=1, screen=False):
    device = "cuda" if torch.cuda.is_available() and ops == "triton" else "cpu"
    model = random_opt(d_model=32, n_heads=2, d_ffn=64, n_layers=layers, vocab=96, positions=40).to(device)
    engine = DecodeEngine(model, None, EngineOptions(ops=ops, context=40, screen=screen))
    engine.begin([Row(ROW, 20, sparse_from=6, prefilled=6)])
    return engine


def passes_of(engine):
    """Passes over one sequence, and over eight that are alike."""
    for sequences in (1, SLOTS):
        caches = [
            dataclasses.replace(
                cache, k=cache.k.repeat(sequences, 1, 1, 1), v=cache.v.repeat(sequences, 1, 1, 1), watermark=None
            )
            for cache in engine.core.caches
        ]
        yield SlotPass(engine.weights, caches, engine.core.ops, engine.core.work.pdl)


@pytest.mark.parametrize("ops", ["reference", "triton"])
@torch.no_grad()
def test_no_slot_depends_on_others_of_one_sequence_or_of_eight(ops):
    """Some slots hold the tokens of a first pass, wherever they lie. The others hold random ones, and K and V of NaN
    follow."""
    engine = engine_of(ops)
    device, vocabulary = engine.device, engine.shape.vocab_size
    tokens = torch.randint(3, vocabulary, (SLOTS,), dtype=torch.int32, device=device)
    at = int(engine.state.position[0]) + torch.arange(SLOTS, dtype=torch.int32, device=device)
    expected, known = None, []
    for made in passes_of(engine):
        if expected is None:
            made.run(tokens, at)
            expected, known = made.logits.clone(), [(cache.k.clone(), cache.v.clone()) for cache in made.caches]
        for live, shift in ((8, 0), (1, 0), (1, 3), (2, 5), (3, 1), (4, 4), (5, 0), (6, 2), (7, 7), (8, 6)):
            slots = (torch.arange(live, device=device) + shift) % SLOTS
            held = torch.randint(3, vocabulary, (SLOTS,), dtype=torch.int32, device=device)
            places = at[-1] + 1 + torch.arange(SLOTS, dtype=torch.int32, device=device)
            held[slots], places[slots] = tokens[:live], at[:live]
            last = places.tolist() if len(made.caches[0].k) > 1 else [int(at[live - 1])]
            for cache, kept in zip(made.caches, known, strict=True):
                for numbers, whole in zip((cache.k, cache.v), kept, strict=True):
                    numbers.copy_(whole.expand_as(numbers))
                    for sequence, position in enumerate(last):
                        numbers[sequence, :, position + 1 :] = float("nan")
            made.run(held, places)
            assert torch.equal(made.logits[slots], expected[:live]), (live, shift)


def family_engine(name, ops="reference", **sizes):
    model = random_family(name, **sizes)
    device = "cuda" if torch.cuda.is_available() and ops == "triton" else "cpu"
    options = EngineOptions(ops=ops, device=device, dtype=torch.float32, context=40)
    engine = DecodeEngine(model, None, options)
    engine.begin([Row(ROW, 20, sparse_from=6, prefilled=6)])
    return engine


@pytest.mark.parametrize(
    "name", ["llama", "fatrelu", "drelu", "arcee", "nemotron", "jais2", "galactica", "bloom", "350m"]
)
def test_slots_of_every_family_are_the_dense_engine(name):
    """Logits, and the text of lossless decoding from the text itself."""
    engine = family_engine(name)
    made = SlotPass(engine.weights, engine.core.caches, engine.core.ops, False)
    text = torch.tensor([*ROW, *range(20, 28)], dtype=torch.int32)
    with torch.no_grad():
        made.run(text[6:], torch.arange(6, 14, dtype=torch.int32))
    torch.testing.assert_close(made.logits, engine.logits([text.tolist()])[0, 6:], atol=1e-4, rtol=1e-4)
    plain = engine.generate([ROW], 24, stop_tokens=())
    assert engine.generate([ROW], 24, lossless=Draft(3), stop_tokens=()) == plain


@pytest.mark.parametrize("name", ["drelu", "bloom"])
def test_a_slot_of_a_family_does_not_see_what_others_read(name):
    """By the kernels, with the logits of the reference. One layer, because they run in Triton's interpreter."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "n_head": 4, "head_dim": 16, "n_layer": 1}
    sizes["num_hidden_layers"] = 1
    found, position = {}, torch.arange(6, 14, dtype=torch.int32)
    for ops in ("reference", "triton"):
        engine = family_engine(name, ops, **sizes)
        made = SlotPass(engine.weights, engine.core.caches, engine.core.ops, False, skips=name != "bloom")
        for others in (20, 40):
            tokens = torch.tensor([7, 8, 9, *range(others, others + 5)], dtype=torch.int32)
            with torch.no_grad():
                made.run(*(each.to(made.logits.device) for each in (tokens, position)))
            found[ops, others] = made.logits.cpu().clone()
    assert torch.equal(found["triton", 20][:3], found["triton", 40][:3])
    assert not torch.equal(found["triton", 20][3:], found["triton", 40][3:])
    torch.testing.assert_close(found["triton", 20], found["reference", 20], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["persimmon", "nanochat"])
def test_norms_of_heads_are_refused_by_name(name):
    with pytest.raises(UserError, match="norms of queries and keys"):
        family_engine(name).pair(Draft(3))


def test_a_screen_that_chooses_other_tokens_is_not_used():
    engine = engine_of("triton", screen=True)
    engine.core.screen.scales[16:] = 0.0  # no token but the first sixteen is read
    engine.core.screen.scales[:, 1] = 0.0
    assert engine.pair(Draft()).dense.screen is None


def test_an_engine_says_what_its_verification_is_equal_by():
    engine = engine_of("reference")
    assert "verification" not in engine.describe()
    engine.generate([ROW], 3, lossless=Draft(0), stop_tokens=())
    said = "verification: 8 slots, the whole LM head, rows of silent neurons are not read, equal by launch settings"
    assert said in engine.describe()
