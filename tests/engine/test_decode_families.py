"""Every family on the decode engine, by reference operations: as `mask`, dense as transformers."""

from dataclasses import replace

import pytest
import torch
from bundles import make_bundle
from family_models import CASES, YARN, padded, random_family, save_family, sparse

from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import blocks_of, dims_of
from dejavu_train.families.fused import FusedPart
from dejavu_train.models.load import load_model


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return save_family(request.param, tmp_path_factory.mktemp("families") / request.param)


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder, means=True).at(0.4, 0.6)


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def test_norms_behind_a_rotation_undo_the_factor_of_yarn(tmp_path):
    inputs = padded()
    save_family("nanochat", tmp_path, rope_parameters=YARN, rms_norm_eps=0.1)
    expected = logits(load_model(str(tmp_path)), inputs)
    found = logits(sparse(tmp_path, make_bundle(tmp_path).at(1.0, 1.0), "triton", 3), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("lookahead", [False, True])
def test_scores_are_those_of_mask_over_skipped_and_back_filled_groups(folder, bundle, lookahead):
    made, inputs = make_bundle(folder, lookahead=True).at(0.4, 0.6) if lookahead else bundle, padded(24)
    found, expected = (logits(sparse(folder, made, kind, 3), inputs) for kind in ("triton", "mask"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_shares_its_weights_with_the_engine_stays_what_it_is(folder, bundle):
    """Its queries and keys lie in another order there, its matrices of neurons turned."""
    inputs, model = padded(), load_model(str(folder))
    expected, before = logits(model, inputs), {name: t.clone() for name, t in model.state_dict().items()}
    weights = weights_of_model(model, torch.float32, "cpu", share=True, transposed={0, 1})
    assert torch.equal(logits(model, inputs), expected)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model.load_state_dict({name: 2 * tensor for name, tensor in before.items()})
    assert torch.equal(model.state_dict()["lm_head.weight"], 2 * before["lm_head.weight"])
    others = weights_of_model(model, torch.float32, "cpu")
    block = blocks_of(model)[1]
    if block.rotate is None or not isinstance(block.q, FusedPart):  # of which queries and keys are copied in order
        torch.testing.assert_close(weights.layers[1].qkv.weight.numbers, others.layers[1].qkv.weight.numbers)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["arcee", "nemotron", "jais2"])
def test_squares_of_fp16_do_not_overflow(name, rows, tmp_path):
    """Pre-activations above 256, whose squares are more than fp16 holds: in the prompt and in steps."""
    whole = random_family(name)
    for layer in whole.model.layers:
        layer.mlp.up_proj.weight.data *= 100
        layer.mlp.down_proj.weight.data /= 10_000
    largest = []
    blocks_of(whole)[0].up.register_forward_hook(lambda _, __, output: largest.append(float(output.max())))
    ids = torch.randint(3, 300, (rows, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole(ids).logits
    blocks_of(whole)[0].up._forward_hooks.clear()
    options = EngineOptions(batch=rows, context=20, ops="reference", dtype=torch.float16)
    engine = DecodeEngine(whole, None, options)
    found = engine.logits(ids.tolist())
    assert max(largest) > 256 and found.isfinite().all()
    assert (found - expected).norm() < 0.02 * expected.norm()
    engine.begin([Row.of_prompt(row, 13) for row in ids.tolist()])  # all at once
    assert (engine.core.logits - expected[:, -1]).norm() < 0.02 * expected[:, -1].norm()


def test_random_weights_have_norms_behind_halves():
    """What their norms leave of a step is a row of no mean."""
    dims = replace(dims_of(random_family("350m").config), embedding_dim=0)
    engine = DecodeEngine(weights_of_shape(dims, torch.float32, "cpu"), None, EngineOptions(context=8, ops="reference"))
    assert engine.logits([[2, 7, 9]]).isfinite().all()
    means = engine.core.x[1:].mean(-1).abs().flatten()
    assert (means[:-1] < 1e-6).all() and means[-1] > 1e-4, "the last norm is the final one"
