"""A signal or a failure in the middle of a long command: the rows that were finished stay, whole, and are shown."""

import csv
import json
import os
import signal

import pytest
from bundles import make_bundle
from conftest import make_text
from task_files import write_task_files

from dejavu_train.evaluation.html_report import write_report
from dejavu_train.extras.generation import run as generating
from dejavu_train.ground.errors import exit_on_user_error
from papers.deja_vu.observe import __main__ as observe_command
from papers.deja_vu.observe import run as observing

FAILURES = ("signal", "error")


class Broke(Exception):
    pass


def fail(how):
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    raise Broke


def break_at(monkeypatch, module, name, number, how):
    """The call ``number`` of a function, from 1 on, ends the command. Those before it work."""
    function, calls = getattr(module, name), []

    def counted(*args, **options):
        calls.append(name)
        return function(*args, **options) if len(calls) < number else fail(how)

    monkeypatch.setattr(module, name, counted)


def ends(main, values, how):
    flags = [f"--{name}={value}" for name, value in values.items()]
    if how == "signal":
        assert exit_on_user_error(main, flags) == 143
    else:
        with pytest.raises(Broke):
            exit_on_user_error(main, flags)


@pytest.fixture(scope="module")
def given(tiny_opt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    make_bundle(tiny_opt).at(0.4, 0.5).save_pretrained(folder / "bundle")
    (folder / "text.txt").write_text(make_text(900, seed=3), encoding="utf-8")
    write_task_files(folder)
    return folder


@pytest.fixture
def shared(tiny_opt, given, tmp_path):
    return {"model": tiny_opt, "bundle": given / "bundle", "output": tmp_path, "device": "cpu"}


def left(tmp_path):
    """Every file, less the rows' own. Half-written ones have names of their own."""
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")]
    return {path.name for path in files}


def shown(tmp_path):
    """report.html of what is there."""
    from test_html_report import results

    (tmp_path / "results.json").write_text(json.dumps(results()))
    return write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("how", FAILURES)
def test_observe_keeps_its_parts(shared, given, tmp_path, monkeypatch, how):
    break_at(monkeypatch, observing, "predictor_rows", 1, how)
    monkeypatch.setattr(observing, "draw", lambda rows, folder: [])  # pictures take seconds
    text = {"text": given / "text.txt", "tokens": 300, "slow_tokens": 100, "window": 32, "densities": "[0.4]"}
    parts = {"parts": "[residual, selections, predictors]"}
    ends(observe_command.main, shared | text | parts, how)
    about = json.loads((tmp_path / "observations/observations.json").read_text())
    assert [one["name"] for one in about["observed"]] == ["cosine", "norms", "selections"]
    for one in about["observed"]:
        with open(tmp_path / f"observations/{one['name']}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == one["rows"] > 0
    assert about["not_measured"][0] == {"what": "the part predictors", "why": "the run ended before it"}
    assert "the part predictors</b>: the run ended before it" in shown(tmp_path)


@pytest.mark.parametrize("how", FAILURES)
def test_generation_keeps_its_models(shared, given, tmp_path, monkeypatch, how):
    break_at(monkeypatch, generating, "_continue", 6, how)  # dense, a model, and one of two decodings of the next
    asked = {
        "text": given / "text.txt",
        "prompts": 2,
        "prompt": 8,
        "new_tokens": 8,
        "mlp_density": "[0.4]",
        "every": "[]",
    }
    ends(generating.main, shared | asked, how)
    assert left(tmp_path) == {"generation.json", "rows.csv", "positions.csv"}
    found = json.loads((tmp_path / "generation/generation.json").read_text())
    assert [(row["decoding"], row["sparse_from"]) for row in found["rows"]] == [
        ("greedy", "prompt"),
        ("sampled", "prompt"),
    ]
    for name, count in (("rows", 2), ("positions", 2 * 8)):
        with open(tmp_path / f"generation/{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == count
    assert "<h2>Generation</h2>" in shown(tmp_path)


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("command", ["tasks", "paper"])
def test_tasks_keep_what_was_asked(shared, given, tmp_path, monkeypatch, command, how):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from dejavu_train.extras.tasks import run
    from papers.deja_vu import tables as paper

    module = {"tasks": run, "paper": paper}[command]
    break_at(monkeypatch, module, "ask", {"tasks": 4, "paper": 3}[command], how)  # both after one whole comparison
    asked = {"folder": given, "tasks": "[copa, piqa]", "text": "[]"}
    asked |= {"shots": "[0]", "limit": 2, "output": tmp_path / command} | (
        {"tables": "[table4]"} if command == "paper" else {}
    )
    ends(module.main, shared | asked, how)
    assert left(tmp_path) == {"results.json" if command == "tasks" else "paper.json"}
    (path,) = (tmp_path / command).iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert {row["task"] for row in rows} == ({"copa"} if command == "tasks" else {"copa", "piqa", "mean"})
    if command == "paper":
        assert {row["asked_mlp_density"] for row in rows} == {0.15}
    assert ("<h2>Tasks</h2>" in shown(tmp_path)) and rows[0]["metric"] in shown(tmp_path)
