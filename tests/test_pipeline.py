import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY
from small_runs import activations, flags, start_main

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.shard_reader import active_densities
from dejavu_train.data.text import TextSource, load_sets
from dejavu_train.evaluation.perplexity import EvalSetting, evaluate, hold_out
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.ground.files import write_sealed
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.run import pipeline
from dejavu_train.run.command import main, parse_config
from dejavu_train.run.pipeline import say_what_density_holds
from dejavu_train.training.config import PredictorConfig


@pytest.fixture(scope="module")
def finished(tiny_opt, text_file, tmp_path_factory):
    """A whole run, from text to bundle."""
    output = tmp_path_factory.mktemp("pipeline") / "run"
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output)) == 0
    return output


def masses(output):
    """Retained mass of every predictor at its density, and of the bundle, whose sharing out may tip by a hair."""
    values = {}
    for path in sorted((output / "predictors").glob("layer_*/*/predictor.json")):
        values[path.parent.parent.name, path.parent.name] = json.loads(path.read_text())["metrics"]["retained_mass"]
    bundle = Bundle.from_pretrained(output / "bundle")
    for target in ("mlp", "heads"):
        specs = [spec for (_, name), spec in bundle.specs.items() if name == target]
        values["bundle", target] = sum(spec.retained_mass for spec in specs) / len(specs)
    return values


def same_quality(output, reference):
    ours, theirs = masses(output), masses(reference)
    assert ours.keys() == theirs.keys() and len(ours) == 6
    assert all(abs(ours[key] - theirs[key]) < 0.003 for key in ours), (ours, theirs)


def test_from_text_to_bundle(finished, tiny_opt):
    bundle = Bundle.from_pretrained(finished / "bundle")
    assert set(bundle.specs) == {(layer, target) for layer in (0, 1) for target in ("mlp", "heads")}
    bundle.check_model(str(tiny_opt))
    assert bundle.mean_density("mlp") == pytest.approx(0.4, rel=0.05)
    lines = (finished / "predictors" / "summary.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("layer,target,rank")
    run = json.loads((finished / "run.json").read_text())
    assert run["train"]["mlp"]["keys"]["mlp.rank"] == 16 and run["train"]["mlp"]["density"] == 0.4


def test_the_summary_shows_what_the_bundle_has(tiny_opt):
    bundle = make_bundle(tiny_opt)
    for moved in (bundle.at(0.3, 1.0), bundle.at(0.6, 0.5)):
        heading, *rows = [line.split() for line in pipeline.bundle_summary(moved).splitlines()]
        assert heading[:5] == ["layer", "target", "active", "candidates", "selected"] and rows[0][:2] == ["0", "mlp"]
        spec = moved.specs[0, "mlp"]
        assert [float(cell) for cell in (rows[0][3], rows[0][4], rows[0][-1])] == pytest.approx(
            [spec.density, spec.recall, spec.retained_mass], abs=1e-3
        )
        means = [" ".join(row) for row in rows if row[0].endswith(":")]
        mass = sum(each.retained_mass for key, each in moved.specs.items() if key[1] == "mlp") / 2
        assert means[0].startswith("mlp: recall 0.") and f"at density {moved.mean_density('mlp'):.3f}" in means[0]
        assert any("raise --calibrate.mlp_density" in line for line in means) == (mass < 0.95)
    assert pipeline.bundle_summary(bundle.at(0.3, 1.0)).split().count("dense") == 2  # the heads of two layers


def test_predictors_are_tuned_in_the_model_before_the_last_calibration(finished, tiny_opt, text_file, tmp_path):
    output = tmp_path / "run"
    more = ("--tune.steps=3", "--tune.tokens=128", "--tune.batch_tokens=128", "--calibrate.dtype=int4")
    shutil.copytree(finished / "activations", output / "activations")
    tested = (
        "--calibrate.cascade=0.99",
        "--mlp.steps=8",
        "--heads.steps=8",
        "--mlp.validations=1",
        "--heads.validations=1",
    )
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *more, *tested)) == 0
    bundle = Bundle.from_pretrained(output / "bundle")
    assert {spec.kind for key, spec in bundle.specs.items() if key[1] == "mlp"} == {"cascade"}
    metadata = json.loads((output / "tuned" / "layer_01" / "mlp" / "predictor.json").read_text())
    assert metadata["tuned"]["step"] == 2 and metadata["rank"] == 16
    for target, same in (("mlp", False), ("heads", True)):
        name = f"layer_01/{target}/predictor.safetensors"
        assert ((output / "tuned" / name).read_bytes() == (output / "predictors" / name).read_bytes()) == same
    whole = {part: (output / part).rename(tmp_path / part) for part in ("tuned", "bundle")}
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *more, *tested, "--collect.by_layers=true")) == 0
    for part, name in (("tuned", "layer_01/mlp/predictor.safetensors"), ("bundle", "predictors.safetensors")):
        assert (output / part / name).read_bytes() == (whole[part] / name).read_bytes()
    stage = json.loads((output / "tuned" / "stage.json").read_text())
    assert stage["layers"] == [0, 1] and not pipeline.untuned_layers(output / "tuned", bundle)
    write_sealed(output / "tuned" / "stage.json", {"layers": [1]})  # as where layer 0 was dense under the budget
    assert pipeline.untuned_layers(output / "tuned", bundle) == [0]
    assert pipeline.untuned_layers(output / "tuned", bundle.with_densities({(0, "mlp"): 1.0})) == []


