"""benchmarks/tasks.py: rows with conditions, and how far a backend is from `mask`."""

import csv
import dataclasses

import numpy as np
import pytest
from bundles import make_bundle
from conftest import REPOSITORY, make_text
from task_files import write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval.api.instance import Instance

from benchmarks import tasks as benchmark
from benchmarks import told
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.lm_eval.run import TasksConfig


def test_rows_of_tasks_and_of_a_backend_against_mask(tiny_opt, tmp_path, monkeypatch):
    make_bundle(tiny_opt).at(0.4, 0.5).save_pretrained(tmp_path / "bundle")
    write_task_files(tmp_path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(told, "RESULTS", tmp_path / "results")
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
    assert exit_on_user_error(told.main, [*flags, "--dtype=float16"]) == 0
    (row,) = csv.DictReader((tmp_path / "results/told.csv").open())
    assert row["requests"] == "15" and row["apart beyond"] == "0.02" and row["dtype"] == "float16"


def test_requests_count_as_apart_beyond_the_goal_of_the_dtype():
    found = told.Found(own={0: -5.0, 1: -5.0, 2: -5.0}, told={0: -5.0, 1: -5.0, 2: -5.0})
    engine, tokens = [-5.0, -5.02, -5.1], np.array([2, 2, 2])  # 0, 0.01 and 0.05 nats a token
    for dtype, apart in (("float32", 2), ("float16", 1), ("bfloat16", 0)):
        row = told.summary(found, engine, tokens, benchmark.GOALS[dtype])
        assert (row["own: apart"], row["told: apart"]) == (apart, apart)


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


@pytest.mark.parametrize("options", [{}, {"cascade": True}, {"lookahead": True, "means": True}], ids=str)
def test_the_engine_is_mask_where_both_select_the_same(tiny_opt, options):
    """The engine's thresholds are moved: it decides otherwise, and told so `mask` answers the same."""
    bundle = make_bundle(tiny_opt, **options).at(0.4, 0.5)
    moved = {key: dataclasses.replace(spec, threshold=spec.threshold + 0.05) for key, spec in bundle.specs.items()}
    config = TasksConfig(model=str(tiny_opt), device="cpu")
    lm = told.both(config, bundle, dataclasses.replace(bundle, specs=moved))
    words = make_text(300, seed=7).split()
    pairs = [
        (" ".join(words[6 * i : 6 * i + 3 + i % 5]), " " + " ".join(words[6 * i + 3 : 6 * i + 6])) for i in range(40)
    ]
    row = told.compared(lm, [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], 1e-3)
    assert row["requests"] == 40 and min(row["differing heads"], row["differing mlp"]) > 20
    assert row["own: apart"] > 10  # else this test tells nothing
    assert row["told: apart"] == 0 and row["told: most"] < 1e-4
    lm = told.both(config, bundle, bundle)
    row = told.compared(lm, [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs[:5])], 1e-3)
    assert row["differing heads"] + row["differing mlp"] <= 1 and row["own: most"] < 1e-3
