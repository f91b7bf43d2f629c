"""One model all the way: its processes, what they wait for, and how its rows become a table."""

import argparse
import csv
import json

import numpy as np
import pytest

from benchmarks.one_model import Job, Run, measurements
from benchmarks.one_model_rows import gather
from benchmarks.table_specs import ONE_MODEL, TABLES


@pytest.fixture
def run(tmp_path):
    return Run(argparse.Namespace(
        scale="1.3b", device="cpu", gpus=4, data=str(tmp_path), texts=str(tmp_path), work=str(tmp_path / "work"),
        out=str(tmp_path / "out"), only="", set=[], train="", quantize="",
    ))  # fmt: skip


def test_measurements_wait_for_what_they_need_and_failures_leave_others_alone(run, tmp_path, monkeypatch):
    jobs = measurements(run)
    assert jobs[0].name == "texts-0" and jobs[-1].name == "tasks-int4-0.1-0.85", "tasks are what may be missing"
    assert len({job.name for job in jobs}) == len(jobs) == 20
    assert "--tokens=30000" in jobs[0].command
    there, taken = tmp_path / "there", []
    there.touch()
    jobs = [Job("a", [], (there,)), Job("b", [], (tmp_path / "missing",)), Job("c", [])]
    monkeypatch.setattr("benchmarks.one_model.measurements", lambda _: jobs)
    monkeypatch.setattr("benchmarks.one_model.gather", lambda *_: None)
    monkeypatch.setattr(run, "step", lambda name, *_: taken.append(name) or 1)
    run.options.only = "c,b"
    run.measure()
    assert taken == ["c"]
    run.options.only = ""
    run.measure()
    assert sorted(taken) == ["a", "c", "c"] and not run.done(jobs[0]).exists()


def _write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_rows_of_all_processes_become_one_table(tmp_path):
    rows, model = tmp_path / "rows", tmp_path / "model"
    (rows / "speed-int4-0.2-1").mkdir(parents=True)
    model.mkdir()
    held = {"general.jsonl": {"bits_per_byte": 1.25, "density": [0.1, 0.3]}}
    told = {"device": "H100", "torch": "2.11", "steps": 7, "seconds": 540.0, "tokens": 70_000_000, "processes": 4}
    (model / "pretraining.json").write_text(json.dumps(told | {"stream_tokens": 35_000_000, "heldout": held}))
    same = {"text": "docs", "tokens": 9, "error": 0.1, "block_bytes": 0.2, "versions": "torch 2.11"}
    drafted = {"weights": "gptq", "asked_mlp_density": 0.2, "asked_head_density": 1}
    dense = {"weights": "fp16", "asked_mlp_density": 1, "asked_head_density": 1}
    _write(rows / "texts-0.csv", [same | dense | {"perplexity": 10.0, "increase": 0.0},
                                  same | drafted | {"perplexity": 12.0, "increase": np.log(1.2)}])  # fmt: skip
    task = {"task": "copa", "metric": "acc", "examples": 4, "value": 0.75, "dense": 0.5, "flips": 0.25}
    (rows / "tasks-int4-0.2-1").mkdir()
    _write(rows / "tasks-int4-0.2-1" / "tasks.csv", [task | {"device": "H100", "torch": "2.11"}])
    timing = {"backend": "triton", "asked_mlp_density": 0.2, "asked_head_density": 1, "prompt": 128,
              "ms_per_token": {"p50": 0.4321}, "new_tokens": 64, "device": "H100"}  # fmt: skip
    results = {"timing": [timing], "versions": {"torch": "2.11"}}
    (rows / "speed-int4-0.2-1" / "results.json").write_text(json.dumps(results))
    lossless = {"what": "speed", "text": "all", "weights": "int4", "way": "sparse", "decoding": "greedy", "tokens": 5,
                "ratio": 1.25, "acceptance": 0.9, "gpu": "H100", "torch": "2.11"}  # fmt: skip
    rivals = [{"way": "prompt lookup", "ratio": 2.0}, {"way": "sparse, and copies", "ratio": 1.2}]
    _write(rows / "lossless-int4.csv", [lossless, *(lossless | rival for rival in rivals)])
    (rows / "times.csv").write_text("1.3b,pretrain,0,1,600\n")
    gather("1.3b", model, rows)
    (tmp_path / ONE_MODEL).parent.mkdir(parents=True)
    (rows / "rows.csv").rename(tmp_path / ONE_MODEL)
    line = next(line for line in TABLES["one-model"].make(tmp_path).splitlines() if line.startswith("| 4 bits"))
    assert line == "| 4 bits | 20 % | 1 | 12 | +20.0 | 75.0 | 25.0 | 0.432 | 1.25, 90 % |"
    opening = TABLES["one-model-opening"].make(tmp_path).splitlines()
    assert opening[2] == "| 4 bits | 20 % | 12 | 0.432 |"