def test_a_density_that_cannot_hold_what_is_active_is_named(tiny_opt, text_file, caplog):
    folder = activations(tiny_opt, text_file)
    active = sum(active_densities(folder).values()) / 2
    config = parse_config(flags(tiny_opt, text_file, folder.parent))
    for density, most in ((active / 2, "recall is at most 0.500"), (active + 0.01, None)):
        caplog.clear()
        say_what_density_holds(dataclasses.replace(config, mlp=PredictorConfig(density=density)), folder)
        assert most in caplog.text if most else not caplog.records


def test_the_same_command_again_does_nothing(finished, tiny_opt, text_file, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert exit_on_user_error(main, flags(tiny_opt, text_file, finished)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_only_what_depends_on_a_changed_key_is_made_anew(finished, tiny_opt, text_file, tmp_path, caplog):
    """Another threshold calibrates. Another rank trains that target. Other text is refused."""
    output = shutil.copytree(finished, tmp_path / "run")
    caplog.set_level(logging.INFO, logger="dejavu_train")

    def run(*more):
        caplog.clear()
        assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *more)) == 0
        return caplog.text

    first = (output / "bundle" / "bundle.json").read_bytes()
    log = run("--calibrate.mlp_density=0.3", "--bundle=at-30")
    assert "training" not in log and "collecting" not in log
    assert Bundle.from_pretrained(output / "at-30").mean_density("mlp") == pytest.approx(0.3, rel=0.05)
    assert (output / "bundle" / "bundle.json").read_bytes() == first
    assert "calibration curves: those of" in log and "sensitivity" not in log
    shutil.move(output / "bundle", tmp_path / "kept")
    shutil.move(output / "at-30", tmp_path / "at-30")
    log = run("--calibrate.mlp_density=0.3", "--bundle=at-30")
    assert "calibration curves" not in log, "nothing was left to take them from"
    for name in ("bundle.json", "predictors.safetensors"):
        assert (output / "at-30" / name).read_bytes() == (tmp_path / "at-30" / name).read_bytes()
    shutil.move(tmp_path / "kept", output / "bundle")
    log = run("--calibrate.mlp_density=0.2")
    assert "calibrated anew, calibrate.mlp_density was 0.4 and is 0.2" in log and "training" not in log
    log = run("--mlp.rank=8")
    assert log.count("training anew, mlp.rank was 16 and is 8") == 2 and log.count("trained before") == 2
    run("--mlp.rank=8", "--heads.enabled=false", "--calibrate.head_density=1.0", "--bundle=mlp-only")
    assert Bundle.from_pretrained(output / "mlp-only").targets == ["mlp"]
    path = output / "bundle" / "predictors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "the bundle is written anew" in run("--mlp.rank=8")
    Bundle.from_pretrained(output / "bundle")


