"""``generate()`` of the public class through the CPU engine gives what ``gather`` gives, or says why it cannot."""

import gc
import logging
import os
import select
import signal
import time
import weakref

import pytest
import torch
from bundles import make_bundle
from transformers import pipeline

from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.facts import facts_of
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step
from dejavu_train.engine.planned import Engine
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.ground.machine import free_memory
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

PROMPTS = torch.tensor([[1, 1, 2, 9, 30], [2, 40, 50, 60, 70], [1, 2, 8, 8, 8]])  # left-padded with 1


@pytest.fixture(scope="module")
def models(tiny_opt):
    """The same model and bundle behind gather and behind the CPU engine."""
    bundle = make_bundle(tiny_opt, means=True).at(0.3, 0.75)
    return {
        name: SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, name, sparse_from="prompt")
        for name in ("gather", "cpu", "auto")
    }


def written(model, **settings):
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 1, "eos_token_id": [2, 77]} | settings
    return model.generate(PROMPTS, attention_mask=(PROMPTS != 1).long(), **settings)


def test_what_the_engine_cannot_do_runs_through_gather_or_is_refused(models, caplog):
    caplog.set_level(logging.WARNING, logger="dejavu_train")
    expected = written(models["gather"], num_beams=2)
    assert torch.equal(written(models["auto"], num_beams=2), expected)
    assert "num_beams" in caplog.text and "gather runs instead" in caplog.text
    for changes, remedy in (
        ({"num_beams": 2}, "pass num_beams=1"),
        ({"no_repeat_ngram_size": 2}, "leave no_repeat_ngram_size out|pass no_repeat_ngram_size=0"),
        ({"num_return_sequences": 3, "do_sample": True}, "at most 8 rows at once, got 9; pass 8 at a time"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "leave prefix_allowed_tokens_fn out"),
        ({"eos_token_id": list(range(3, 20))}, "at most 8 stop tokens, got 17; pass so many of them in eos_token_id"),
    ):
        with pytest.raises(UserError, match=f"({remedy}).* to stay on it; use backend='gather'"):
            written(models["cpu"], **changes)
    ids = PROMPTS[1:2]
    with torch.no_grad():
        torch.testing.assert_close(models["auto"](ids).logits, models["gather"](ids).logits)


def test_an_engine_runs_what_a_check_plans(tiny_opt):
    """From the bundle alone, and from what the engine loaded."""
    for options in ({"lookahead": True, "dtype": "int8"}, {"cascade": True, "means": True}):
        bundle = make_bundle(tiny_opt, **options).at(0.3, 0.75)
        engine = CpuEngine(load_model(str(tiny_opt)), bundle, batch=4, context=64)
        facts = facts_of(bundle, frozenset(bundle.specs), "float32", 4)
        given = EngineOptions(batch=4, context=64)
        planned = plan_step(engine.shape, facts, engine.weights.formats, given, Engine.CPU)
        assert planned == engine.plan and planned.describe() in engine.describe()
        tested = [planned.half(layer, "mlp").second_stage for layer in range(engine.shape.n_layers)]
        assert tested == (engine.selectors.fine >= 0).tolist() and any(tested) == ("cascade" in options)
        assert ("    candidates 0.3" in planned.describe()) == any(tested)


def is_gone(ref):
    """Whether an object dies, at the latest when the threads that worked on it have ended."""
    end = time.monotonic() + 10
    while ref() is not None and time.monotonic() < end:
        time.sleep(0.01)
    return ref() is None


def test_engines_and_bundles_share_one_copy_that_goes_with_the_last_of_them(tiny_opt):
    """Without the collector: no cycle keeps a copy that nobody can reach."""
    bundle = make_bundle(tiny_opt, cascade=True).at(0.3, 0.75)
    dense = load_model(str(tiny_opt))
    model = SparseOPTForCausalLM.from_model(dense, bundle, "cpu", sparse_from="prompt")
    gc.collect()
    gc.disable()
    try:
        pools = []
        for changed in (bundle, bundle.at(0.5, 0.5)):
            model.set_bundle(changed)
            pools.append(model._runtime.engines)
            engines = [pools[-1].engine(rows, 64) for rows in (1, 2)]
            assert engines[0].selectors is engines[1].selectors and engines[0].weights is engines[1].weights
        assert pools[0] is not pools[1] and pools[0].weights is pools[1].weights
        one_bundle, copy = (weakref.ref(each) for each in (pools[0], pools[0].weights.model))
        del pools[0], engines
        assert is_gone(one_bundle) and copy() is not None
        with torch.no_grad():
            dense.model.decoder.layers[0].fc1.bias.add_(1.0)
        model.set_bundle(bundle)
        pools.clear()
        assert is_gone(copy), "a copy of the weights as they were"
        new = weakref.ref(model._runtime.engines.engine(1, 64).weights.model)
        del model
        assert is_gone(new)
    finally:
        gc.enable()


