"""The core without its extras: a copy of the tree that lacks them trains, infers, and passes the core's tests."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from forks import Forks
from small_runs import flags

BESIDE = ("dejavu_train.extras", "benchmarks.", "papers.")  # what tests of the core do not name
LEFT = ("extras", "benchmarks", "papers")  # folders of tests that are not of the core
ROOMS = ("bundle", "calibration", "data", "evaluation", "families", "models", "predictors", "sparse", "training")


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The tree without ``dejavu_train/extras``, and without tests that name it."""
    folder = tmp_path_factory.mktemp("core")
    without = shutil.ignore_patterns("__pycache__", "extras")
    shutil.copytree(REPOSITORY / "dejavu_train", folder / "dejavu_train", symlinks=True, ignore=without)
    tests = shutil.ignore_patterns("__pycache__", *LEFT)
    shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=tests)
    for path in (folder / "tests").rglob("test_*.py"):
        if any(name in path.read_text(encoding="utf-8") for name in BESIDE):
            path.unlink()
    linked = "configs checkpoints docs examples pyproject.toml README.md train.py infer.py kernels .git"
    for name in linked.split():
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def environment(folder):
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}", "PYTHONSAFEPATH": "1"}


RUN = "import runpy; runpy.run_module('dejavu_train', run_name='__main__', alter_sys=True)"


@pytest.fixture(scope="module")
def command(core):
    """A command of the core: its exit code, and what it said."""
    with Forks(["torch", "transformers", "lightning.pytorch", "torchmetrics", "h5py"], environment(core)) as forks:

        def run(*arguments):
            started = forks.start(core, RUN, *arguments)
            return started.wait(), started.out.read_text(), started.err.read_text()

        yield run


def test_the_core_trains_and_infers(command, tiny_opt, text_file, tmp_path):
    few = ("--mlp.steps=8", "--heads.steps=8")
    code, _, said = command("train", *flags(tiny_opt, text_file, tmp_path / "run", *few))
    assert code == 0, said
    asked = [f"--bundle={tmp_path / 'run/bundle'}", f"--text={text_file}", "--tokens=500", "--window=64"]
    asked += ["--device=cpu", "--timing=false", "--backend=gather", "--new_tokens=4", "--generate=the"]
    code, _, said = command("infer", *asked)
    assert code == 0, said
    assert (tmp_path / "run" / "results.json").is_file()


def test_the_core_names_what_it_lacks(command, tiny_opt, text_file, tmp_path):
    _, listed, _ = command()
    assert "train" in listed and "serve" not in listed
    code, _, said = command("train", *flags(tiny_opt, text_file, tmp_path / "run", "--plan.gpus=4"))
    assert code == 2
    assert "\nerror: --plan needs dejavu_train/extras, which this copy lacks" in f"\n{said}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("room", ROOMS)
def test_the_core_passes_its_tests(core, room):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", f"tests/{room}"]
    done = subprocess.run(command, cwd=core, env=environment(core), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