def test_an_open_density_is_that_of_the_first_training(tiny_opt, text_file, tmp_path, caplog, capsys):
    output = tmp_path / "run"
    shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    caplog.set_level(logging.INFO, logger="dejavu_train")
    few = ["--mlp.steps=4", "--heads.steps=4", "--mlp.validations=1", "--heads.validations=1", "--mlp.density=null"]
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *few)) == 0
    assert json.loads((output / "run.json").read_text())["train"]["mlp"]["density"] == 0.4
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *few, "--calibrate.mlp_density=0.3")) == 0
    assert "were trained for density 0.4, calibrated for 0.3" in caplog.text
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *few, "--check")) == 0
    assert "train mlp    reused" in capsys.readouterr().out


def test_the_model_is_loaded_for_sensitivities_alone_and_as_configured(
    finished, tiny_opt, text_file, tmp_path, monkeypatch
):
    """Thresholds come from the shards, layer by layer. Dtype, device map and revision reach what loads the model."""
    output = shutil.copytree(finished, tmp_path / "run")
    calls = []
    original = pipeline.load_model
    monkeypatch.setattr(pipeline, "load_model", lambda *args: calls.append(args) or original(*args))
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, "--calibrate.mlp_density=0.3")) == 0
    assert not calls
    more = ("--calibrate.mlp_density=0.3", "--collect.dtype=bfloat16", "--calibrate.sensitivity_tokens=60")
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, *more)) == 0
    assert [call[:4] for call in calls] == [(str(tiny_opt), "bfloat16", torch.device("cpu"), None)]


def test_open_jobs_are_named_and_the_last_one_bundles(tiny_opt, text_file, tmp_path, capsys, finished):
    output = tmp_path / "run"
    shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, "--layers=0")) == 0
    assert "still open: layer 1 mlp, layer 1 heads" in capsys.readouterr().out
    assert not (output / "bundle").exists()
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, "--layers=1", "--targets=mlp")) == 0
    assert "still open: layer 1 heads" in capsys.readouterr().out
    assert exit_on_user_error(main, flags(tiny_opt, text_file, output, "--targets=heads")) == 0
    same_quality(output, finished)


def collecting(output):
    """One shard is written and another is being written."""
    folder = output / "activations"
    try:
        return any(folder.rglob("layer_*/shard_*.h5")) and any(folder.rglob("layer_*/.tmp-*"))
    except FileNotFoundError:  # a folder went between two looks
        return False


def training(job):
    """Returns what tells whether a job has checkpoints and no predictor yet."""

    def reached(output):
        folder = output / "predictors" / job
        return any((folder / "checkpoints").glob("*.ckpt")) and not (folder / "predictor.json").exists()

    return reached


def calibrating(output):
    """The bundle is being written, and is not there."""
    return any((output / ".holders" / "bundle").glob("*.json")) and not (output / "bundle" / "bundle.json").exists()


def kill_when(reached, argv, output, log, seconds=120):
    """Run train.py and kill it where ``reached`` holds. Returns its exit code.

    The process is stopped first, so that what is asserted of the folder holds at the moment of the kill.
    """
    log.write_text("")
    process = start_main(argv, log)
    ends = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < ends:
        if reached(output):
            os.kill(process.pid, signal.SIGSTOP)
            if reached(output):
                break
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.002)
    assert reached(output), log.read_text()
    process.kill()
    process.join()
    return process.exitcode


