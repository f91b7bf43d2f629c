"""Tuning in the model: the gate's gradients, less divergence at the same bytes, and by layers the same numbers."""

import dataclasses
import os
import signal

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from family_models import CASES, save_family

from dejavu_train.bundle.cost_model import mlp_share
from dejavu_train.ground import signals
from dejavu_train.ground.errors import UserError
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.training import finetune as module
from dejavu_train.training import passes
from dejavu_train.training.config import TuneConfig
from dejavu_train.training.finetune import UNKNOWN_PRICE, _Ledger, finetune, next_price
from dejavu_train.training.gates import Gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_opt(tmp_path_factory.mktemp("tune"), init_std=0.3)


def windows(count=6, length=24):
    generator = torch.Generator().manual_seed(3)
    made = [[2, *torch.randint(4, 300, (length - 1,), generator=generator).tolist()] for _ in range(count)]
    return [*made, made[0][:9]]  # a short tail, which is not used


def test_the_gate_selects_and_its_gradient_is_that_of_a_sigmoid():
    values, cost = torch.randn(2, 3, 4).abs(), torch.rand(2, 3, 4)
    logits = torch.randn(2, 3, 4, requires_grad=True)
    zero = torch.zeros(())
    out, spent = Gate.apply(values, logits, cost, zero, zero, 0.5)
    torch.testing.assert_close(out, values * (logits > 0))
    torch.testing.assert_close(spent, ((logits > 0) * cost).sum(-1).mean())
    weight = torch.randn(2, 3, 4)
    ((out * weight).sum() + 2 * spent).backward()
    soft = logits.detach().clone().requires_grad_(True)
    share = torch.sigmoid(soft / 0.5)
    ((share * values * weight).sum() + 2 * (share * cost).sum(-1).mean()).backward()
    torch.testing.assert_close(logits.grad, soft.grad)


def test_a_gate_over_heads_puts_the_mean_in_their_place():
    values, rest = torch.randn(5, 3, 4), torch.randn(3, 4, requires_grad=True)
    logits = torch.randn(5, 3, requires_grad=True)
    out, _ = Gate.apply(values, logits, torch.ones(5, 3), rest, torch.zeros(()), 1.0)
    torch.testing.assert_close(out, torch.where((logits > 0)[..., None], values, rest))
    out.sum().backward()
    torch.testing.assert_close(rest.grad, (logits <= 0).sum(0)[:, None].expand(3, 4).float())


def test_the_price_follows_the_bytes():
    assert next_price(1.0, 0.2, 0.1) > 1.0 > next_price(1.0, 0.05, 0.1)
    assert next_price(1.0, 0.1, 0.1) == 1.0 and next_price(1.0, 5.0, 0.1) == pytest.approx(1.2214, abs=1e-3)


