"""The script of several GPUs, rehearsed by two processes on a CPU. With two GPUs it compares them with one."""

import csv
import os
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY
from rank_helpers import processes

from benchmarks import tensor_parallel


def test_a_rehearsal_writes_rows(tmp_path, monkeypatch):
    cells = ["engine=dense prompt=16", "engine=sparse weights=int4 predictors=int4 site=1 prompt=16"]
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["", "--rehearse", "--layers", "1", "2", "--out", str(out), "--cells", *cells])
    codes, said = processes(tmp_path, lambda _: tensor_parallel.main() and None)
    assert codes == [0, 0], said
    rows = list(csv.DictReader(out.open()))
    assert [row["engine"] for row in rows] == ["dense", "sparse"]
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sums", ["fastest", "nccl"])
def test_gpus_write_what_one_writes(sums):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["benchmarks.tensor_parallel", "--check", "--sums", sums]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0 and b"FAIL" not in done.stdout, done.stdout + done.stderr
