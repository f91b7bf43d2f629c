"""Workers on this host and by Ray: one protocol. Whole runs by them make the bundle of one process."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from small_runs import flags

from dejavu_train.ground.errors import UserError
from dejavu_train.run import crew
from dejavu_train.run import workers as schedulers
from dejavu_train.run.command import main, parse_config
from dejavu_train.run.crew import RETRIES, last_line, run_tasks
from dejavu_train.run.task import Task
from dejavu_train.run.workers import opened

BOTH = pytest.mark.parametrize("name", ["local", pytest.param("ray", marks=pytest.mark.long)])
TESTS = str(Path(__file__).parent)


@pytest.fixture
def scheduler(name, monkeypatch):
    """Opened, with a module of tests within reach of its workers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(crew, "LOOK_SECONDS", 0.05)
    config = dataclasses.replace(parse_config([]), scheduler=name)
    with opened(config) as found:
        yield found


def task(folder, name, *ends):
    """A worker that ends as ``ends`` say, one start after the other."""
    return Task(name, 0, 2, ("brief_worker", str(folder / f"{name}.starts"), *ends), folder / f"{name}.log")


@BOTH
def test_workers_that_die_are_started_again(name, scheduler, tmp_path, caplog):
    tasks = [
        task(tmp_path, "good", "0"),
        task(tmp_path, "killed", "kill", "parent" if name != "local" else "kill", "0"),
    ]
    looks = []
    assert run_tasks(scheduler, tasks, lambda: looks.append(1)) == []
    starts = {each.name: (tmp_path / f"{each.name}.starts").read_text().splitlines() for each in tasks}
    assert {name: len(lines) for name, lines in starts.items()} == {"good": 1, "killed": 3}
    assert set(starts["good"] + starts["killed"]) == {os.getcwd()}  # relative paths begin where train.py was called
    assert last_line(tasks[1]) == "start 2 ends by 0" and looks
    assert (
        caplog.text.count("worker killed ended early") == 2
        and "it is started again: start 0 ends by kill" in caplog.text
    )


@pytest.mark.parametrize("kind, gpus", [("cpu", ("", "")), ("cuda", ("3", "5"))])
def test_workers_of_a_host_share_its_threads(kind, gpus, tmp_path, monkeypatch):
    """On GPUs too, where each would start as many threads as there are cores."""
    monkeypatch.setattr(schedulers, "start_device", lambda trainer: torch.device(kind))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(schedulers, "start_task", lambda task, environment: environment)
    tasks = [Task(str(number), number, 2, (), tmp_path / "log") for number in range(2)]
    for child, gpu in zip(schedulers.Local(parse_config([])).start(tasks), gpus, strict=True):
        assert child._process["OMP_NUM_THREADS"] == "4"
        assert child._process["CUDA_VISIBLE_DEVICES"] == (gpu or "3,5")


@pytest.mark.parametrize("name", ["local"])
def test_when_a_worker_is_left_alone(name, scheduler, tmp_path, caplog):
    tasks = [task(tmp_path, "mistaken", "2"), task(tmp_path, "broken", "1")]
    assert sorted(each.name for each in run_tasks(scheduler, tasks, lambda: None)) == ["broken", "mistaken"]
    assert len((tmp_path / "mistaken.starts").read_text().splitlines()) == 1  # the same mistake would come again
    assert len((tmp_path / "broken.starts").read_text().splitlines()) == 1 + RETRIES
    assert caplog.text.count("it is left alone") == 2


@pytest.mark.parametrize("arguments, said", [
    (["--resources.num_cpus=5"], "set --scheduler ray as well"),
    (["--scheduler=slurm"], "--scheduler must be"),
])  # fmt: skip
def test_mistakes_of_schedulers(tiny_opt, text_file, tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=said):
        main(flags(tiny_opt, text_file, tmp_path / "run", *arguments))


def test_a_package_that_is_missing(tiny_opt, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("dejavu_train.ground.machine.has_package", lambda name: name != "ray")
    with pytest.raises(UserError, match="--scheduler ray needs the package ray.*'dejavu-train.ray.'"):
        main(flags(tiny_opt, text_file, tmp_path / "run", "--scheduler=ray"))


@pytest.mark.long
def test_a_whole_run_by_two_workers_of_which_one_is_killed(tiny_opt, text_file, tmp_path, caplog):
    alone, output = tmp_path / "alone", tmp_path / "run"
    main(flags(tiny_opt, text_file, alone))
    killed = []

    def kill() -> None:
        while not list(output.glob("predictors/*/*/config.yaml")):  # written when a worker begins with a predictor
            time.sleep(0.01)
        killed.append(next(number for number in _processes() if b"dejavu_train.run.worker\0train" in _command(number)))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    main(flags(tiny_opt, text_file, output, "--scheduler=ray", "--jobs=2"))
    assert killed and "ended early (-9), it is started again" in caplog.text
    paths = [path.relative_to(alone) for path in alone.rglob("predictor*.safetensors")]
    assert len(paths) == 5
    for path in [*paths, Path("bundle/bundle.json")]:
        assert (alone / path).read_bytes() == (output / path).read_bytes(), path


def _processes():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _command(number):
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return b""
