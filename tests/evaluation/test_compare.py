"""Several runs of infer side by side: what differs, what is timed, what is refused."""

import csv
import json

import pytest
from evaluation.test_verdict import row, timed

from dejavu_train.cli.commands import main
from dejavu_train.ground.experiments import Record


def make_run(folder, rank, increases, ms=0.7, model="a", sha256="t", with_bundle=True):
    """A folder as infer leaves it, and its bundle's metadata with a rank."""
    folder.mkdir(parents=True)
    bundle = folder.parent / "bundle"
    if with_bundle:
        bundle.mkdir()
        predictors = [{"target": "mlp", "rank": rank}, {"target": "heads", "rank": 12}]
        stage = {"keys": {"calibrate.mlp_density": 0.2}}
        stored = {"targets": ["mlp", "heads"], "predictors": predictors, "metadata": {"stage": stage}}
        (bundle / "bundle.json").write_text(json.dumps(stored))
    quality = [row("docs", density, increase, density == 0.2) for density, increase in increases.items()]
    quality += [row("docs", 0.2, 0.5, selection="static"), row("docs", 0.2, 0.01, sparse_from=128)]
    found = {"schema": 3, "model": model, "bundle": str(bundle), "hashes": {"model": model, "bundle": "b"}}
    found |= {
        "texts": [{"name": "docs", "sha256": sha256, "tokens": 100}],
        "config": {"seed": 0, "output": str(folder)},
    }
    found |= {"quality": quality, "timing": timed(dense=8.5, dense_cpu=1.4, cpu=ms)}
    (folder / "results.json").write_text(json.dumps(found))
    return str(folder)


def test_runs_side_by_side(tmp_path, capsys, caplog):
    first = make_run(tmp_path / "small" / "infer", 8, {0.1: 0.06, 0.2: 0.015})
    second = make_run(tmp_path / "large" / "infer", 32, {0.1: 0.04, 0.2: 0.010}, ms=0.9)
    assert main(["compare", first, second, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    assert ["setting", "small/infer", "large/infer"] in lines
    assert [*"rank of mlp".split(), "8", "32"] in lines
    assert not any("rank of heads" in line or "mlp_density" in line for line in printed.out.splitlines())
    assert "note" not in caplog.text
    with open(tmp_path / "out" / "compare.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(one["run"], one["increase"], one["ms_per_token"]) for one in rows] == [
        ("small/infer", "0.06", ""), ("small/infer", "0.015", "0.7"),
        ("large/infer", "0.04", ""), ("large/infer", "0.01", "0.9"),
    ]  # fmt: skip
    assert "rank of mlp" in (tmp_path / "out" / "compare.md").read_text()
    assert all((tmp_path / "out" / f"compare.{kind}").stat().st_size for kind in ("svg", "png"))


def test_many_runs_are_rows_and_lines_by_a_setting(tmp_path, capsys):
    folders = []
    for rank, density, increase in ((8, 0.1, 0.06), (8, 0.2, 0.02), (32, 0.1, 0.05), (32, 0.2, 0.01)):
        output = tmp_path / f"rank-{rank}"
        folders.append(make_run(output / f"infer-{density}", rank, {0.2: increase}, with_bundle=False))
        found = json.loads((output / f"infer-{density}" / "results.json").read_text())
        bundle = output / f"at-{density}"
        bundle.mkdir()
        (bundle / "bundle.json").write_text(json.dumps({"metadata": {"stage": {"identity": f"{density}"}}}))
        found["bundle"] = str(bundle)
        (output / f"infer-{density}" / "results.json").write_text(json.dumps(found))
        record = Record(output / "experiments" / f"{density}.json", bundle.name, f"{density}")
        record.write()
        record.add([("settings/mlp.rank", None, rank), ("settings/calibrate.mlp_density", None, density)])
    assert main(["compare", *folders, "--by", "mlp.rank", "--output", str(tmp_path / "out")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "mlp.rank", "calibrate.mlp_density"] in lines
    assert ["rank-32/infer-0.1", "32", "0.1"] in lines
    with open(tmp_path / "out" / "compare.csv") as file:
        assert [row["experiment"] for row in csv.DictReader(file)] == ["0.1", "0.2", "0.1", "0.2"]
    picture = (tmp_path / "out" / "compare.svg").read_text()
    assert all(f"<!-- mlp.rank {rank} -->" in picture for rank in (8, 32)) and "infer-0.1" not in picture
    assert main(["compare", *folders, "--by", "mlp.runk"]) == 2
    told = "--by mlp.runk is no setting of these runs; what differs is mlp.rank, calibrate.mlp_density"
    assert told in capsys.readouterr().err
    assert main(["compare", *folders[:2], "--by", "mlp.rank"]) == 2
    assert "--by mlp.rank is the same in all runs; what differs is calibrate.mlp_density" in capsys.readouterr().err


def test_what_cannot_be_compared_is_said(tmp_path, caplog):
    first = make_run(tmp_path / "a", 8, {0.1: 0.06})
    second = make_run(tmp_path / "b", 8, {0.1: 0.04}, model="other", sha256="u", with_bundle=False)
    assert main(["compare", first, second]) == 0
    notes = caplog.text
    assert "different weights" in notes and "docs is not the same text" in notes and "timed on other" not in notes


@pytest.mark.parametrize("given", [[], ["a"], ["a", "./a"], ["a", "nowhere"], ["a", "old"]])
def test_mistakes_are_one_line(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", 8, {0.1: 0.06})
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text('{"schema": 1}')
    assert main(["compare", *given, "--output", "out"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert ("two different folders" in said) == (len(given) < 2 or given[1] == "./a")
