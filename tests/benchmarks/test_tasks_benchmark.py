"""Rows of downstream tasks have their conditions."""

import csv

import pytest
from task_files import write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from benchmarks import tasks as benchmark
from dejavu_train.ground.errors import exit_on_user_error


def test_rows_of_tasks_have_their_conditions(tiny_opt, bundle_folder, tmp_path, monkeypatch):
    write_task_files(tmp_path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    flags = [f"--model={tiny_opt}", f"--bundle={bundle_folder}", f"--folder={tmp_path}", "--tasks=[cb, copa]"]
    flags += ["--shots=[0]", "--limit=3", "--device=cpu", "--text=[]"]
    assert exit_on_user_error(benchmark.main, flags) == 0
    rows = list(csv.DictReader((tmp_path / "results/tasks.csv").open()))
    assert [row["task"] for row in rows] == ["cb", "copa", "mean"] and rows[0]["asked_mlp_density"] == "0.3"
