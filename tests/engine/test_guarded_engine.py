"""A guarded engine, in plain torch on the CPU, and gather: the same dense tokens, measurements and thresholds."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from sparse_helpers import tokens
from torch.nn import functional as F

from dejavu_train import Guard, SparseOPTForCausalLM
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.engine import plan
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Kernels, Run
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import neuron_contribution
from dejavu_train.models.load import load_model
from dejavu_train.sparse.masked import masking

EVERY = 4
BUNDLES = [{}, {"cascade": True}, {"lookahead": True, "means": True}, {"cascade": True, "lookahead": True}]


@pytest.fixture(scope="module")
def folder(tiny_opt):
    return str(tiny_opt)


def bundle_of(folder, **options):
    """Promises that the random predictors do not keep, so that thresholds move."""
    bundle = make_bundle(folder, **options).at(mlp_density=0.3, head_density=0.5)
    return dataclasses.replace(
        bundle, specs={key: dataclasses.replace(spec, retained_mass=0.6) for key, spec in bundle.specs.items()}
    )


def sparse(folder, bundle, backend, **options):
    return SparseOPTForCausalLM.from_model(load_model(folder), bundle, backend, ops="reference", **options)


def thresholds(model):
    return model._runtime.guarded.thresholds[:, 0].clone()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", BUNDLES, ids=str)
def test_gather_equals_the_engine(folder, options, rows):
    bundle, ids = bundle_of(folder, **options), tokens(rows, 25)
    guard = Guard(every=EVERY, memory=16)
    got = {}
    for backend, read in (("gather", bundle.one_stage()), ("triton", bundle)):
        model = sparse(folder, read, backend, guard=guard)
        with torch.no_grad():
            got[backend] = model(ids).logits, model.guard_report(), thresholds(model)
    (logits, report, moved), (expected, wanted, like) = got["triton"], got["gather"]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    torch.testing.assert_close(moved, like, atol=1e-4, rtol=1e-4)
    for layer, now in zip(report["layers"], moved, strict=True):  # thresholds of MLPs move, those of heads stay
        assert (abs(float(now) - layer["first_threshold"]) > 1e-3) == (layer["target"] == "mlp")
    assert report["tokens"] == wanted["tokens"] == rows * (25 // EVERY)
    for mine, theirs in zip(report["layers"], wanted["layers"], strict=True):
        assert mine.pop("target") == theirs.pop("target") and mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("options", BUNDLES[:2], ids=str)
def test_the_n_th_token_is_dense_and_the_others_are_the_bundles(folder, options):
    """With the controller off: the masked model with those positions dense, and its own retained mass."""
    bundle, ids = bundle_of(folder, **options), tokens(2, 21)
    model = sparse(folder, bundle, "triton", guard=Guard(every=EVERY, control=False))
    dense = load_model(folder)
    positions = (torch.arange(21) + 1) % EVERY != 0
    kept, mass = {}, {}

    def observe(layer, target, keep, values):
        if target == "mlp":
            contribution = neuron_contribution(values, dense.model.decoder.layers[layer].fc2.weight)[:, ~positions]
            kept[layer] = (contribution * selected[layer][:, ~positions]).sum()
            mass[layer] = contribution.sum()

    class Watched(PredictorSelector):
        def __call__(self, layer, target, sites):
            keep = super().__call__(layer, target, sites)
            if target == "mlp":
                selected[layer] = keep
            return keep

    selected = {}
    with torch.no_grad():
        got = model(ids).logits
        watched = Watched(bundle.one_stage(), "cpu", dense)
        with masking(dense, watched, positions.expand(2, -1), observe, bundle.head_means()):
            expected = dense(ids).logits
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    report = model.guard_report()
    for layer in report["layers"]:
        assert layer["threshold"] == layer["first_threshold"]
        if layer["target"] == "mlp":
            share = float(kept[layer["layer"]] / mass[layer["layer"]])
            assert layer["retained_mass"] == pytest.approx(share, rel=1e-3) and 0.05 < share < 0.95
    assert report["mlp"]["retained_mass"] == pytest.approx(float(sum(kept.values()) / sum(mass.values())), rel=1e-3)


def test_without_a_guard_and_before_its_first_token_nothing_changes(folder):
    bundle, ids = bundle_of(folder), tokens(2, 12)
    for backend in ("gather", "triton"):
        plain, guarded = (sparse(folder, bundle, backend, guard=g) for g in (None, Guard(every=13)))
        with torch.no_grad():
            assert torch.equal(plain(ids).logits, guarded(ids).logits)
        assert plain.guard_report() is None and guarded.guard_report()["tokens"] == 0


@pytest.mark.parametrize("backend", ["gather", "triton"])
def test_thresholds_are_state_of_the_model(folder, backend):
    """They go on over calls and engines of other sizes, until they are reset. A generation repeats then."""
    bundle, ids = bundle_of(folder), tokens(1, 6)
    model = sparse(folder, bundle, backend, sparse_from="prompt", guard=Guard(every=EVERY, memory=8))
    first = thresholds(model)
    settings = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    made = model.generate(ids, **settings)
    moved, report = thresholds(model), model.guard_report()
    assert report["tokens"] == 4 and not torch.equal(moved, first)
    model.generate(tokens(2, 6), **settings)
    assert model.guard_report()["tokens"] > 4 and not torch.equal(thresholds(model), moved)
    model.reset_guard()
    assert torch.equal(thresholds(model), first) and model.guard_report()["tokens"] == 0
    assert torch.equal(model.generate(ids, **settings), made) and model.guard_report() == report
    assert model.bundle is bundle


def test_rows_that_have_ended_or_are_dense_are_not_measured(folder):
    bundle = bundle_of(folder)
    engine = DecodeEngine(load_model(folder), bundle, EngineOptions(batch=4, ops="reference", guard=Guard(every=EVERY)))
    rows = [row.tolist() for row in tokens(2, 13)]
    engine.score([rows[0], rows[1][:7]], sparse_from=[6, 0])
    # steps 4, 8 and 12 are dense: position 3 (row 0 is dense anyway), 7 and 11 (row 1 has ended)
    assert engine.guard.report()["tokens"] == 1 + 1 + 1


def test_backends_without_a_guard_say_so(folder):
    bundle = bundle_of(folder)
    for backend, message in (("mask", "mask .* has no guard; use gather"), ("cpu", "CPU engine has no guard.*gather")):
        with pytest.raises(UserError, match=message):
            SparseOPTForCausalLM.from_model(load_model(folder), bundle, backend, guard=Guard())
    with pytest.raises(UserError, match="guard must be a Guard or None, got True"):
        SparseOPTForCausalLM.from_pretrained(folder, bundle, guard=True)
    model = SparseOPTForCausalLM.from_pretrained(folder, bundle, guard=Guard())
    assert model.backend == "gather", "auto takes what can be guarded"


def test_a_capture_that_is_undone_leaves_the_guard_alone(folder):
    engine = DecodeEngine(
        load_model(folder), bundle_of(folder), EngineOptions(ops="reference", guard=Guard(every=2, memory=2))
    )
    engine.score([tokens(1, 9)[0].tolist()])
    before = [tensor.clone() for tensor in engine.guard.tensors()]
    engine.begin([Row([2, 5], 9)])
    with engine.core.undone():
        engine.core.eager("greedy", False, measured=True)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.guard.tensors(), strict=True))


def test_scores_through_the_engine_are_causal(folder):
    """A token's score depends on nothing behind it, thresholds included."""
    bundle, ids = bundle_of(folder), tokens(1, 24)
    engine = DecodeEngine(
        load_model(folder), bundle, EngineOptions(ops="reference", guard=Guard(every=EVERY, memory=8))
    )
    whole = engine.score([ids[0].tolist()])[0]
    engine.guard.reset()
    part = engine.score([ids[0, :15].tolist()])[0]
    assert torch.equal(whole[:14], part)
    assert (
        F.mse_loss(
            whole, DecodeEngine(load_model(folder), bundle, EngineOptions(ops="reference")).score([ids[0].tolist()])[0]
        )
        > 0
    )


def test_layers_of_all_heads_with_a_fused_predictor(folder, monkeypatch):
    """Fused as with 4-bit weights. Their attention is dense, so that nothing of it is measured."""
    monkeypatch.setattr(plan._Chooser, "_not_fused", plan._Chooser._not_beside_attention)
    bundle = bundle_of(folder, lookahead=True)
    dense = {"threshold": None, "keep_dense": True}
    specs = {
        key: dataclasses.replace(spec, **dense) if key[1] == "heads" else spec for key, spec in bundle.specs.items()
    }
    bundle, ids = dataclasses.replace(bundle, specs=specs), tokens(1, 25)
    got = {}
    for backend in ("gather", "triton"):
        model = sparse(folder, bundle, backend, guard=Guard(every=EVERY, memory=16))
        with torch.no_grad():
            got[backend] = model(ids).logits, thresholds(model)
    for mine, theirs in zip(got["triton"], got["gather"], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    fused = DecodeEngine(load_model(folder), bundle, EngineOptions(ops="reference")).plan.halves[0]
    assert fused.kernels is Kernels.QKV_WITH_PREDICTOR and fused.run is Run.ALL
