"""Calibration on the tiny model: thresholds give the densities they promise, and wrong wishes are one line."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes, spec_bytes
from dejavu_train.calibration import calibrate as cal
from dejavu_train.calibration.by_layers import ByLayers
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import ActivationManifest, RecordedWeights, ShardEntry, ShardWriter, pack_bits
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import head_contribution, record
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.weight_format import FLOAT16, FLOAT32
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init

ROWS = 640


@pytest.fixture(scope="module")
def run(tiny_opt, tmp_path_factory):
    """Shards of random tokens and SVD predictors for both targets of the tiny model."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)  # the head predictors are random, and what came before should not matter
    model = load_model(str(tiny_opt))
    shape = dims_of(model.config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, shape.vocab_size, (10, 64), generator=generator)
    with record(model, ("attn_in", "mlp_in", "activation", "head_out")) as got, torch.no_grad():
        model(ids)
    shard = ShardEntry(0, "calibration", ROWS)
    manifest = ActivationManifest("tiny", weight_hash(str(tiny_opt)), shape, "float16", {}, {}, (shard,))
    manifest.save(folder / "activations")
    with ShardWriter(folder / "activations", manifest, shard) as writer:
        for layer in range(shape.n_layers):
            block = model.model.decoder.layers[layer]
            tensors = got[layer]
            active = tensors["activation"].flatten(0, 1) > 0
            heads = head_contribution(tensors["head_out"], block.self_attn.out_proj.weight).flatten(0, 1)
            rows = {
                "attn_in": tensors["attn_in"].flatten(0, 1).half().numpy(),
                "mlp_in": tensors["mlp_in"].flatten(0, 1).half().numpy(),
                "mlp_active": pack_bits(active).numpy(),
                "head_norm": heads.detach().half().numpy(),
                "document": np.arange(ROWS, dtype=np.int32) // 64,
                "position": np.arange(ROWS, dtype=np.int32) % 64,
            }
            writer.write(layer, 0, rows, int(active.sum()))
            save_layer_weights(folder / "activations", manifest, block, layer, tensors["head_out"])
    for layer in range(shape.n_layers):
        for target in ("mlp", "heads"):
            write_predictor(folder / "predictors", model, layer, target)
    return str(tiny_opt), folder


def save_layer_weights(activations, manifest, block, layer, head_out):
    """Means of the heads for layer 0. Layer 1 drops what it skips."""
    mean = head_out.flatten(0, 1).mean(0).detach() * (layer == 0)
    norms = torch.linalg.vector_norm(block.fc2.weight.detach(), dim=0)
    weights = RecordedWeights(block.fc1.weight.detach(), block.fc1.bias.detach(), norms, mean)
    weights.save(activations, layer, manifest.weight_hash)


def write_predictor(folder, model, layer, target, rank=24):
    block = model.model.decoder.layers[layer]
    predictor = LowRankPredictor(48, rank, 96 if target == "mlp" else 4)
    if target == "mlp":
        svd_init(predictor, block.fc1.weight, block.fc1.bias)
    path = folder / f"layer_{layer:02d}" / target
    path.mkdir(parents=True)
    save_file({name: p.data for name, p in predictor.named_parameters()}, path / "predictor.safetensors")
    metadata = {
        "layer": layer, "target": target, "kind": "low_rank", "site": "mlp_in" if target == "mlp" else "attn_in",
        "site_layer": layer, "rank": rank, "d_in": 48, "n_out": predictor.up.shape[0], "nonlinearity": "none",
        "bias": True, "loss": "none", "metrics": {},
    }  # fmt: skip
    (path / "predictor.json").write_text(json.dumps(metadata))


def windows():
    return [[2, *torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(i)).tolist()] for i in range(4)]


def calibrated(run, weights=FLOAT16, **changes):
    model, folder = run
    config = cal.CalibrateConfig(**{"sensitivity_tokens": 60, **changes})
    parts = (folder / "predictors", folder / "activations")
    measured = cal.measure_curves(*parts, config, windows(), lambda: load_model(model), device="cpu")
    return cal.choose(measured, config, weights)