def perplexities(model, output, text_file):
    """Of the dense model and of a selection so narrow that it costs something, on held-out documents."""
    documents = load_sets(TextSource(source=str(text_file)), str(model))[0]["test"]
    corpus = hold_out(documents, load_tokenizer(str(model)), 64, 3000)
    settings = [EvalSetting("dense"), EvalSetting("predicted", 0.1, 0.25)]
    scored = evaluate(load_model(str(model)), Bundle.from_pretrained(output / "bundle"), corpus, settings)
    return [math.exp(result.nats.sum() / corpus.tokens) for result in scored]


@pytest.mark.long
def test_killed_in_every_phase(tiny_opt, text_file, tmp_path, finished):
    """SIGKILL in the midst of collecting, of two trainings and of calibrating. The same command goes on each time, and
    ends with the perplexity of a run that nothing disturbed."""
    output, log = tmp_path / "run", tmp_path / "log"
    argv = flags(tiny_opt, text_file, output)
    for reached in (collecting, training("layer_00/mlp"), training("layer_01/heads"), calibrating):
        assert kill_when(reached, argv, output, log) == -signal.SIGKILL
        if not (output / "predictors/layer_01/heads/predictor.json").exists():
            begun = (output / "predictors/layer_01/heads", output / "bundle")
            for folder in begun:  # as a kill leaves them that comes while the file is written
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ".tmp-killed00-predictor.safetensors").write_bytes(b"half")
    process = start_main(argv, log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert not list(output.rglob(".tmp-*.h5")) and not list(output.rglob(".tmp-*.safetensors"))
    same_quality(output, finished)
    (dense, ours), (_, theirs) = perplexities(tiny_opt, output, text_file), perplexities(tiny_opt, finished, text_file)
    assert abs(ours - theirs) < 0.1 * (theirs - dense), (dense, ours, theirs)


def test_two_invocations_share_a_folder(tiny_opt, text_file, tmp_path, finished):
    output = tmp_path / "run"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    processes = [start_main(flags(tiny_opt, text_file, output, f"--layers={layer}"), logs[layer]) for layer in (0, 1)]
    for process, log in zip(processes, logs, strict=True):
        process.join()
        assert process.exitcode == 0, log.read_text()
    texts = [log.read_text() for log in logs]
    assert sum("tokens x 2 layers" in text for text in texts) == 1  # one of them collected
    assert all(f"layer {1 - layer} mlp: " not in text for layer, text in enumerate(texts))
    same_quality(output, finished)


OWN_PREDICTOR = """
from torch import nn


class Own(nn.Sequential):
    def __init__(self, d_in, n_out, hidden):
        super().__init__(nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, n_out))
"""


@pytest.mark.long
def test_two_processes_train_to_the_same_quality(tiny_opt, text_file, tmp_path, finished):
    """The real command, with DDP over two CPU processes for one predictor, and for one of a class of your own."""
    (tmp_path / "own_parts.py").write_text(OWN_PREDICTOR)
    output = tmp_path / "run"
    shutil.copytree(activations(tiny_opt, text_file), output / "activations")
    argv = flags(
        tiny_opt, text_file, output, "--layers=1", "--trainer.devices=2", "--trainer.strategy=ddp", "--heads.steps=8",
        "--heads.validations=1", "--heads.predictor.class_path=own_parts.Own", "--heads.predictor.init_args.hidden=8",
    )  # fmt: skip
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "train.py", *argv],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "still open" in done.stdout
    name = "predictors/layer_01/mlp/predictor.json"
    ours, theirs = (json.loads((folder / name).read_text())["metrics"] for folder in (output, finished))
    assert abs(ours["retained_mass"] - theirs["retained_mass"]) < 0.003
    assert ours["steps"] == theirs["steps"]
    own = json.loads((output / "predictors/layer_01/heads/predictor.json").read_text())
    assert own["kind"] == "custom" and own["metrics"]["steps"] == 8