def test_a_forked_process_generates_while_a_call_holds_the_turn(models):
    """What a forked process copies of a turn and of threads belongs to no one there."""
    model = models["cpu"]
    expected = written(model)
    reader, writer = os.pipe()
    with model._runtime.engines.turns:
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # threads of torch's own are not copied, and waiting for them never ends
                os.write(writer, b"same" if torch.equal(written(model), expected) else b"other")
            finally:
                os._exit(0)
    os.close(writer)
    heard, _, _ = select.select([reader], [], [], 60)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert heard and os.read(reader, 10) == b"same"


@pytest.mark.parametrize("least", [{"min_new_tokens": 7}, {"min_length": 12}, {"min_length": 12, "min_new_tokens": 3}])
def test_no_row_stops_before_its_least_length(models, least):
    """Each row's greedy text would stop at once: its first tokens are the stop tokens."""
    first = written(models["gather"], max_new_tokens=2, eos_token_id=None)[:, 5:]
    stops = first.unique().tolist()
    expected = written(models["gather"], eos_token_id=stops, **least)
    assert expected.shape[1] > written(models["gather"], eos_token_id=stops).shape[1]
    assert torch.equal(written(models["cpu"], eos_token_id=stops, **least), expected)
    many = list(range(3, 11))  # a likely start of sampled rows: none of them comes too early
    new = least.get("min_new_tokens", 7)
    for seed in range(10):
        torch.manual_seed(seed)
        made = written(models["cpu"], eos_token_id=many, do_sample=True, temperature=3.0, **least)[:, 5 : 5 + new]
        assert not torch.isin(made, torch.tensor(many)).any()


@pytest.mark.parametrize("least", [{"min_new_tokens": 9}, {"min_length": 14}])
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_least_length_above_the_most_is_warned_of_and_the_most_holds(models, least, backend):
    with pytest.warns(UserWarning, match="Unfeasible length constraints"):
        made = written(models[backend], max_new_tokens=8, **least)
    assert torch.equal(made, written(models["gather"], max_new_tokens=8, eos_token_id=None))


def test_pipelines_defaults_stay_on_the_engine(models, tiny_opt, caplog):
    """Sampling, top_k of 50, and a least length: what generation configs set by themselves."""
    caplog.set_level(logging.WARNING, logger="dejavu_train")
    generator = pipeline("text-generation", models["auto"], tokenizer=load_tokenizer(str(tiny_opt)), device="cpu")
    made = generator("the model reads", do_sample=True, max_new_tokens=6, min_new_tokens=6)[0]["generated_text"]
    assert len(made) > len("the model reads") and "gather" not in caplog.text
    settings = {"do_sample": True, "max_new_tokens": 12, "temperature": 2.0}
    greedy = written(models["gather"], max_new_tokens=12)
    for name in ("auto", "cpu"):
        assert torch.equal(written(models[name], top_k=1, **settings), greedy)
    assert "gather" not in caplog.text


def test_a_copy_of_the_weights_that_does_not_fit_is_not_begun(tiny_opt, caplog, monkeypatch):
    monkeypatch.setattr("dejavu_train.engine.cpu.weights.free_memory", lambda: 1000)
    monkeypatch.setattr("dejavu_train.engine.cpu.CpuWeights.from_model", None)
    bundle, ids = make_bundle(tiny_opt).at(0.3, 0.6), torch.tensor([[2, 5, 6]])
    named = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, "cpu")
    with pytest.raises(Unsupported, match="a second time, .* GB, and 1e-06 GB of memory are free; use .*gather"):
        named.generate(ids, max_new_tokens=2)
    chosen = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle)
    assert chosen.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert "are free: the backend gather runs instead" in caplog.text
    assert free_memory() is None or free_memory() > 1e6


def test_lossless_text_is_that_of_the_dense_model(models, tiny_opt, caplog):
    ids, seed = PROMPTS[1:2], torch.manual_seed
    ids = ids[ids != 1][None]
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "pad_token_id": 1}
    dense = load_model(str(tiny_opt)).generate(ids, do_sample=False, **settings)
    for name in ("auto", "cpu"):
        model = models[name]
        assert torch.equal(model.generate(ids, do_sample=False, lossless=True, **settings), dense)
        assert model.lossless_report()["tokens"] == 19
    sampled = []
    for length in (0, 3, None):
        seed(5)
        sampled.append(model.generate(ids, do_sample=True, lossless=True, draft_length=length, **settings))
    assert torch.equal(sampled[0], sampled[1]) and torch.equal(sampled[0], sampled[2])
    for asked, remedy in (
        ({"num_beams": 2}, "lossless decoding: .*pass num_beams=1 to stay on it$"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence at a time, got 2"),
        ({"draft_length": 9}, "0 to 7"),
        ({"lossless": False, "draft_length": 3}, "pass lossless=True"),
        ({"logits_processor": [lambda ids, logits: logits]}, "leave logits_processor out"),
    ):
        for name in ("auto", "cpu"):
            with pytest.raises(UserError, match=remedy):
                models[name].generate(ids, **{"lossless": True} | settings | asked)
    for backend in ("gather", "mask"):
        with pytest.raises(UserError, match=f"needs an engine, and the backend is {backend}"):
            sparse = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), models["cpu"].bundle, backend)
            sparse.generate(ids, lossless=True, **settings)
    assert "gather runs instead" not in caplog.text