def test_a_model_that_is_walked_by_layers_gives_the_same_bundle(run, tmp_path):
    model, folder = run
    walk = ByLayers(LayerWalk(model, torch.device("cpu"), "float32"), tmp_path / "states", "hash")
    config = cal.CalibrateConfig(sensitivity_tokens=60)
    parts = (folder / "predictors", folder / "activations")
    whole, layered = (
        cal.measure_curves(*parts, config, windows(), lambda given=given: given, device="cpu")
        for given in (load_model(model), walk)
    )
    assert layered.specs == whole.specs and layered.metadata == whole.metadata
    assert layered.metadata["head_loss_tokens"] and "loss_increase" in whole.specs[0, "heads"].curve
    assert all(torch.equal(layered.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert not (tmp_path / "states").exists()


def measured_density(run, bundle, layer, target):
    _, folder = run
    spec = bundle.specs[layer, target]
    x = ShardReader(folder / "activations", spec.site_layer, "calibration").read(spec.site, 0, ROWS).float()
    with torch.no_grad():
        return float((bundle.predictor(layer, target)(x) > spec.threshold).float().mean())


def test_a_mean_density_is_met_by_thresholds(run, tmp_path):
    bundle = calibrated(run, mlp_density=0.3, head_density=0.75)
    for target, asked in (("mlp", 0.3), ("heads", 0.75)):
        assert bundle.mean_density(target) == pytest.approx(asked, rel=1e-6)
        for layer in range(2):
            spec = bundle.specs[layer, target]
            if spec.threshold is not None:
                assert measured_density(run, bundle, layer, target) == pytest.approx(spec.density, rel=0.05, abs=0.01)
    bundle.save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle")
    again.check_model(run[0])
    assert again.at(mlp_density=0.5).mean_density("mlp") == pytest.approx(0.5, rel=1e-6)
    assert "loss_increase" in again.specs[0, "mlp"].curve


def test_heads_learn_their_loss_unless_nothing_asks_for_the_model(run):
    trained, learnt, unmeasured = (
        calibrated(run, head_density=0.75, **changes)
        for changes in ({"head_loss_tokens": 0}, {"head_loss_tokens": 100}, {"sensitivity_tokens": 0})
    )
    for part, same in (("down", True), ("up", False), ("bias", False)):
        name = f"layers.1.heads.{part}"
        assert torch.equal(trained.tensors[name], learnt.tensors[name]) == same
        assert torch.equal(trained.tensors[name], unmeasured.tensors[name])
    assert learnt.metadata["head_loss_tokens"] == 100 and trained.metadata["head_loss_tokens"] == 0
    assert learnt.mean_density("heads") == pytest.approx(0.75, rel=1e-6)


def test_without_sensitivities_neurons_follow_true_density(run):
    bundle = calibrated(run, mlp_density=0.2, sensitivity_tokens=0)
    first, second = (bundle.specs[layer, "mlp"] for layer in range(2))
    assert "loss_increase" not in first.curve
    assert first.density / second.density == pytest.approx(first.active_density / second.active_density, rel=1e-6)


def test_retained_mass_top_k_and_dense_layers(run):
    bundle = calibrated(run, retained_mass=0.9, dense_layers=(1,), selection="top_k")
    assert bundle.specs[0, "mlp"].retained_mass == pytest.approx(0.9, abs=0.01)  # of the nearest whole k
    assert bundle.specs[0, "mlp"].density == bundle.specs[0, "mlp"].top_k / 96
    assert bundle.specs[1, "mlp"].dense and bundle.specs[1, "heads"].dense


def bytes_read(bundle, weights=FLOAT16):
    return sum(spec_bytes(spec, bundle.shape, weights) for spec in bundle.specs.values())


def test_a_budget_in_bytes_is_kept_and_a_larger_one_loses_less(run):
    dense = 8 * 48 * 48 * 2 * 2  # the ffn is 2 d wide
    small, large = (calibrated(run, budget=str(int(share * dense))) for share in (0.7, 0.9))
    assert bytes_read(small) <= 0.7 * dense * 1.02
    assert bytes_read(large) <= 0.9 * dense * 1.02
    assert bytes_read(large) > bytes_read(small)


def test_a_budget_counts_the_bytes_of_the_weights_own_format(run):
    dense = 8 * 48 * 48 * 4 * 2  # 32 bits a weight
    wide, narrow = (calibrated(run, weights, budget=str(int(0.7 * dense))) for weights in (FLOAT32, FLOAT16))
    assert 0.5 * dense < bytes_read(wide, FLOAT32) <= 0.7 * dense * 1.02
    assert all(spec.dense for spec in narrow.specs.values()) and not all(spec.dense for spec in wide.specs.values())


def test_a_perplexity_allowance_lets_less_be_read_when_it_is_larger(run):
    strict, loose = calibrated(run, budget="0.01%"), calibrated(run, budget="30%")
    assert bytes_read(loose) < bytes_read(strict)


def test_a_budget_knows_that_a_batch_reads_a_union(run):
    dense = 8 * 48 * 48 * 2 * 2  # the ffn is 2 d wide
    one, four = (calibrated(run, budget=str(int(0.85 * dense)), batch_size=b) for b in (1, 4))
    assert four.mean_density("mlp") + four.mean_density("heads") < one.mean_density("mlp") + one.mean_density("heads")


def test_the_second_test_lets_through_what_was_asked(run):
    bundle = calibrated(run, mlp_density=0.9, cascade=0.95)
    spec = bundle.specs[1, "mlp"]
    assert (spec.kind, spec.stage2_retained_mass) == ("cascade", 0.95) and bundle.specs[1, "heads"].kind == "low_rank"
    model = load_model(run[0])
    block = model.model.decoder.layers[1]
    mlp_in = ShardReader(run[1] / "activations", 1, "calibration").read("mlp_in", 0, ROWS).float()
    with torch.no_grad():
        passed = bundle.second_stages([layer.fc1 for layer in model.model.decoder.layers])[1].passed(mlp_in)
        activation = torch.relu(block.fc1(mlp_in))
        contribution = activation * torch.linalg.vector_norm(block.fc2.weight, dim=0)
        candidates = bundle.predictor(1, "mlp")(mlp_in) > spec.curve["threshold"][-4]
    assert float((contribution * passed).sum() / contribution.sum()) == pytest.approx(0.95, abs=0.01)
    density = spec.curve["density"][-4]
    both = candidates & passed
    assert float(candidates.float().mean()) == pytest.approx(density, abs=0.01)
    assert float(both.float().mean()) == pytest.approx(spec.curve["selected"][-4], abs=0.01)
    recall = float((both & (activation > 0)).sum() / (activation > 0).sum())
    assert recall == pytest.approx(spec.curve["recall"][-4], abs=0.01)
    kept = float((contribution * both).sum() / contribution.sum())
    assert kept == pytest.approx(spec.curve["retained_mass"][-4], abs=0.01) and kept < 0.96


def test_a_budget_knows_what_a_cascade_reads(run, tmp_path):
    dense = 8 * 48 * 48 * 2 * 2
    bundle = calibrated(run, budget=str(int(0.75 * dense)), cascade=0.98, dtype="int4")
    bundle.save_pretrained(tmp_path / "bundle")
    assert Bundle.from_pretrained(tmp_path / "bundle").specs == bundle.specs
    assert 0.6 * dense < bytes_read(bundle) <= 0.75 * dense * 1.02
    with pytest.raises(UserError, match="fc1_steps is missing"):
        tensors = {name: t for name, t in bundle.tensors.items() if name != "layers.0.mlp.fc1_steps"}
        dataclasses.replace(bundle, tensors=tensors).save_pretrained(tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cascade": 1.5}, "calibrate.cascade must lie above 0 and at most at 1"),
        ({"budget": "100"}, "cannot be met: the least that can be read is"),
        ({"budget": "lots"}, "a budget is a perplexity allowance"),
        ({"budget": "1%", "sensitivity_tokens": 0}, "needs sensitivities"),
        ({"mlp_density": 0.0}, "calibrate.mlp_density must lie above 0"),
        ({"dense_layers": (7,)}, "the model has layers 0 to 1, got 7"),
        ({"dtype": "int3"}, "calibrate.dtype must be one of"),
        ({"dense_layers": (0, 1), "mlp_density": 0.5}, "cannot be met: the 2 calibrate.dense_layers"),
    ],
)
def test_wrong_wishes_are_one_line(run, changes, message):
    with pytest.raises(UserError, match=message):
        calibrated(run, **changes)


def test_int8_predictors_select_almost_the_same_and_read_half_the_bytes(run):
    half, eighth = (calibrated(run, mlp_density=0.3, dtype=dtype) for dtype in ("float16", "int8"))
    x = torch.randn(200, 48)
    for layer in range(2):
        with torch.no_grad():
            kept = [b.predictor(layer, "mlp")(x) > b.specs[layer, "mlp"].threshold for b in (half, eighth)]
        assert float((kept[0] == kept[1]).float().mean()) > 0.99
    spec = eighth.specs[0, "mlp"]
    assert predictor_bytes(spec) == 24 * (48 + 96) + 4 * (24 + 96) + 2 * 96
    assert eighth.tensors["layers.0.mlp.down"].dtype == torch.int8
