"""Both commands of benchmarks/frontier.py on a tiny OPT: which rows they write, and that budgets are met."""

import csv
import json

import pytest
from conftest import make_text
from small_runs import COLLECT

from benchmarks.frontier import main


@pytest.fixture
def options(tiny_opt, tmp_path, monkeypatch):
    """Flags of a run of some seconds, and the CSV that it writes."""
    monkeypatch.setattr("benchmarks.frontier.RANKS", (4,))
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"id": i, "text": make_text(150, seed=i)}) for i in range(3)]
    (data / "prose.jsonl").write_text("\n".join(lines))
    few = [f"--collect.{name}={value}" for name, value in COLLECT.items() if name != "shard_tokens"]
    few += [f"--{target}.{name}" for target in ("mlp", "heads") for name in ("steps=8", "validations=1", "rank=4")]
    few += ["--text.sample.tokens=6000", "--text.sample.length=64", "--trainer.accelerator=cpu"]
    few += [f"--text.cache={tmp_path / 'cache'}", f"--work={tmp_path / 'work'}", f"--model={tiny_opt}"]
    few += [f"--data={data}", "--texts=prose", "--tokens=500", "--calibration-tokens=600", "--batch-tokens=512"]
    output = tmp_path / "rows.csv"
    return [*few, f"--output={output}"], output


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rivals_at_equal_bytes(options, monkeypatch):
    monkeypatch.setattr("benchmarks.frontier.SHARES", (0.35, 0.45))  # half of this model's neurons are active
    flags, output = options
    main(["rivals", *flags])
    rows = read(output)
    assert {row["method"] for row in rows} >= {"whitened SVD, rank 4 int4", "graph search (HNSW)", "GRIFFIN", "TEAL"}
    for row in rows:
        assert float(row["mlp_bytes"]) == pytest.approx(float(row["asked_bytes"]), rel=0.3)  # of another text
        assert float(row["calibration_nats"]) >= 0 and row["commit"]
    whole = {row["method"]: int(row["tokens"]) for row in rows}
    assert whole["GRIFFIN"] < 0.6 * whole["TEAL"]  # the prompt is not scored


def test_a_seed_and_its_heads(options, text_file, monkeypatch):
    monkeypatch.setattr("benchmarks.frontier.SHARES", (0.45, 0.6))
    flags, output = options
    main(["trained", "--seed=1", *flags, f"--text.source={text_file}"])
    rows = read(output)
    assert all(row["seed"] == "1" for row in rows)
    at_bytes = [row for row in rows if row["asked_bytes"]]
    assert [float(row["mlp_bytes"]) for row in at_bytes] == pytest.approx([0.45, 0.6], rel=0.15)
    heads = {(row["method"], row["asked_mlp"], row["asked_heads"]) for row in rows if row["asked_heads"] != "1"}
    predicted = {("predictors", mlp, share) for mlp in ("1", "0.2") for share in ("0.85", "0.75")}
    oracles = {
        (name, "1", share)
        for name in ("oracle, as many as predicted", "oracle, shared out")
        for share in ("0.85", "0.75")
    }
    assert heads == predicted | oracles
