"""What a run takes, by size: the rows that --help check prints, and the script that writes them."""

from benchmarks import check_sizes
from dejavu_train.run.command import parse_config
from dejavu_train.training.sizes import read_rows, size_table


def test_disk_and_weights_are_those_of_the_configurations():
    for row in read_rows():
        name = row["configuration"].removeprefix("opt-")
        found = check_sizes.row_of(name)
        assert {key: found[key] for key in ("tokens", "disk_gb", "weights_gb")} == {
            key: row[key] for key in ("tokens", "disk_gb", "weights_gb")
        }, "write them anew: python -m benchmarks.check_sizes"
        config = parse_config(["--config", f"configs/opt-{name}.yaml"]).collect
        budgets = [config.budget(part) for part in ("train", "val", "calibration")]
        assert 0.9 * sum(budgets) < row["tokens"] <= sum(budgets)
    assert len(read_rows()) == len(check_sizes.NAMES)


def test_all_sizes_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["check_sizes", "--out", str(tmp_path / "sizes.json")])
    assert check_sizes.main() == 0
    rows = read_rows(tmp_path / "sizes.json")
    assert [row["configuration"] for row in rows] == [row["configuration"] for row in read_rows()]
    assert all(row["hours"] > 0 and row["sources"].startswith("dejavu_train.run.estimate ") for row in rows)


def test_the_table_is_printed_by_the_help(capsys):
    try:
        parse_config(["--help", "check"])
    except SystemExit as end:
        assert end.code == 0
    assert size_table() in capsys.readouterr().out
