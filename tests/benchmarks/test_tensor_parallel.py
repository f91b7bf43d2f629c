"""The script of several GPUs, rehearsed by two processes on a CPU. With two GPUs it compares them with one."""

import argparse
import csv
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY
from rank_helpers import processes

from benchmarks import rivals, tensor_parallel


def test_a_rehearsal_writes_rows(tmp_path, monkeypatch):
    cells = ["engine=dense prompt=16", "engine=sparse weights=int4 predictors=int4 site=1 prompt=16"]
    out = tmp_path / "rows.csv"
    words = ["--rehearse", "--layers", "1", "2", "--cycles", "--prompt", "16", "--out", str(out), "--cells", *cells]
    monkeypatch.setattr(sys, "argv", ["", *words])
    monkeypatch.setattr(tensor_parallel, "CYCLES", 2)
    monkeypatch.setattr(tensor_parallel, "LENGTHS", (0, 3))
    codes, said = processes(tmp_path, lambda _: tensor_parallel.main() and None)
    assert codes == [0, 0], said
    rows = list(csv.DictReader(out.open()))
    rows, cycles = rows[:2], rows[2:]
    assert [row["engine"] for row in rows] == ["dense", "sparse"]
    ways = [f"draft_length={length} draft_weights={way}" for way in (None, "int4") for length in (0, 3)]
    assert [row["options"] for row in cycles] == ways and all(float(row["slowest_ms"]) > 0 for row in cycles)
    assert all(row["gpus"] == "2" and row["sums"] == "gloo" and float(row["gb_per_rank"]) > 0 for row in rows)
    assert all("reckoned from 1 and 2 layers" in row["note"] for row in rows)


def test_a_goal_moves_with_the_read_of_the_card():
    cell = tensor_parallel.Cell(engine="dense")
    row = {"gb_per_rank": 83.0, "slowest_ms": 30.0}
    made = tensor_parallel.with_floor(row, cell, "175b", 4, 4.5)
    assert made["goal_here_ms"] == pytest.approx(made["goal_ms"]) and made["goal_ms"] == 23.5
    slower = tensor_parallel.with_floor(row, cell, "175b", 4, 3.0)
    assert slower["goal_here_ms"] == pytest.approx(23.5 + 83 / 3 - 83 / 4.5)
    assert "goal_ms" not in tensor_parallel.with_floor({"gb_per_rank": 1.0, "slowest_ms": 1.0}, cell, "175b", 2, 3.0)


@pytest.fixture
def alone():
    args = argparse.Namespace(layers=[2, 6], prompt=8, steps=2, rival_seconds=5.0, rehearse=True)
    return lambda name, rival: tensor_parallel.rival_row(args, name, rival, 2)


def test_a_rival_is_reckoned_up_by_its_faster_way(alone, monkeypatch):
    asked = []

    def times(rival, name, layers, *_):
        asked.append(layers)
        return {"as it is": [1.0 + layers] * 3, "compiled": [9.0 + layers / 2] * 3}

    monkeypatch.setattr(tensor_parallel, "times_apart", times)
    row = alone("30b", "hf-device-map")
    assert asked == [2, 4], "as many layers on each of two GPUs"
    assert row["p50_ms"] == row["slowest_ms"] == pytest.approx(9 + 24) and row["layers"] == 4
    assert "as it is 49 ms" in row["note"] and "compiled 33 ms, reckoned from 2 and 4 layers" in row["note"]
    assert alone("afm-4.5b", "hf-tp-plan")["p50_ms"] == pytest.approx(9 + 18) and asked[2:] == [2, 6]


def test_a_rival_that_fails_is_a_row_with_its_message(alone, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "times_apart", lambda *_: {"as it is": [1.0] * 3, "compiled": "E: no"})
    assert "compiled: E: no" in alone("30b", "hf-device-map")["note"]
    monkeypatch.setattr(tensor_parallel, "times_apart", lambda *_: {"as it is": "A", "compiled": "B"})
    row = alone("30b", "hf-device-map")
    assert "p50_ms" not in row and row["note"].endswith("generate() as it is: A; compiled: B")


def test_the_first_error_of_a_rival_is_its_reason():
    said = "warning: slow\n[rank1]: ValueError: no such plan\nmore\ntorch.X.ChildFailedError: \n====\n"
    assert rivals.reason(said) == "ValueError: no such plan"
    assert rivals.reason("Killed\n") == "Killed" and rivals.reason("") == "nothing was said"


def test_a_device_map_writes_its_times(tmp_path, monkeypatch):
    words = "rivals hf-device-map tiny FOLDER --gpus 2 --layers 2 --prompt 4 --steps 2 --cpu"
    monkeypatch.setattr(sys, "argv", words.replace("FOLDER", str(tmp_path)).split())
    assert rivals.main() == 0
    found = json.loads((tmp_path / rivals.FOUND).read_text())
    assert found.keys() == rivals.WAYS.keys() and all(len(times) == 2 for times in found.values())


@pytest.mark.long
def test_a_plan_runs_in_processes_of_its_own_and_ends_in_time():
    found = rivals.times_apart("hf-tp-plan", "afm-tiny", 1, 2, 4, 2, 200, True)
    assert all(len(times) == 2 for times in found.values()), found
    late = rivals.times_apart("hf-tp-plan", "afm-tiny", 1, 2, 4, 2, 0.1, True)
    assert set(late.values()) == {"not within 0 s"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sums", ["fastest", "nccl", "pushed"])
def test_gpus_write_what_one_writes(sums):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["benchmarks.tensor_parallel", "--check", "--sums", sums]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0 and b"FAIL" not in done.stdout, done.stdout + done.stderr
