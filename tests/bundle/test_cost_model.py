"""Bytes a bundle reads: by hand for one layer of each kind, and for the whole model."""

import dataclasses

import pytest
from bundles import make_bundle

from dejavu_train.bundle.cost_model import measured_mlp_share, mlp_share, predictor_bytes, spec_bytes
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.predictors.metrics import SelectionSums

METADATA = {"layer": 0, "target": "mlp", "site": "mlp_in", "site_layer": 0, "rank": 4, "d_in": 12, "n_out": 20}


def test_bytes_of_a_predictor():
    assert predictor_bytes(PredictorSpec(**METADATA, dtype="float16")) == 2 * (4 * 32 + 20)
    assert predictor_bytes(PredictorSpec(**METADATA, dtype="int8", bias=False)) == 4 * 32 + 4 * 24
    assert predictor_bytes(PredictorSpec(**METADATA, dtype="int4")) == 4 * 6 + 20 * 2 + 2 * 24 + 2 * 20
    assert predictor_bytes(PredictorSpec(**METADATA | {"rank": 3}, dtype="int4", bias=False)) == 3 * 6 + 20 * 2 + 2 * 23


def test_bytes_of_a_layer(tiny_opt):
    bundle = make_bundle(tiny_opt).with_densities({(0, "mlp"): 0.5, (1, "mlp"): 1.0})
    shape, spec = bundle.shape, bundle.specs[0, "mlp"]
    active = spec.recall * spec.active_density
    assert spec_bytes(spec, shape) == pytest.approx(predictor_bytes(spec) + 2 * 48 * 96 * (0.5 + active))
    assert spec_bytes(bundle.specs[1, "mlp"], shape) == 4 * 48 * 96
    tested = make_bundle(tiny_opt, cascade=True).with_densities({(0, "mlp"): 0.5}).specs[0, "mlp"]
    rows = 0.5 * (24 + 8) + 0.25 * (72 + 4) + 2 * 48 * active
    assert spec_bytes(tested, shape) == pytest.approx(predictor_bytes(tested) + 96 * rows)
    assert spec_bytes(tested, shape) < spec_bytes(spec, shape)


def test_share_of_the_dense_model(tiny_opt):
    bundle = make_bundle(tiny_opt)
    assert mlp_share(bundle.at(1.0)) == 1.0
    assert mlp_share(bundle.at(0.1)) < mlp_share(bundle.at(0.3)) < 1.0
    heads = {key: spec for key, spec in bundle.specs.items() if key[1] == "heads"}
    assert mlp_share(dataclasses.replace(bundle, specs=heads)) == 1.0


def counts(units, selected, active, both):
    sums = SelectionSums()
    for name, value in {"units": units, "tp": both, "fp": selected - both, "fn": active - both}.items():
        setattr(sums, name, getattr(sums, name) + value)
    return sums


def test_share_counted_on_scored_text(tiny_opt):
    # 10 tokens of a layer of 96 neurons, d_model 48: 300 candidates, 120 selected, 50 of them active, of 80 active.
    sums = {(0, "mlp"): counts(960, 120, 80, 50), (1, "mlp"): counts(960, 960, 80, 80)}
    dense = 4 * 48 * 96
    bundle = make_bundle(tiny_opt).with_densities({(0, "mlp"): 0.3, (1, "mlp"): 1.0})
    plain = predictor_bytes(bundle.specs[0, "mlp"]) + 2 * 48 * (120 + 50) / 10
    assert measured_mlp_share(bundle, sums) == pytest.approx((plain + dense) / (2 * dense))
    bundle = make_bundle(tiny_opt, cascade=True).with_densities({(0, "mlp"): 0.3, (1, "mlp"): 1.0})
    rows = (300 * (48 / 2 + 8) + 120 * (1.5 * 48 + 4) + 50 * 2 * 48) / 10
    tested = predictor_bytes(bundle.specs[0, "mlp"]) + rows
    assert measured_mlp_share(bundle, sums, {0: 300}) == pytest.approx((tested + dense) / (2 * dense))
