"""The server's benchmarks: who is compared with whom, and what their tables show."""

import argparse
import contextlib
import csv
import json
import time

import pytest

from benchmarks import serve_speed
from benchmarks.cpu_decode import our_rival, run_in_turns
from benchmarks.random_folder import write
from benchmarks.rows import append_json, append_row
from benchmarks.serve_host import Clock
from benchmarks.tables_cpu import EXTRA, GENERATE, pipeline_table
from benchmarks.tables_serve import LOAD, SPEED, load_table, speed_table
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.rows import Rows
from dejavu_train.families import ModelDims
from dejavu_train.sparse.model import SparseOPTForCausalLM


def compared(monkeypatch, engine_rates):
    """Rows of contestants with known rates. The first turn, whose rates are others, must not count."""
    turns, asked = iter([[1.0, 1.0], *engine_rates]), []

    async def ask(url, model, rows, new, more):
        asked.append((url, more))
        return 1.0 if len(asked) < 3 else {"ours": 90.0, "theirs": 10.0}[url]

    @contextlib.contextmanager
    def process(found):
        yield found

    monkeypatch.setattr(serve_speed, "tokens_per_second", ask)
    monkeypatch.setattr(serve_speed, "serving", lambda command: process("ours"))
    monkeypatch.setattr(serve_speed, "engine_alone", lambda options: process((lambda: next(turns), 2)))
    monkeypatch.setattr(serve_speed, "transformers_serve", lambda *_: process("theirs"))
    options = argparse.Namespace(model="m", bundle="b", device="cpu", rows=8, new=16, turns=3, rival=True)
    options.rival_options = []
    rows = serve_speed.compare(options)
    assert asked[:2] == [("ours", {"min_tokens": 16}), ("theirs", {})]
    return {row["contestant"]: row for row in rows}


def test_a_server_is_compared_with_its_engine_by_medians(monkeypatch, capsys):
    rows = compared(monkeypatch, [[100.0, 110.0], [50.0, 55.0], [100.0, 110.0]])
    assert rows["server"]["ratio"] == pytest.approx(0.9) and rows["engine"]["tokens_per_second"] == 100
    assert rows["transformers serve"]["ratio"] == pytest.approx(0.1) and rows["engine, steps"]["turns"] == 3
    assert rows["engine"]["p20"] == pytest.approx(70) and rows["engine"]["threads"] == 2
    assert "not quiet" not in capsys.readouterr().err


def test_an_engine_whose_steps_alone_are_far_faster_is_told(monkeypatch, capsys):
    compared(monkeypatch, [[25.0, 100.0]] * 3)
    assert "steps alone are 4.00 times as fast as texts: the cores were not quiet" in capsys.readouterr().err


def test_the_tables_show_the_newest_rows(tmp_path, capsys):
    shared = {"date": "2030-01-01", "commit": "abc", "device": "A CPU", "model": "m", "rows": 8, "p20": 1, "p80": 2}
    shared |= {"versions": "torch 9", "sources": ""}
    found = [("server", 70, 0.7), ("server", 90, 0.9), ("engine", 100, 1), ("transformers serve", 10, 0.1)]
    (tmp_path / SPEED).parent.mkdir(parents=True)
    with (tmp_path / SPEED).open("w", newline="") as file:
        writer = csv.DictWriter(file, [*shared, "contestant", "tokens_per_second", "ratio"])
        writer.writeheader()
        for name, rate, ratio in found:
            writer.writerow(shared | {"contestant": name, "tokens_per_second": rate, "ratio": ratio})
    assert "| A CPU, m | 8 | 90 (1 to 2) | 100 (1 to 2) | | 10 (1 to 2) | 0.9 | 0.1 |" in speed_table(tmp_path)
    row = {"model": "x/m", "device": "cpu", "clients": 64, "seconds": 600.0, "text": 5, "lost: APIError": 2}
    row |= {name: 1.5 for name in ("first_p50", "first_p99", "whole_p50", "whole_p99")}
    for commit in ("old", "new"):
        append_json(tmp_path / LOAD, row | {"commit": commit, "date": "2030-01-01"})
    assert json.loads(capsys.readouterr().out.splitlines()[0])["commit"] == "old"
    assert "| cpu, m | 64 | 600 | 5 | 0 | 0 | 0 | 0 | 2 | 1.5 | 1.5 | 1.5 | 1.5 |" in load_table(tmp_path)
    assert "Commits: new of" in load_table(tmp_path)


def test_the_pipelines_table_has_the_newest_row_of_a_device(tmp_path, capsys):
    shared = {"date": "2030-01-01", "commit": "abc", "cpu": "A CPU", "model": "m", "what": "pipeline", "sources": ""}
    for case, value in (("sparse", 9), ("transformers dense", 4), ("sparse", 1), ("sparse over dense", 3.9)):
        append_row(tmp_path / EXTRA, shared | {"case": case, "value": value})
    row = {"date": "2030-01-02", "commit": "def", "gpu": "A GPU", "shape": "1.3b", "pipeline_ms": 0.5}
    append_json(tmp_path / GENERATE, row | {"pipeline_dense_ms": 10, "pipeline_over_dense": 20})
    append_json(tmp_path / GENERATE, {"gpu": "A GPU", "shape": "6.7b"})  # an older row, without pipelines
    table = pipeline_table(tmp_path)
    assert "| A CPU, m | 4 | 1 | 3.9 |" in table and "| A GPU, 1.3B | 10 | 0.5 | 20 |" in table
    assert "6.7B" not in table and "def of 2030-01-02" in table and capsys.readouterr().out


def test_the_engine_that_computes_nothing_takes_its_time():
    clock = Clock(2, 64, 100, step_ms=1.0, join_ms=2.0)
    rows, begun, texts = Rows(clock, ()), time.perf_counter(), {0: [], 1: []}
    for length in (3, 5):
        rows.join(Row([2] * length, length + 20, Sampling(), length, length))
    while rows.taken:
        for news in rows.step(8):
            texts[news.row] += news.tokens
    assert time.perf_counter() - begun >= 0.023, "two prompts and 19 steps"
    assert texts == {b: clock.state.tokens[b, length : length + 20].tolist() for b, length in enumerate((3, 5))}


def test_a_folder_of_random_weights_selects_what_was_asked(tmp_path):
    """What a server on a GPU is timed with. Here a small shape, on the CPU engine."""
    shape = ModelDims(64, 1024, 2, 4, 8192, 64)
    write("opt", shape, tmp_path / "m", (0.2, 0.5), 16)
    model = SparseOPTForCausalLM.from_pretrained(tmp_path / "m", backend="cpu", sparse_from="prompt")
    rival = our_rival("sparse", model.engine_pool().engine(1, 64), [[2, 3, 4]], 40)
    run_in_turns([rival], 1, 30)
    assert sum(rival.mlp) / len(rival.mlp) == pytest.approx(0.2, abs=0.08)
    assert model.bundle.mean_density("mlp") == 0.2 and model.bundle.mean_density("heads") == 0.5
