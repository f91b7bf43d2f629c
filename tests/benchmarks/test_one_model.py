"""One model all the way: its processes, and how what they found becomes a table."""

import argparse
import json

import pytest

from benchmarks.one_model import Job, Run, measurements
from benchmarks.table_specs import ONE_MODEL, TABLES


@pytest.fixture
def run(tmp_path):
    return Run(argparse.Namespace(
        scale="1.3b", device="cpu", gpus=2, data=str(tmp_path), texts=str(tmp_path), work=str(tmp_path / "work"),
        out=str(tmp_path / "out"), only="", set=["rows=64"], train="", quantize="", evidence="--parts=[speed]",
    ))  # fmt: skip


def test_a_measurement_that_failed_is_tried_again_and_leaves_others_alone(run, monkeypatch):
    jobs = measurements(run)
    assert [job.name for job in jobs] == ["evidence", "real-rows-fp16", "real-rows-int4"]
    assert "--tokens=30000" in jobs[0].command and jobs[0].command[-1] == "--parts=[speed]" and run.scale.rows == 64
    taken = []
    monkeypatch.setattr("benchmarks.one_model.measurements", lambda _: [Job("a", []), Job("b", []), Job("c", [])])
    monkeypatch.setattr(run, "step", lambda name, *_: taken.append(name) or name == "b")
    run.measure()
    run.options.only = "c,b"
    run.measure()
    assert sorted(taken) == ["a", "b", "b", "c"]


def test_processes_get_the_gpus_that_this_one_sees(run, monkeypatch):
    given = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr("subprocess.run", lambda _, env, **__: given.append(env) or argparse.Namespace(returncode=0))
    seen = Run(argparse.Namespace(**{**vars(run.options), "device": "cuda"}))
    seen.step("a", [], [1])
    assert given[0]["CUDA_VISIBLE_DEVICES"] == "7"


def test_results_of_evidence_become_a_table(tmp_path):
    timed = {"transformers": 9.0, "dense": 2.0, "exact skip": 1.5, "4 bits": 0.8, "sparse": 1.0, "sparse, 4 bits": 0.5}
    speed = [{"variant": name, "rows": 1, "prompt": 128, "ms": ms} for name, ms in timed.items()]
    speed += [speed[1] | {"rows": 2, "ms": 3.0}, speed[4] | {"prompt": 512, "ms": 1.1}]
    same = {"kl_mean": 0.01, "top1": 0.9, "megabytes": 10.0}
    quality = [same | {"variant": "sparse", "text": "a", "perplexity": 10.0, "increase": 0.0},
               same | {"variant": "sparse", "text": "b", "perplexity": 40.0, "increase": 0.5625}]  # fmt: skip
    tasks = [{"task": "copa", "metric": "acc", "value": 0.75, "dense": 0.5}]
    evidence = {"rows": {"speed": speed, "quality": quality, "tasks": tasks}, "versions": {"torch": "2.11"},
                "machine": {"name": "H100"}}  # fmt: skip
    (tmp_path / ONE_MODEL).parent.mkdir(parents=True)
    (tmp_path / ONE_MODEL).write_text(json.dumps({"sources": "", "evidence": evidence}))
    lines = TABLES["one-model"].make(tmp_path).splitlines()
    assert (
        next(line for line in lines if "| sparse |" in line)
        == "| sparse | 20 | +25.0 | +56.2 | 0.01 | 90.0 | 75.0 | 10 | 1 |"
    )
    assert next(line for line in lines if "| dense |" in line) == "| dense | | | | | | 50.0 | | 2 |"
    assert TABLES["one-model-verdict"](tmp_path) == (
        "The fastest row is sparse, 4 bits. Exact skip and 4 bits need no training. In fp16 a sparse step is 1.50 times"
        " as fast as exact skip. In 4 bits it is 1.60 times as fast as one without predictors.\n"
    )
