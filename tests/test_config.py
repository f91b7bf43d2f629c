import dataclasses
import logging

import pytest

from dejavu_train.calibration.config import CalibrateConfig
from dejavu_train.data.config import CollectConfig
from dejavu_train.families import ModelDims, UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.training.config import PredictorConfig, RunConfig, TuneConfig, parse_layers, parse_targets
from dejavu_train.training.stages import calibrate_stage

SHAPE, TWO = (ModelDims(48, 96, n_layers, 4, 320, 512) for n_layers in (6, 2))


def test_layers():
    assert parse_layers(None, 3) == [0, 1, 2]
    assert parse_layers("0-2,5", 6) == [0, 1, 2, 5]
    assert parse_layers(4, 6) == [4]


@pytest.mark.parametrize("text, words", [("0-6", "0 to 5"), ("a", "0-5"), ("3-1", "0-5"), ("", "0-5"), ("-2", "0-5")])
def test_layers_out_of_range_or_unreadable(text, words):
    with pytest.raises(UserError, match=words):
        parse_layers(text, 6)


def test_targets():
    assert parse_targets("heads, mlp") == ["mlp", "heads"]
    with pytest.raises(UserError, match="mlp, heads"):
        parse_targets("mlp,keys")


def test_sites_by_half_blocks():
    shape = ModelDims(8, 16, 4, 2, 32, 16)

    def site(lookahead, layer, target, shape=shape):
        return PredictorConfig(lookahead=lookahead).site(UnitKey(layer, target), shape)

    assert [site(n, 3, "mlp") for n in range(3)] == [(3, "mlp_in"), (3, "attn_in"), (2, "mlp_in")]
    assert [site(n, 3, "heads") for n in range(3)] == [(3, "attn_in"), (2, "mlp_in"), (2, "attn_in")]
    with pytest.raises(UserError, match="before the first layer"):
        site(2, 0, "mlp")
    hybrid = dataclasses.replace(shape, n_layers=5, pattern=".-.*-")
    assert [site(1, *key, hybrid) for key in hybrid.keys] == [(1, "mlp_in"), (1, "mlp_in"), (3, "attn_in")]


def test_jobs():
    config = RunConfig(layers="1", targets="heads")
    assert config.own_jobs(TWO) == [(1, "heads")]
    assert config.all_jobs(TWO) == [(0, "mlp"), (1, "mlp"), (0, "heads"), (1, "heads")]
    assert RunConfig(heads=PredictorConfig(enabled=False)).all_jobs(TWO) == [(0, "mlp"), (1, "mlp")]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mlp": PredictorConfig(rank=64)}, "mlp.rank is 64"),
        ({"mlp": PredictorConfig(rank=8, ranks={9: 4})}, "mlp.ranks"),
        ({"mlp": PredictorConfig(rank=8, loss="focal")}, "unknown loss focal"),
        ({"mlp": PredictorConfig(rank=8, density=0.0)}, "mlp.density"),
        ({"mlp": PredictorConfig(rank=8, steps=-1)}, "mlp.steps"),
        ({"mlp": PredictorConfig(rank=8, lookahead=-1)}, "mlp.lookahead"),
        ({"mlp": PredictorConfig(rank=8, lookahead=2)}, "before the first layer"),
        ({"heads": PredictorConfig(rank=8, init="svd")}, "heads.init"),
        ({"heads": PredictorConfig(enabled=False), "targets": "heads"}, "heads.enabled"),
        ({"heads": PredictorConfig(enabled=False), "calibrate": CalibrateConfig(head_density=0.8)}, "ask for 1.0"),
        ({"calibrate": CalibrateConfig(budget="1kB")}, "the predictors alone read"),
        ({"calibrate": CalibrateConfig(dtype="int3")}, "calibrate.dtype must be one of .*int8, int4, got int3"),
        ({"tune": TuneConfig(steps=3), "calibrate": CalibrateConfig(selection="top_k")}, "tune.steps needs predictors"),
        ({"tune": TuneConfig(steps=-1)}, "tune.steps must be at least 0"),
        ({"layers": "6"}, "0 to 5"),
    ],
)
def test_mistakes_are_named(changes, words):
    good = RunConfig(mlp=PredictorConfig(rank=8), heads=PredictorConfig(rank=8, init="small"))
    good.check(SHAPE)
    with pytest.raises(UserError, match=words):
        dataclasses.replace(good, **changes).check(SHAPE)


def test_nothing_to_train():
    off = PredictorConfig(enabled=False)
    with pytest.raises(UserError, match="nothing to train"):
        RunConfig(mlp=off, heads=off).check(SHAPE)


def test_what_a_family_decides_is_settled_by_its_sizes(caplog):
    caplog.set_level(logging.INFO, "dejavu_train")
    given = RunConfig(calibrate=CalibrateConfig(cascade="auto"), collect=CollectConfig(dtype="auto"))
    gated = dataclasses.replace(SHAPE, gated=True)
    odd, squared = dataclasses.replace(SHAPE, d_model=52), dataclasses.replace(SHAPE, activation="relu2")
    own = dataclasses.replace(given, mlp=PredictorConfig(predictor={"class_path": "mine.Own"}))
    asked = [(given, SHAPE), (given, squared), (given, gated), (given, odd), (own, SHAPE)]
    for config, shape in asked:
        config.calibrate.check(shape)
    made = [config.settled(shape) for config, shape in asked]
    assert [config.calibrate.cascade for config in made] == [0.999, 0.999, None, None, None]
    assert [config.collect.dtype for config in made] == ["float16", "bfloat16", *["float16"] * 3]
    why = ["this model's MLP is gated", "multiple of 8, got 52", "is for low-rank predictors"]
    assert all(record.message.endswith(words) for record, words in zip(caplog.records, why, strict=True))
    explicit = RunConfig(calibrate=CalibrateConfig(cascade=0.99))
    assert explicit.settled(gated) == explicit and made[0].settled(gated) == made[0]
    with pytest.raises(UserError, match="MLP is gated; pass --calibrate.cascade null"):
        explicit.calibrate.check(gated)


def test_auto_names_what_it_stands_for():
    """A run of an earlier version, whose file said 0.999, goes on."""
    given = RunConfig(calibrate=CalibrateConfig(cascade="auto"))
    before = RunConfig(calibrate=CalibrateConfig(cascade=0.999))
    assert calibrate_stage(given.settled(SHAPE)) == calibrate_stage(before)
