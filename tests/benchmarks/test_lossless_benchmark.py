"""The benchmarks of lossless decoding on sizes that take seconds, in plain torch, and what is made of their rows."""

import csv
import random
import sys
from pathlib import Path

import pytest

from benchmarks import lossless_gpu, lossless_picture
from benchmarks.rows import append_row
from benchmarks.tables_lossless import CPU, GPU, forced_cpu_table


def run(monkeypatch, out, *words):
    monkeypatch.setattr(sys, "argv", ["lossless_gpu", *words, "--device", "cpu", "--out", str(out)])
    assert lossless_gpu.main() == 0
    with out.open() as file:
        return list(csv.DictReader(file))


def test_forced_acceptance_is_what_was_asked_for(monkeypatch, tmp_path):
    ways = ["sparse, 4 bits", "prompt lookup"]
    words = ["forced", "--shape", "tiny", "--new", "12", "--prompt", "16", "--acceptance", "1.0", "--ways", *ways]
    rows = run(monkeypatch, tmp_path / "rows.csv", *words)
    forced = [row for row in rows if row["what"] == "forced"]
    assert [row["way"] for row in forced] == ways
    assert {row["acceptance"] for row in forced if float(row["mean_length"])} == {"1"}
    assert len([row for row in rows if row["what"] == "cycle"]) == 2 * 8
    (line,) = lossless_picture.lines_of(rows, [])
    assert line.name == "TINY fp16, GPU" and sorted(line.cycles) == list(range(8))
    drafted = sum(row["way"] == ways[0] and float(row["mean_length"]) > 0 for row in forced)  # lengths follow the clock
    assert [a for a, _ in line.points] == pytest.approx([1.0] * drafted)


def test_the_acceptance_of_a_token_is_found_from_whole_drafts():
    coin = random.Random(0)
    for a in (0.6, 0.9):
        counts = []
        for _ in range(20000):
            n = 0
            while n < 5 and coin.random() < a:
                n += 1
            counts.append(n)
        assert abs(lossless_picture.by_token(sum(counts) / len(counts), 5) - a) < 0.01


def test_rows_of_a_cpu_are_shown_where_their_coins_fell(tmp_path):
    shared = dict.fromkeys(lossless_picture.read_csv(Path(CPU))[0], "") | {"cpu": "A", "threads": "2"}
    shared |= {"model": "1.3b", "way": "sparse, 8 bits", "sources": ""}
    forced = {"what": "forced", "forced": "0.9", "acceptance": "0.855", "mean_length": "1.71"}
    for ratio in ("1.5", "1.7"):
        append_row(tmp_path / CPU, shared | forced | {"ratio": ratio})
    append_row(tmp_path / CPU, shared | {"what": "cycles", "note": "dense steps of a cycle by length: 0=1.00 4=3.00"})
    speed = {
        "what": "speed",
        "text": "all",
        "decoding": "greedy",
        "model": "mini",
        "acceptance": "1",
        "mean_length": "2",
    }
    append_row(tmp_path / CPU, shared | speed | {"ratio": "1.2"})
    assert "| 1.3B, fp32 | sparse, 8 bits | 1 | 0.5 | 1.7 |" in forced_cpu_table(tmp_path)
    rows = lossless_picture.read_csv(tmp_path / CPU)
    (line,) = lossless_picture.lines_of([], rows)
    assert line.cycles == {0: 1.0, 4: 3.0} and line.points == [(pytest.approx(0.9), 1.7)]
    assert lossless_picture.measured([], rows) == {"mini's texts, CPU": [(pytest.approx(1.0), 1.2)]}
    assert not (tmp_path / GPU).exists()
    lossless_picture.draw(tmp_path, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
