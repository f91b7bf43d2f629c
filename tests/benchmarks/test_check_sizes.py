"""What a run takes, by size: the rows that --help check prints, and the script that writes them."""

import dataclasses
import json

from benchmarks import check_sizes
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.run.command import parse_config
from dejavu_train.training.sizes import read_rows, size_table


def test_disk_and_weights_are_those_of_the_configurations():
    for row in read_rows():
        name = row["configuration"].removeprefix("opt-")
        found = check_sizes.row_of(name, time_it=False)
        assert {key: found[key] for key in ("tokens", "disk_gb", "weights_gb")} == {
            key: row[key] for key in ("tokens", "disk_gb", "weights_gb")
        }, "write them anew: python -m benchmarks.check_sizes --plan"
        config = parse_config(["--config", f"configs/opt-{name}.yaml"]).collect
        budgets = [config.budget(part) for part in ("train", "val", "calibration")]
        assert 0.9 * sum(budgets) < row["tokens"] <= sum(budgets)
    assert len(read_rows()) == len(check_sizes.NAMES)


def test_a_size_is_timed(tmp_path, monkeypatch):
    small = ModelDims(64, 256, 2, 4, 300, 2048)
    assert dims_of(check_sizes.config_values("opt", dataclasses.asdict(small))) == small
    monkeypatch.setattr(check_sizes, "SHAPES", {"1.3b": small})
    monkeypatch.setattr("sys.argv", ["check_sizes", "--only", "1.3b", "--out", str(tmp_path / "sizes.json")])
    parse = check_sizes.parse_config
    monkeypatch.setattr(check_sizes, "parse_config", lambda argv: parse([*argv, "--mlp.rank=8", "--heads.rank=4"]))
    assert check_sizes.main() == 0
    (row,) = json.loads((tmp_path / "sizes.json").read_text())
    assert row["hours"] > 0 and row["device"] and row["sources"].startswith("dejavu_train.run.estimate ")


def test_the_table_is_printed_by_the_help(capsys):
    try:
        parse_config(["--help", "check"])
    except SystemExit as end:
        assert end.code == 0
    assert size_table() in capsys.readouterr().out
