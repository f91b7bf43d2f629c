"""``--jobs``: workers make what one process makes, and what a dead worker leaves is trained all the same."""

import os
import signal
import time
from functools import partial

import pytest
from safetensors.torch import load_file
from small_runs import flags, start_main
from torch.testing import assert_close

from dejavu_train.data.collect import collect
from dejavu_train.ground.errors import UserError
from dejavu_train.run import crew
from dejavu_train.run.command import main, parse_config
from dejavu_train.run.folder import saved_config


@pytest.fixture(scope="module")
def alone(tiny_opt, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "run"
    main(flags(tiny_opt, text_file, output))
    return output


def same_predictors(one, two):
    paths = sorted(path.relative_to(one) for path in (one / "predictors").rglob("predictor.safetensors"))
    assert len(paths) == 4
    for path in paths:
        assert (one / path).read_bytes() == (two / path).read_bytes(), path
    assert_close(
        load_file(one / "bundle" / "predictors.safetensors"), load_file(two / "bundle" / "predictors.safetensors")
    )


@pytest.mark.long
def test_workers_make_what_one_process_makes(alone, tiny_opt, text_file, tmp_path, caplog):
    output = tmp_path / "run"
    main(flags(tiny_opt, text_file, output, "--jobs=2"))
    same_predictors(alone, output)
    logs = "".join(path.read_text() for path in sorted((output / "workers").iterdir()))
    assert logs.count(" steps in ") == 4  # each predictor by one worker
    assert "training 4 predictors in 2 processes" in caplog.text
    assert "jobs" not in saved_config(output).read_text()


@pytest.mark.long
def test_what_a_killed_worker_leaves_is_trained(alone, tiny_opt, text_file, tmp_path):
    output, log = tmp_path / "run", tmp_path / "log.txt"
    process = start_main(flags(tiny_opt, text_file, output, "--jobs=2"), log)
    deadline, killed = time.monotonic() + 120, None
    while killed is None:
        assert time.monotonic() < deadline and process.is_alive(), log.read_text()
        killed = next(
            (number for number in _children(process.pid) if b"dejavu_train.run.worker" in _command(number)), None
        )
        time.sleep(0.05)
    os.kill(killed, signal.SIGKILL)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert "ended early (-9)" in log.read_text()
    same_predictors(alone, output)


def _children(parent):
    return [int(number) for number in open(f"/proc/{parent}/task/{parent}/children").read().split()]


def _command(number):
    with open(f"/proc/{number}/cmdline", "rb") as file:
        return file.read()


@pytest.mark.parametrize("arguments, said", [
    (["--jobs=0"], "must be auto or a number from 1 to 1024, got 0"),
    (["--jobs=two"], "got two"),
    (["--jobs=2", "--trainer.devices=4"], "one device, got trainer.devices 4; leave out one of the two"),
])  # fmt: skip
def test_mistakes(tiny_opt, text_file, tmp_path, arguments, said):
    with pytest.raises(UserError, match=said):
        main(flags(tiny_opt, text_file, tmp_path / "run", *arguments))


def test_a_run_goes_on_with_jobs(alone):
    """--jobs decides nothing of what is made, so a run's folder is still enough."""
    main([f"--output={alone}", "--jobs=2"])
    assert parse_config([f"--output={alone}", "--jobs=2"]).jobs in (2, "2")


def collected(activations):
    files = [path for path in activations.rglob("*") if path.suffix in (".h5", ".safetensors", ".json")]
    return {path.relative_to(activations): path.read_bytes() for path in files}


@pytest.mark.long
def test_workers_collect_by_layers_and_what_one_leaves_is_collected(tiny_opt, text_file, tmp_path, caplog, monkeypatch):
    config = parse_config(flags(tiny_opt, text_file, tmp_path / "run", "--jobs=2", "--collect.by_layers=true"))
    about, activations, task = (str(tiny_opt), config.text, config.collect), tmp_path / "run" / "activations", crew.Task
    collect(*about, tmp_path / "alone")

    def astray(name, number, count, arguments, log):
        return task(name, number, count, (arguments[0], "nowhere", *arguments[2:]) if number else arguments, log)

    monkeypatch.setattr(crew, "Task", astray)
    caplog.set_level("INFO")
    collect(*about, activations, share=partial(crew.collect_together, config, activations))
    assert collected(activations) == collected(tmp_path / "alone")
    assert {path.name for path in activations.iterdir()} == {path.name for path in (tmp_path / "alone").iterdir()}
    assert "collecting in 2 processes" in caplog.text and "worker 1 ended early (2)" in caplog.text
    assert "worker 0" not in caplog.text


@pytest.mark.long
def test_workers_calibrate_by_layers_what_one_process_calibrates(tiny_opt, text_file, tmp_path, caplog):
    few = ["--mlp.steps=4", "--heads.steps=4", "--mlp.validations=1", "--heads.validations=1"]
    few += ["--collect.by_layers=true", "--calibrate.sensitivity_tokens=300", "--calibrate.head_loss_tokens=300"]
    caplog.set_level("INFO")
    for jobs in ("1", "2"):
        main(flags(tiny_opt, text_file, tmp_path / jobs, f"--jobs={jobs}", *few))
    assert caplog.text.count("calibrating in 2 processes") == 3 and "ended early" not in caplog.text
    one, two = ((tmp_path / jobs / "bundle" / "predictors.safetensors").read_bytes() for jobs in ("1", "2"))
    assert one == two
    assert not list(tmp_path.glob("*/calibration-states"))
