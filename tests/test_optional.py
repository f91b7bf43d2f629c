"""Optional and fragile things, hidden or broken one by one: what goes on goes on, what cannot says what to set."""

import logging
import os
import sys
import tempfile
from contextlib import ExitStack

import pytest
from forgotten import forget_modules

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.evaluation import html_report, picture
from dejavu_train.ground import machine
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.load import load_model


class Hidden:
    """On ``sys.meta_path``: a package that is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name.split(".")[0] == self.package or name == self.package:
            raise ModuleNotFoundError(f"No module named '{self.package}'", name=self.package)


@pytest.fixture
def hide(monkeypatch):
    """Hide a package, and forget it and our modules that have imported it."""
    with ExitStack() as stack:

        def hidden(package: str, *rooms: str) -> None:
            stack.enter_context(forget_modules(lambda name: f"{name}.".startswith((f"{package}.", *rooms))))
            monkeypatch.setattr(sys, "meta_path", [Hidden(package), *sys.meta_path])

        yield hidden


def test_triton(hide, tiny_opt, bundle, caplog):
    hide("dejavu_train.engine.backend")  # which imports triton through all of kernels
    with pytest.raises(UserError, match=r"the engine triton cannot be loaded \(.*\); use backend='gather'"):
        SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, "triton")
    with caplog.at_level(logging.WARNING, "dejavu_train"):
        model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, "auto", ops="reference")
    assert model.backend == "gather" and caplog.text.count("the backend gather runs instead") == 1


def test_accelerate(hide, tiny_opt):
    hide("accelerate")
    with pytest.raises(UserError, match=r"device_map needs accelerate: pip install 'dejavu-train\[large\]'"):
        load_model(str(tiny_opt), device_map="auto")


def test_wandb(hide):
    hide("wandb")
    with pytest.raises(UserError, match=r"--wandb needs wandb: pip install 'dejavu-train\[train\]'"):
        html_report.log_to_wandb(None, "project")


def test_matplotlib(hide, tmp_path):
    hide("matplotlib")
    assert picture.plot_curves({}, tmp_path / "curve.png") is False and not list(tmp_path.iterdir())


def test_no_folder_for_temporary_files(monkeypatch, capsys, tmp_path):
    absent = str(tmp_path / "nowhere")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [absent])
    assert exit_on_user_error(lambda argv: tempfile.gettempdir()) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"['{absent}']; set TMPDIR to a folder that can be written\n")


def test_a_system_that_binds_no_process_to_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)


def test_no_home_and_no_cache_of_the_hub(tiny_opt, bundle, monkeypatch):
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/dev/null/nowhere")
    assert SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle, "gather").backend == "gather"
