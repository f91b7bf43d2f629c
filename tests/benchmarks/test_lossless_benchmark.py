"""The benchmark of lossless decoding on sizes that take seconds, in plain torch."""

import csv
import json
import sys

import pytest
from conftest import make_text

from benchmarks import lossless
from benchmarks.lossless import read_prompts


def test_forced_acceptance_is_what_was_asked_for(monkeypatch, tmp_path):
    ways, out = ["sparse, 4 bits", "prompt lookup"], tmp_path / "rows.csv"
    words = ["forced", "--shape", "tiny", "--new", "12", "--prompt", "16", "--acceptance", "1.0", "--ways", *ways]
    monkeypatch.setattr(sys, "argv", ["lossless", *words, "--out", str(out)])
    assert lossless.main() == 0
    rows = list(csv.DictReader(out.open()))
    forced = [row for row in rows if row["what"] == "forced"]
    assert [row["way"] for row in forced] == ways
    assert {row["acceptance"] for row in forced if float(row["mean_length"])} == {"1"}
    assert len([row for row in rows if row["what"] == "cycle"]) == 2 * 8


def test_prompts_come_from_files_that_are_held_out_whole(tiny_opt, tmp_path):
    for name in ("books", "code"):
        lines = [json.dumps({"id": i, "text": make_text(60, seed=i)}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("books", "code")]
    found = list(read_prompts(str(tiny_opt), 16, 5, files))
    assert [name for name, _ in found] == ["books", "code", "books", "code", "books"]
    assert all(len(ids) == 16 and ids[0] == 2 for _, ids in found) and found[0] != found[2]


@pytest.mark.long
def test_no_token_of_opt_mini_differs(monkeypatch, tmp_path):
    out = tmp_path / "rows.csv"
    words = ["equal", "--prompts", "6", "--new", "24", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["lossless", *words])
    assert lossless.main() == 0
    rows = list(csv.DictReader(out.open()))
    assert len(rows) > 4 and all(row["differ"] == "0" for row in rows)