@pytest.mark.parametrize("options", [{"dtype": "int4", "cascade": True}, {"means": True}], ids=str)
def test_tuning_loses_less_at_the_same_bytes(folder, options):
    bundle = make_bundle(folder, rank=16, **options).at(mlp_density=0.5, head_density=0.75)
    model = load_model(str(folder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = TuneConfig(steps=60, tokens=96, batch_tokens=96, learning_rate=3e-2, price=0.05)
    made, metrics = finetune(model, bundle, windows(), config, FLOAT16)
    assert metrics[-1]["nats"] < 0.9 * metrics[0]["nats"]
    assert metrics[-1]["share"] < 1.15 * max(mlp_share(bundle, FLOAT16), metrics[0]["share"])
    assert sorted(made) == [0, 1]
    assert not torch.equal(made[1].up, bundle.predictor(1, "mlp").up) and made[1].rounded_to is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_cannot_be_tuned(folder):
    model, bundle = load_model(str(folder)), make_bundle(folder)
    for wrong, message in (
        (bundle.at(1.0, 0.5), "every MLP of the bundle is dense"),
        (bundle.at(0.3, 0.5, top_k=True), "needs thresholds"),
    ):
        with pytest.raises(UserError, match=message):
            finetune(model, wrong, windows(), TuneConfig(steps=1), FLOAT16)
    with pytest.raises(UserError, match="no windows"):
        finetune(model, bundle.at(0.3), [], TuneConfig(steps=1), FLOAT16)
    with pytest.raises(UserError, match="tune.width must lie above 0"):
        TuneConfig(width=0).check()


def test_the_first_price_is_the_measured_slope(folder):
    bundle = make_bundle(folder).at(0.3)
    assert _Ledger(bundle, {(0, "mlp"): bundle.specs[0, "mlp"]}, FLOAT16).first_price() == UNKNOWN_PRICE
    for spec in bundle.specs.values():
        spec.curve["loss_increase"] = [1.0 - density for density in spec.curve["density"]]
    ledger = _Ledger(bundle, {(i, "mlp"): bundle.specs[i, "mlp"] for i in range(2)}, FLOAT16)
    # a nat for all units of one layer; fc1 costs half of its bytes, fc2 less than the other half
    assert 2.0 < ledger.first_price() < 4.0


def test_dense_layers_stay_dense(folder):
    bundle = make_bundle(folder).with_densities({(0, "mlp"): 1.0, (1, "mlp"): 0.4})
    made, _ = finetune(load_model(str(folder)), bundle, windows(), TuneConfig(steps=1, tokens=48), FLOAT16)
    assert list(made) == [1]


def walk(folder):
    return LayerWalk(str(folder), torch.device("cpu"), "float32")


def read_ahead(bundle):
    """Neurons' predictors read what the MLP of the layer below reads."""
    specs = {
        key: dataclasses.replace(spec, site="mlp_in", site_layer=key[0] - 1) if key[1] == "mlp" and key[0] else spec
        for key, spec in bundle.specs.items()
    }
    return dataclasses.replace(bundle, specs=specs)


BY_LAYERS = {  # family, options of the bundle, what becomes of it
    "second stages": ("galactica", {"dtype": "int4", "cascade": True}, lambda bundle: bundle),
    "half a layer ahead": ("bloom", {"lookahead": True, "means": True}, lambda bundle: bundle),
    **{f"a layer ahead, {family}": (family, {"means": True}, read_ahead) for family in CASES},
    "norms behind, a dense layer": ("350m", {}, lambda bundle: bundle.with_densities({(1, "mlp"): 1.0})),
}


def assert_equal(made, expected):
    assert sorted(made) == sorted(expected)
    for layer, predictor in expected.items():
        for name, tensor in predictor.state_dict().items():
            assert torch.equal(tensor, made[layer].state_dict()[name]), (layer, name)


@pytest.mark.parametrize("case", BY_LAYERS)
def test_by_layers_predictors_are_those_of_a_model_in_memory(tmp_path, case):
    family, options, change = BY_LAYERS[case]
    folder = save_family(family, tmp_path, num_hidden_layers=3, n_layer=3)
    bundle = change(make_bundle(folder, **options).at(mlp_density=0.5, head_density=0.75))
    config = TuneConfig(steps=3, tokens=96, batch_tokens=48, learning_rate=3e-2, price=0.05)
    expected, metrics = finetune(load_model(str(folder)), bundle, windows(), config, FLOAT16)
    model, read = walk(folder), []
    take = model.reader.take
    model.reader.take = lambda number, then: read.append(number) or take(number, then)
    made, same = finetune(model, bundle, windows(), config, FLOAT16)
    assert_equal(made, expected)
    assert same == metrics
    assert read == 3 * [0, 1, 2, 1, 0]  # twice a step, whatever its passes
    assert not any(parameter.requires_grad for parameter in made[0].parameters())


@pytest.mark.parametrize("load", [load_model, walk], ids=["whole", "by layers"])
@pytest.mark.parametrize("how", ["killed", "SIGTERM"])
def test_interrupted_tuning_goes_on_to_the_same_predictors(folder, tmp_path, monkeypatch, how, load, caplog):
    bundle, model = make_bundle(folder, rank=8, dtype="int4").at(mlp_density=0.5), load(str(folder))
    config = TuneConfig(steps=7, tokens=96, batch_tokens=48, learning_rate=3e-2)
    expected, metrics = finetune(model, bundle, windows(), config, FLOAT16)
    path, count = tmp_path / "tuning.ckpt", 0
    original = passes.divergence

    def divergence(*given):
        nonlocal count
        count += 1
        if count == 9:  # in the first half of the fifth step
            if how == "killed":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    monkeypatch.setattr(passes, "divergence", divergence)
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0 if how == "killed" else 60.0)
    with signals.heard(), pytest.raises(MemoryError if how == "killed" else signals.Interrupted):
        finetune(model, bundle, windows(), config, FLOAT16, state_path=path)
    caplog.set_level("INFO", logger="dejavu_train")
    made, resumed = finetune(model, bundle, windows(), config, FLOAT16, state_path=path)
    finished = how == "SIGTERM" and load is load_model  # by layers a step takes minutes, and is given up
    assert f"going on from step {5 if finished else 4} of 7" in caplog.text
    assert resumed == metrics
    assert_equal(made, expected)


def test_a_state_of_other_settings_is_left_and_a_damaged_one_refused(folder, tmp_path, monkeypatch, caplog):
    bundle, model, path = make_bundle(folder).at(0.5), load_model(str(folder)), tmp_path / "tuning.ckpt"
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0)
    caplog.set_level("INFO", logger="dejavu_train")
    finetune(model, bundle, windows(), TuneConfig(steps=2, tokens=24), FLOAT16, state_path=path)
    finetune(model, bundle.at(0.4), windows(), TuneConfig(steps=1, tokens=24), FLOAT16, state_path=path)
    assert "is of other settings" in caplog.text and "going on" not in caplog.text
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged .* delete it"):
        finetune(model, bundle, windows(), TuneConfig(steps=1, tokens=24), FLOAT16, state_path=path)
