"""An experiment is one run of every logger: settings, the course of each job, the bundle, what infer.py measured."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from small_runs import activations, flags

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.attach import attach, numbers_of
from dejavu_train.evaluation.command import main as infer
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.ground.experiments import Record, record_of
from dejavu_train.run.command import main, parse_config
from dejavu_train.training.experiment import Experiment, _course
from dejavu_train.training.trainer import resolved_arguments

FEW = ("--mlp.steps=8", "--mlp.validations=2", "--heads.steps=8", "--heads.validations=2")
JOBS = {f"layer_{layer:02d}/{target}" for layer in (0, 1) for target in ("mlp", "heads")}


class Seen:
    """A logger that keeps what it is told, as Lightning's interface tells it."""

    made: list["Seen"] = []
    log_dir = "board"

    def __init__(self, save_dir=".", name="x", version=None):
        self.arguments = {"save_dir": save_dir, "name": name, "version": version}
        self.settings, self.metrics, self.ended, self.experiment = {}, [], [], None
        self.made.append(self)

    def log_hyperparams(self, settings):
        self.settings = settings

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def finalize(self, status):
        self.ended.append(status)


class TensorBoardLogger(Seen):
    """By its name one of those to which infer.py adds."""


@pytest.fixture
def output(tiny_opt, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(Seen, "made", [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "activations").symlink_to(activations(tiny_opt, text_file))
    return tmp_path / "run"


def train(tiny_opt, text_file, output, *more, logger=f"{__name__}.Seen"):
    argv = flags(tiny_opt, text_file, output, *FEW, f"--trainer.logger={logger}", *more)
    assert exit_on_user_error(main, argv) == 0


def named(logger):
    return {name for _, metrics in logger.metrics for name in metrics}


def read(record):
    with open(record.path.with_suffix(".csv"), newline="") as file:
        return {(row["name"], row["step"]): row["value"] for row in csv.DictReader(file)}


def test_an_experiment_is_one_run_of_a_logger(tiny_opt, text_file, output):
    train(tiny_opt, text_file, output, "--bundle=first")
    used = [each for each in Seen.made if each.metrics]
    assert len(used) == 1 and used[0].ended == ["success"] and used[0].settings["mlp"]["rank"] == 16
    assert used[0].arguments["save_dir"] == str(output) and used[0].arguments["version"].startswith("run-")
    assert {"/".join(name.split("/")[:2]) for name in named(used[0]) if name.startswith("layer_")} == JOBS
    assert {"layer_00/mlp/val/loss", "mlp/recall_at_active_density", "mlp/retained_mass"} <= named(used[0])
    mass = {step: m["by_layer/mlp/retained_mass"] for step, m in used[0].metrics if "by_layer/mlp/retained_mass" in m}
    specs = Bundle.from_pretrained(output / "first").specs
    assert mass == {layer: specs[UnitKey(layer, "mlp")].retained_mass for layer in (0, 1)}
    train(tiny_opt, text_file, output, "--bundle=second", "--calibrate.mlp_density=0.3")
    used = [each for each in Seen.made if each.metrics]
    assert len(used) == 2 and named(used[0]) == named(used[1])  # whole, though no predictor was trained
    records = [Record.read(path) for path in (output / "experiments").glob("*.json")]
    assert {record.bundle for record in records} == {"first", "second"} and len({r.stage for r in records}) == 2
    rows = [read(record) for record in sorted(records, key=lambda record: record.bundle)]
    assert [row["settings/calibrate.mlp_density", ""] for row in rows] == ["0.4", "0.3"]
    assert float(rows[0]["by_layer/mlp/retained_mass", "1"]) == mass[1]


def test_parts_of_the_layers_leave_the_run_to_the_last(tiny_opt, text_file, output):
    train(tiny_opt, text_file, output, "--layers=0")
    assert not [each for each in Seen.made if each.metrics] and not (output / "experiments").exists()
    train(tiny_opt, text_file, output, "--layers=1")
    (used,) = [each for each in Seen.made if each.metrics]
    assert {"/".join(name.split("/")[:2]) for name in named(used) if name.startswith("layer_")} == JOBS


def test_an_experiment_that_was_interrupted_behind_its_bundle_is_closed(tiny_opt, text_file, output, monkeypatch):
    close = Experiment.close

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "close", fail)
    argv = flags(tiny_opt, text_file, output, *FEW, f"--trainer.logger={__name__}.Seen")
    with pytest.raises(KeyboardInterrupt):
        main(argv)
    assert (output / "bundle" / "bundle.json").is_file() and not found_record(output).done
    monkeypatch.setattr(Experiment, "close", close)
    train(tiny_opt, text_file, output)
    assert found_record(output).done and "mlp/retained_mass" in {name for name, _ in read(found_record(output))}
    ended = len([each for each in Seen.made if each.ended])
    train(tiny_opt, text_file, output)
    assert ended == 1 == len([each for each in Seen.made if each.ended])


def test_a_run_that_goes_on_logs_no_job_twice(tiny_opt, text_file, output):
    train(tiny_opt, text_file, output)
    argv = flags(tiny_opt, text_file, output, *FEW, f"--trainer.logger={__name__}.Seen")
    config = parse_config(argv)
    again = Experiment(dataclasses.replace(config, trainer=resolved_arguments(config.trainer)))
    assert set(again.record.logged) == JOBS
    again.record.logged.remove("layer_01/mlp")
    Seen.made.clear()
    again.log_job(UnitKey(0, "mlp"))
    assert not Seen.made
    again.log_job(UnitKey(1, "mlp"))
    assert {name.split("/")[0] for name in named(Seen.made[0])} == {"layer_01"}


def test_the_course_of_a_job_that_was_resumed(tmp_path):
    for version, rows in enumerate(["1,0.5\n9,0.4\n", "9,0.3\n12,\n"]):
        (tmp_path / f"version_{version}").mkdir()
        (tmp_path / f"version_{version}" / "metrics.csv").write_text("step,loss\n" + rows)
    assert list(_course(tmp_path)) == [(1, {"loss": 0.5}), (9, {"loss": 0.3}), (12, {})]


def test_infer_adds_perplexities_to_the_experiment(tiny_opt, text_file, output, tmp_path, monkeypatch, no_pictures):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    train(tiny_opt, text_file, output, "--trainer.logger.project=test", logger="lightning.pytorch.loggers.WandbLogger")
    argv = ["--bundle", output / "bundle", "--output", tmp_path / "infer", "--text", text_file, "--tokens=200"]
    argv += ["--window=32", "--timing=false", "--selections=predicted", "--mlp_density=0.2"]
    assert exit_on_user_error(infer, [str(each) for each in argv]) == 0
    monkeypatch.delenv("WANDB_MODE")
    runs = [path.name.split("-", 3)[3] for path in (output / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and set(runs) == {record.id for record in [found_record(output)]}
    found = json.loads((tmp_path / "infer" / "results.json").read_text())
    stored = read(found_record(output))
    for name, value in numbers_of(found).items():
        assert float(stored[name, ""]) == value
    assert {name.split("/")[-1] for name in numbers_of(found)} == {"dense", "calibrated", "mlp-0.2-heads-1"}
    bundle = Bundle.from_pretrained(output / "bundle")
    shutil.copytree(output / "bundle", tmp_path / "moved")
    assert record_of(tmp_path / "moved", bundle.metadata) is None
    assert record_of("OWNER/NAME", bundle.metadata) is None and record_of(output / "bundle", {}) is None


def found_record(output):
    (path,) = (output / "experiments").glob("*.json")
    record = Record.read(path)
    assert record is not None
    return record


def test_tensorboard_gets_them_where_it_is_installed(tmp_path, monkeypatch):
    record = Record(tmp_path / "experiments" / "a.json", "b", "c", loggers=[{"kind": "tensorboard", "folder": "x"}])
    told = {}

    class Writer:
        def __init__(self, folder):
            told["folder"] = folder

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def add_scalar(self, name, value):
            told[name] = value

    import sys
    import types

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr("dejavu_train.evaluation.attach.has_package", lambda name: True)
    row = {"selection": "dense", "text": "t", "perplexity": 2.0, "sparse_from": 0, "as_calibrated": False}
    row |= {"asked_mlp_density": 1.0, "asked_head_density": 1.0}
    attach({"quality": [row], "timing": [{"backend": "cpu", "ms_per_token": {"p50": 1.5}}]}, record)
    assert told == {"folder": "x", "perplexity/t/dense": 2.0, "ms_per_token/cpu": 1.5}
    assert Path(record.path.with_suffix(".csv")).read_text().splitlines()[1:] == [
        "perplexity/t/dense,,2.0", "ms_per_token/cpu,,1.5"
    ]  # fmt: skip
