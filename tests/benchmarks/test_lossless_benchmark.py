"""The benchmarks of lossless decoding on sizes that take seconds, in plain torch."""

import csv
import random
import sys

from benchmarks import lossless_gpu, lossless_picture


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
    picture = tmp_path / "picture.png"
    run(monkeypatch, tmp_path / "rows.csv", "picture", "--picture", str(picture))
    assert picture.stat().st_size > 1000


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
