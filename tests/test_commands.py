"""The command ``dejavu`` and its subcommands: names, mistakes, what they load, the configurations that come along."""

import importlib
import multiprocessing
import os
import signal
import sys

import pytest
from conftest import REPOSITORY
from test_imports import TRAINING_ONLY, python

from dejavu_train.cli import commands
from dejavu_train.run.command import parse_config


def test_all_commands_are_listed_and_can_be_loaded(capsys):
    assert commands.main([]) == commands.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert commands.main(["--version"]) == 0 and capsys.readouterr().out[0].isdigit()
    for name, command in commands.COMMANDS.items():
        assert f"  {name} " in listed and command.about in listed
        if name != "tasks":  # asks for lm-eval
            assert callable(importlib.import_module(command.module).main)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_names_the_command_as_it_is_typed(name, capsys):
    try:
        assert commands.main([name, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    said = capsys.readouterr()
    typed = f"{name}.py" if name in ("train", "infer") else f"dejavu {name}"
    assert said.out.startswith(f"usage: {typed} [") and said.err == ""


@pytest.mark.parametrize("given, said", [("infr", "did you mean infer?"), ("--fast", "there are train, infer")])
def test_a_command_that_is_not_there_is_one_line(given, said, capsys):
    assert commands.main([given]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: dejavu has no command {given}; ") and said in line and line.count("\n") == 1


def test_what_is_one_process_is_not_started_as_several(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert commands.main(["serve", "--bundle", "nowhere"]) == 2
    assert "got 2 by torchrun, which starts train, infer, pretrain alone" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert commands.main(["infer", "--bundle", "nowhere"]) == 2 and "no bundle" in capsys.readouterr().err


def mistaken(tmp_path, name, while_waiting):
    """Exit code and stderr of a process of torchrun whose command has an option too many."""
    said = tmp_path / "stderr"

    def work():
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        commands.time.sleep = while_waiting
        os._exit(commands.run(name, ["--nothing", "1"]))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode, said.read_text()


@pytest.mark.parametrize("name", ["infer", "pretrain"])
def test_a_mistake_of_all_processes_of_torchrun_is_said_by_the_first(tmp_path, name):
    def be_ended(seconds):
        os.kill(os.getpid(), signal.SIGTERM)

    assert mistaken(tmp_path, name, be_ended) == (-signal.SIGTERM, "")
    code, said = mistaken(tmp_path, name, lambda seconds: None)
    assert code == 2 and said.startswith("error: unknown option --nothing") and said.count("\n") == 1


def test_infer_and_quantize_load_nothing_that_only_training_needs():
    """Not even where all is installed: what fails to import fails the command."""
    code = """
import sys
from dejavu_train.cli.commands import main
for name in ("infer", "quantize"):
    assert main([name, "--model", "nowhere", "--bundle" if name == "infer" else "--output", "nowhere"]) == 2
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("torch" in sys.modules)
"""
    assert python(code, TRAINING_ONLY).splitlines()[-1] == "False"


def test_configurations_come_with_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_config(["--config", "configs/opt-mini.yaml"]).model == "checkpoints/opt-mini"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "opt-mini.yaml").write_text("model: mine\n")
    assert parse_config(["--config", "configs/opt-mini.yaml"]).model == "mine"
    assert (REPOSITORY / "dejavu_train" / "configs").resolve() == REPOSITORY / "configs"
