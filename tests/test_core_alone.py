"""The core without its extras: a copy of the tree that lacks them trains, infers, and passes the core's tests."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from small_runs import flags

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
        if "dejavu_train.extras" in path.read_text(encoding="utf-8"):
            path.unlink()
    for name in ("configs", "checkpoints", "docs", "pyproject.toml", "README.md", "train.py", "infer.py", "kernels"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def python(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}", "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_core_trains_and_infers(core, tiny_opt, text_file, tmp_path):
    done = python(
        core,
        "-m",
        "dejavu_train",
        "train",
        *flags(tiny_opt, text_file, tmp_path / "run", "--mlp.steps=8", "--heads.steps=8"),
    )
    assert done.returncode == 0, done.stderr
    asked = [
        f"--bundle={tmp_path / 'run/bundle'}",
        f"--text={text_file}",
        "--tokens=500",
        "--window=64",
        "--device=cpu",
    ]
    done = python(core, "-m", "dejavu_train", "infer", *asked, "--timing=false", "--new_tokens=4", "--generate=the")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "results.json").is_file()


def test_the_core_names_what_it_lacks(core, tiny_opt, text_file, tmp_path):
    listed = python(core, "-m", "dejavu_train").stdout
    assert "train" in listed and "serve" not in listed
    done = python(core, "-m", "dejavu_train", "train", *flags(tiny_opt, text_file, tmp_path / "run", "--plan.gpus=4"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --plan needs dejavu_train/extras, which this copy lacks")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("room", ROOMS)
def test_the_core_passes_its_tests(core, room):
    done = python(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", f"tests/{room}")
    assert done.returncode == 0, done.stdout[-3000:]
