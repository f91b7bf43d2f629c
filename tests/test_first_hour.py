"""What a new user meets in the first hour: extras, one name for a text, families in cards, a model of a wheel."""

import logging
import os
from pathlib import Path

import pytest
import torch
from bundles import make_bundle

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.bundle.card import card
from dejavu_train.bundle.folder import beside
from dejavu_train.cli import commands
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import EXTRAS, UserError
from dejavu_train.ground.experiments import offline_folder
from dejavu_train.models import installed
from dejavu_train.models.load import load_model
from dejavu_train.run.command import parse_config


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("command", ["tasks", "train"])
def test_a_command_without_its_extra_names_the_pip_command(extra, command, monkeypatch, capsys):
    def absent(_):
        raise ModuleNotFoundError(f"No module named '{EXTRAS[extra][0]}.part'", name=f"{EXTRAS[extra][0]}.part")

    monkeypatch.setattr(commands.importlib, "import_module", absent)
    assert commands.main([command]) == 2
    said = capsys.readouterr().err
    package = EXTRAS[extra][0]
    expected = (
        f"dejavu {command} needs the package {package}, which is not installed: pip install 'dejavu-train[{extra}]'"
    )
    assert said == f"error: {expected}\n"


def test_a_module_that_is_no_extra_keeps_its_traceback(monkeypatch):
    def absent(_):
        raise ModuleNotFoundError("No module named 'ours'", name="ours")

    monkeypatch.setattr(commands.importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match="ours"):
        commands.main(["tasks"])


def test_extras_are_those_of_pyproject():
    import tomllib

    from conftest import REPOSITORY

    stated = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        listed = " ".join(stated[extra]).replace("lm-eval", "lm_eval")
        assert all(package in listed for package in packages), extra


@pytest.mark.parametrize("flag", ["--text", "--text.source"])
def test_a_text_has_one_name_on_all_commands(flag):
    assert parse_config(["--model=folder", flag, "mine.txt"]).text.source == "mine.txt"
    both = parse_config(["--model=folder", "--text", "allenai/c4", "--text.config", "en"]).text
    assert (both.source, both.config) == ("allenai/c4", "en")


def test_the_earlier_name_of_a_text_is_refused_with_the_right_one():
    from dejavu_train.cli.parser import parse
    from dejavu_train.extras.tasks.config import TasksConfig

    with pytest.raises(UserError, match="--texts, which is no longer there; its name is --text"):
        parse(TasksConfig, ["--texts=[wikitext]"], "dejavu tasks", "")
    assert parse(TasksConfig, ["--text=[c4]"], "dejavu tasks", "").text == ("c4",)
    with pytest.raises(UserError, match="write --text FILE"):
        parse_config(["--text"])


@pytest.mark.parametrize(
    ("values", "metadata", "tags"),
    [
        ({"model_type": "opt"}, {}, ["opt", "contextual-sparsity"]),
        ({"model_type": "opt"}, {"family": "bloom"}, ["bloom", "contextual-sparsity"]),
        ({"model_type": "arcee"}, {"family": "arcee"}, ["arcee", "contextual-sparsity"]),
        ({"model_type": "arcee"}, {}, ["contextual-sparsity"]),
        ({"model_type": "opt"}, {"family": "x\n- evil"}, ["contextual-sparsity"]),
    ],
)
def test_a_card_is_tagged_with_the_family_of_its_model(tiny_opt, values, metadata, tags):
    import yaml
    from family_models import random_family

    name = values["model_type"]
    shape = dims_of(load_model(str(tiny_opt)).config if name == "opt" else random_family(name).config)
    front = card("model", "hash", shape, {}, metadata).removeprefix("---\n").split("\n---\n")[0]
    assert yaml.safe_load(front)["tags"] == tags


@pytest.fixture
def wheel(tiny_opt, tmp_path, monkeypatch):
    """A model with its bundle, as a package brings it, and a folder without checkpoints."""
    folder = tmp_path / "site-packages" / "dejavu_opt_mini" / "model"
    folder.parent.mkdir(parents=True)
    os.symlink(tiny_opt, folder)
    monkeypatch.setattr(installed, "_folders", lambda: {"mine": folder})
    make_bundle(tiny_opt).at(0.3, 1.0).save_pretrained(tmp_path / "made")
    monkeypatch.setattr(installed, "_has_files", lambda path: False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return folder, tmp_path / "made"


def test_python_finds_the_model_that_a_wheel_brings(wheel, tiny_opt):
    model = SparseOPTForCausalLM.from_pretrained("checkpoints/mine", str(wheel[1]), device="cpu")
    assert model.config.hidden_size == load_model(str(tiny_opt)).config.hidden_size
    assert load_model("checkpoints/mine").config.hidden_size == model.config.hidden_size


def test_results_are_not_written_into_an_installation(wheel):
    folder, _ = wheel
    assert beside(str(folder / "bundle")) == str(Path("checkpoints/mine"))
    assert beside("checkpoints/own/bundle") == str(Path("checkpoints/own"))


def test_a_forward_pass_with_labels_is_no_alarm(dense, bundle, caplog):
    caplog.set_level(logging.INFO, "dejavu_train")
    model = SparseOPTForCausalLM.from_model(dense, bundle)
    ids = torch.arange(4, 12)[None]
    assert model(ids, labels=ids).loss.isfinite()
    assert "slower" not in caplog.text and "backend='mask'" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_offline_run_says_where_it_lies(tmp_path):
    class Run:
        offline, dir = True, str(tmp_path / "wandb" / "offline-run-1" / "files")

    assert offline_folder(Run()) == tmp_path / "wandb" / "offline-run-1"
    Run.offline = False
    assert offline_folder(Run()) is None and offline_folder(object()) is None
