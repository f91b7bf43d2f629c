"""The parts of benchmarks/generate.py that need no GPU: its bundle drives the class, thresholds hit the densities."""

import pytest
import torch

from benchmarks import generate
from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import measured, set_thresholds, start
from benchmarks.generate import cache_bytes, greedy, predictor_bytes, random_bundle, set_active_share
from dejavu_train.families import ModelDims
from dejavu_train.models.opt import load_opt
from dejavu_train.sparse.model import SparseOPTForCausalLM

SHAPE = ModelDims(64, 256, 2, 4, 300, 64)


def test_generate_and_its_engine_choose_the_same_tokens_at_the_asked_densities():
    torch.manual_seed(0)
    dense = random_model("opt", SHAPE, "cpu", torch.float32)
    set_active_share(dense, 0.6)
    bundle = random_bundle(SHAPE, 8, 0.25, 0.5, "cpu")
    model = SparseOPTForCausalLM.from_model(dense, bundle, "triton", "prompt", ops="reference")
    ids = torch.randint(3, 300, (1, 9))
    with torch.no_grad():
        model.generate(ids, **greedy(6))
        engine = model._runtime.engines.engine(1, 15)
        start(engine, 9, 20)
        set_thresholds(engine, 0.25, 0.5)
        row = measured(engine, 6)
        out = model.generate(ids, **greedy(6))
    assert row["mlp_union"] == pytest.approx(0.25, abs=0.06) and 0.2 < row["head_union"] < 0.8
    assert row["active"] == pytest.approx(0.6, abs=0.15)
    assert out[0, 9:].tolist() == engine.generate(ids.tolist(), 6, stop_tokens=())[0]
    assert engine is model._runtime.engines.engine(1, 15), "one engine for both"
    assert cache_bytes(engine) == 2 * 3 * 64 * 64 * 4
    assert predictor_bytes(engine) > 2 * 4 * (8 * (64 + 256) + 4 * 64)


def test_a_pipeline_is_timed_a_token(tiny_opt, monkeypatch):
    model = load_opt(str(tiny_opt))
    monkeypatch.setattr(generate, "TOKENIZER", str(tiny_opt))
    calls = []
    own = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **given: calls.append(given) or own(*args, **given))
    assert 0 < generate.pipeline_ms(model, 2) < 1000 and len(calls) == 3
