import dataclasses

from dejavu_train.calibration.config import CalibrateConfig
from dejavu_train.data.config import CollectConfig
from dejavu_train.data.text import TextSource
from dejavu_train.training.config import RunConfig
from dejavu_train.training.finetune import TuneConfig
from dejavu_train.training.stages import (
    calibrate_stage,
    collect_stage,
    curves_stage,
    train_stage,
    trained_identity,
    tune_stage,
)

BASE = RunConfig(trainer={"devices": 1, "precision": "32-true"}, tune=TuneConfig(steps=3))
STAGES = {
    "collect": collect_stage,
    "train mlp": lambda config: train_stage(config, "mlp"),
    "train heads": lambda config: train_stage(config, "heads"),
    "tune": tune_stage,
    "curves": curves_stage,
    "calibrate": calibrate_stage,
}


def changed(**values):
    """Names of the stages that another value makes anew."""
    other = dataclasses.replace(BASE, **values)
    return {name for name, stage in STAGES.items() if stage(other).identity != stage(BASE).identity}


def test_how_a_run_runs_is_in_no_identity():
    assert not changed(layers="0-1", targets="mlp", output="elsewhere", bundle="other")
    assert not changed(trainer={"devices": 2, "precision": "32-true", "logger": True})
    assert not changed(collect=CollectConfig(device="cpu", batch_size=3), text=TextSource(cache="elsewhere"))


def test_a_key_reaches_what_depends_on_it():
    assert changed(calibrate=CalibrateConfig(mlp_density=0.3)) == {"calibrate"}
    assert changed(calibrate=CalibrateConfig(budget="5%", selection="top_k")) == {"calibrate"}
    assert changed(calibrate=CalibrateConfig(rows=100)) == {"curves", "calibrate"}
    assert changed(calibrate=CalibrateConfig(cascade=0.99)) == {"tune", "curves", "calibrate"}
    assert changed(tune=TuneConfig(steps=3, density=0.3)) == {"tune", "curves", "calibrate"}
    assert changed(tune=TuneConfig(steps=0)) == {"tune", "curves", "calibrate"}
    assert changed(mlp=dataclasses.replace(BASE.mlp, rank=8)) == {"train mlp", "tune", "curves", "calibrate"}
    assert changed(heads=dataclasses.replace(BASE.heads, rank=8)) == {"train heads", "tune", "curves", "calibrate"}
    everything = set(STAGES)
    assert changed(seed=1) == changed(text=TextSource(seed=4)) == everything
    assert changed(collect=CollectConfig(window=64)) == everything
    assert changed(trainer={"devices": 1, "precision": "bf16-mixed"}) == everything - {"collect"}
    assert trained_identity(BASE) != trained_identity(dataclasses.replace(BASE, seed=1))


def test_why_a_stage_is_made_anew():
    stage = tune_stage(BASE)
    assert stage.matches(stage.to_json()) and not stage.matches(None) and not stage.matches({})
    other = tune_stage(dataclasses.replace(BASE, tune=TuneConfig(steps=4)))
    assert stage.difference(other.to_json()) == "tune.steps was 4 and is 3"
    several = tune_stage(dataclasses.replace(BASE, tune=TuneConfig(steps=4, width=2.0)))
    assert stage.difference(several.to_json()) == "tune.steps was 4 and is 3; tune.width was 2.0 and is 1.0"
    assert stage.flags_of(several.to_json()) == "--tune.steps 4 --tune.width 2.0"
    deeper = tune_stage(dataclasses.replace(BASE, seed=1))
    assert stage.difference(deeper.to_json()) == "what it depends on has changed"
    assert "older version" in stage.difference({})


def test_an_edited_class_of_ones_own_is_trained_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_parts_of_stages.py"
    path.write_text("rank = 1\n")
    named = {"class_path": "own_parts_of_stages.Thing", "init_args": {"rank": 3}}
    mlp = dataclasses.replace(BASE.mlp, predictor=named)
    config = dataclasses.replace(BASE, mlp=mlp, trainer={"callbacks": [{"class_path": "own_parts_of_stages.Thing"}]})
    before = {name: stage(config) for name, stage in STAGES.items()}
    path.write_text("rank = 12\n")
    changed = {name for name, stage in STAGES.items() if stage(config).identity != before[name].identity}
    assert changed == {"train mlp", "tune", "curves", "calibrate"}
    said = train_stage(config, "mlp").difference(before["train mlp"].to_json())
    assert said.startswith("mlp.predictor.file_sha256 was ")
    text = dataclasses.replace(BASE, text=TextSource(source={"class_path": "own_parts_of_stages.Notes"}))
    collected = collect_stage(text)
    path.write_text("rank = 123\n")
    assert collect_stage(text).difference(collected.to_json()).startswith("text.source.file_sha256 was ")
    gone = dataclasses.replace(BASE, mlp=dataclasses.replace(mlp, predictor={"class_path": "no.such.Thing"}))
    assert train_stage(gone, "mlp").keys["mlp.predictor.file_sha256"] is None
