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
    words = ["--rehearse", "--layers", "1", "2", "--out", str(out), "--cells", *cells]
    monkeypatch.setattr(sys, "argv", ["", *words])
    codes, said = processes(tmp_path, lambda _: tensor_parallel.main() and None)
    assert codes == [0, 0], said
    rows = list(csv.DictReader(out.open()))
    assert [row["engine"] for row in rows] == ["dense", "sparse"]
    assert all(row["gpus"] == "2" and row["sums"] == "gloo" and float(row["gb_per_rank"]) > 0 for row in rows)
    assert all("reckoned from 1 and 2 layers" in row["note"] for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sums", ["fastest", "nccl", "pushed"])
def test_gpus_write_what_one_writes(sums):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tests/ranks_check.py", sums]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    assert done.returncode == 0 and b"FAIL" not in done.stdout, done.stdout + done.stderr
