"""Bytes a bundle reads: by hand for one layer of each kind, and for the whole model."""

import dataclasses

import pytest
from bundles import make_bundle
from four_bit_models import four_bits
from transformers import OPTConfig, OPTForCausalLM

from dejavu_train.bundle.cost_model import measured_mlp_share, mlp_share, predictor_bytes, spec_bytes
from dejavu_train.bundle.spec import PredictorSpec
from dejavu_train.families import ModelDims
from dejavu_train.models.load import load_model
from dejavu_train.models.weight_format import (
    BFLOAT16,
    CODES4,
    FLOAT16,
    FLOAT32,
    UnitBytes,
    WeightFormat,
    loaded_format,
    stored_format,
)
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
    assert spec_bytes(spec, shape, FLOAT16) == pytest.approx(predictor_bytes(spec) + 2 * 48 * 96 * (0.5 + active))
    assert spec_bytes(bundle.specs[1, "mlp"], shape, FLOAT16) == 4 * 48 * 96
    tested = make_bundle(tiny_opt, cascade=True).with_densities({(0, "mlp"): 0.5}).specs[0, "mlp"]
    rows = 0.5 * (24 + 8) + 0.25 * (72 + 4) + 2 * 48 * active
    assert spec_bytes(tested, shape, FLOAT16) == pytest.approx(predictor_bytes(tested) + 96 * rows)
    assert spec_bytes(tested, shape, FLOAT16) < spec_bytes(spec, shape, FLOAT16)


def test_a_neuron_of_gelu_is_read_whole_where_it_is_selected(tiny_opt):
    shape = dataclasses.replace(make_bundle(tiny_opt).shape, activation="gelu")
    bundles = [make_bundle(tiny_opt, cascade=cascade) for cascade in (False, True)]
    found = [bundle.with_densities({(0, "mlp"): 0.5}).specs[0, "mlp"] for bundle in bundles]
    rows = [0.5 * 4 * 48, 0.5 * (24 + 8) + 0.25 * (72 + 4 + 2 * 48)]
    for spec, row in zip(found, rows, strict=True):
        assert spec_bytes(spec, shape, FLOAT16) == pytest.approx(predictor_bytes(spec) + 96 * row)


@pytest.mark.parametrize("weights", [FLOAT32, FLOAT16])
def test_share_of_the_dense_model(tiny_opt, weights):
    bundle = make_bundle(tiny_opt)
    assert mlp_share(bundle.at(1.0), weights) == 1.0
    assert mlp_share(bundle.at(0.1), weights) < mlp_share(bundle.at(0.3), weights) < 1.0
    heads = {key: spec for key, spec in bundle.specs.items() if key[1] == "heads"}
    assert mlp_share(dataclasses.replace(bundle, specs=heads), weights) == 1.0


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
    assert measured_mlp_share(bundle, sums, FLOAT16) == pytest.approx((plain + dense) / (2 * dense))
    bundle = make_bundle(tiny_opt, cascade=True).with_densities({(0, "mlp"): 0.3, (1, "mlp"): 1.0})
    rows = (300 * (48 / 2 + 8) + 120 * (1.5 * 48 + 4) + 50 * 2 * 48) / 10
    tested = predictor_bytes(bundle.specs[0, "mlp"]) + rows
    assert measured_mlp_share(bundle, sums, FLOAT16, {0: 300}) == pytest.approx((tested + dense) / (2 * dense))


WIDE = ModelDims(d_model=64, d_ffn=256, n_layers=2, n_heads=4, vocab_size=300, max_positions=64)


@pytest.mark.parametrize(
    ("weights", "unit"),
    [
        (FLOAT32, UnitBytes(256, 256, 4 * 16 * 256)),
        (FLOAT16, UnitBytes(128, 128, 4 * 16 * 128)),
        # a row of 64: 32 bytes of codes and one scale; of the output projection a head has 64 rows of 16 with one each
        (CODES4, UnitBytes(34, 34, 3 * 16 * 34 + 64 * 10)),
        (WeightFormat("8 bits", 8, coded=True), UnitBytes(66, 66, 3 * 16 * 66 + 64 * 18)),
    ],
)
def test_bytes_of_a_unit_are_those_of_the_format(weights, unit):
    assert weights.unit_bytes(WIDE) == unit
    assert unit.dense(WIDE, "mlp") == 256 * 2 * unit.up and unit.dense(WIDE, "heads") == 4 * unit.head
    spec = PredictorSpec(**METADATA | {"d_in": 64, "n_out": 256}, density=0.5, recall=0.5, threshold=0.0)
    rows = 256 * (0.5 * unit.up + 0.5 * unit.down)
    assert spec_bytes(spec, WIDE, weights) == predictor_bytes(spec) + rows


def test_the_format_of_a_model_is_read_from_its_config_and_from_its_layers(tiny_opt):
    widths = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(num_hidden_layers=1, vocab_size=40, **widths))
    assert loaded_format(load_model(str(tiny_opt))) == FLOAT32
    assert loaded_format(load_model(str(tiny_opt), "bfloat16")) == BFLOAT16
    assert stored_format({"dtype": "float16"}) == stored_format({"torch_dtype": "float16"}) == FLOAT16
    assert stored_format({}) == FLOAT32
    assert loaded_format(four_bits(model)) == CODES4
    assert stored_format({"dtype": "float16", "quantization_config": {"quant_method": "dejavu_int4"}}) == CODES4
