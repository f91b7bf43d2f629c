"""papers/deja_vu/tables.py and record.py: the tables end to end, their mistakes, their configuration, their picture."""

import csv
import json

import pytest
from bundles import make_bundle
from conftest import REPOSITORY
from task_files import write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from dejavu_train.ground.errors import exit_on_user_error
from papers.deja_vu import record, tables

CONFIG = REPOSITORY / "papers/deja_vu/configs/tables.yaml"


@pytest.fixture(scope="module")
def data(tiny_opt, tmp_path_factory):
    """Files of tasks, and a bundle in bundle/."""
    folder = write_task_files(tmp_path_factory.mktemp("data"))
    make_bundle(tiny_opt).at(mlp_density=0.4, head_density=0.5).save_pretrained(folder / "bundle")
    return folder


def test_the_papers_tables(tiny_opt, data, tmp_path, capsys):
    flags = [f"--config={CONFIG}", f"--model={tiny_opt}", f"--bundle={data / 'bundle'}"]
    flags += [f"--folder={data}", f"--output={tmp_path}", "--limit=2"]
    flags += ["--tasks=[piqa, cb]", "--shots=[0]", "--sparsities=[0.5, 0.75]", "--device=cpu"]
    assert exit_on_user_error(tables.main, [*flags, "--structures=[parallel 2, skip 1/2]"]) == 0
    rows = json.loads((tmp_path / "paper.json").read_text())["rows"]
    kinds = {(row["table"], row["selection"], row["structure"]) for row in rows}
    assert ("table4", "predicted", "sequential") in kinds and ("fig7", "oracle", "sequential") in kinds
    assert ("structures", "dense", "skip 1/2") in kinds and ("structures", "predicted", "parallel 2") in kinds
    for row in rows:
        assert (row["total_sparsity"] == 0) == (row["selection"] == "dense")
    assert (tmp_path / "fig7.png").stat().st_size > 10_000 and (tmp_path / "fig7.svg").is_file()
    assert "| fig7 | oracle, sequential" in capsys.readouterr().out


def test_mistakes_are_one_line_before_anything_is_asked(tiny_opt, data, tmp_path, capsys):
    common = [f"--model={tiny_opt}", f"--bundle={data / 'bundle'}", f"--folder={data}", f"--output={tmp_path / 'out'}"]
    mistakes = {"table9 is none of": "--tables=[table9]", "no structure": "--structures=[sideways]"}
    for said, flag in (mistakes | {"--tables is empty": "--tables=[]"}).items():
        assert exit_on_user_error(tables.main, [*common, flag]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_configuration_spells_the_defaults_out():
    assert tables.read_config([f"--config={CONFIG}"]) == tables.PaperConfig()


def test_rows_carry_their_conditions(tiny_opt, data, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    flags = [f"--model={tiny_opt}", f"--bundle={data / 'bundle'}", f"--folder={data}", "--tasks=[copa]", "--text=[]"]
    flags += ["--shots=[0]", "--limit=2", "--device=cpu"]
    assert exit_on_user_error(record.main, [*flags, "--tables=[table4]"]) == 0
    rows = list(csv.DictReader((tmp_path / "paper.csv").open()))
    assert {(row["asked_mlp_density"], row["asked_head_density"]) for row in rows} == {("0.15", "1"), ("1", "0.5")}
    assert {(row["device"], row["limit"], row["dtype"]) for row in rows} == {("CPU", "2", "float32")}


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
    found = record.newest_trend(tmp_path / "paper.csv")
    assert [(row["value"], row["total_sparsity"], row["error"]) for row in found] == [(12, 0.6, 0), (12, 0.3, 0)]
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert exit_on_user_error(record.main, ["picture"]) == 0
    assert (tmp_path / "paper.png").stat().st_size > 10_000 and (tmp_path / "paper.svg").is_file()
