"""benchmarks/tasks.py: rows with conditions, and how far a backend is from `mask`."""

import csv

import pytest
from bundles import make_bundle
from conftest import REPOSITORY
from task_files import write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from benchmarks import tasks as benchmark
from dejavu_train.errors import exit_on_user_error


def test_rows_of_tasks_and_of_a_backend_against_mask(tiny_opt, tmp_path, monkeypatch):
    make_bundle(tiny_opt).at(0.4, 0.5).save_pretrained(tmp_path / "bundle")
    write_task_files(tmp_path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    flags = [f"--model={tiny_opt}", f"--bundle={tmp_path / 'bundle'}", f"--folder={tmp_path}", "--tasks=[cb, copa]"]
    flags += [
        f"--include_path={REPOSITORY / 'configs/tasks'}",
        "--shots=[0]",
        "--limit=3",
        "--device=cpu",
        "--texts=[]",
    ]
    assert exit_on_user_error(benchmark.main, flags) == 0
    assert exit_on_user_error(benchmark.main, ["engine", *flags, "--backend=gather"]) == 0
    rows = list(csv.DictReader((tmp_path / "results/tasks.csv").open()))
    assert [row["task"] for row in rows] == ["cb", "copa", "mean"] and rows[0]["mlp_density"] == "0.4"
    (row,) = csv.DictReader((tmp_path / "results/task_engine.csv").open())
    assert row["requests"] == "15" and float(row["nats_apart_most"]) < 1e-3 and row["requests_apart"] == "0"
    assert row["apart_beyond"] == "0.001"


def test_the_picture_is_of_the_newest_rows_of_one_model(tmp_path, monkeypatch):
    point = {"table": "fig7", "selection": "oracle", "asked_mlp_density": "0.2", "asked_head_density": "0.5"}
    point |= {"total_sparsity": "0.6", "task": "wikitext", "shots": "0", "metric": "perplexity", "dense": "9"}
    values = {"value": "12", "error": "", "model": "mine"}
    rows = [point | values | {"value": "99"}, point | values | {"model": "other", "task": "prose"}, point | values]
    rows += [
        point | values | {"total_sparsity": "0.3", "asked_mlp_density": "0.7"},
        values | point | {"table": "table4"},
    ]
    with (tmp_path / "paper.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = benchmark.newest_trend(tmp_path / "paper.csv")
    assert [(row["value"], row["total_sparsity"], row["error"]) for row in found] == [(12, 0.6, 0), (12, 0.3, 0)]
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    assert exit_on_user_error(benchmark.main, ["picture"]) == 0
    assert (tmp_path / "paper.png").stat().st_size > 10_000 and (tmp_path / "paper.svg").is_file()
