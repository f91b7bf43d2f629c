"""What an installation holds: the package alone, with real files for its links, beside Hugging Face's `kernels`.

With the distribution of opt-mini it generates in an empty folder, without a clone.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytest.importorskip("setuptools")
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
TAKEN = (
    "LICENSE", "README.md", "checkpoints/opt-mini", "configs", "dejavu_train", "kernels", "packages", "pyproject.toml"
)  # fmt: skip
BOTH = """
import pathlib, sys
for name in sys.argv[2:]:
    __import__(name)
import kernels, dejavu_train.kernels.mlp.pack
assert kernels.marker == "theirs" and pathlib.Path(kernels.__file__).is_relative_to(sys.argv[1]), kernels
assert not [name for name in sys.modules if name.startswith("kernels.")]
print(pathlib.Path(dejavu_train.__file__).parent.parent)
"""


def built(kind: str, sources: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git knows, as they stand here, links as links."""
    folder = tmp_path_factory.mktemp("clone")
    known = subprocess.check_output(["git", "ls-files", *TAKEN], cwd=REPOSITORY, text=True).splitlines()
    for name in known:
        here, there = REPOSITORY / name, folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_symlink():
            there.symlink_to(os.readlink(here))
        elif here.is_file():
            there.write_bytes(here.read_bytes())
    return folder


@pytest.fixture(scope="module")
def installed(clone, tmp_path_factory):
    """A wheel of what the sdist holds, unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    with tarfile.open(built("sdist", clone, folder)) as sdist:
        sdist.extractall(folder, filter="data")
    (unpacked,) = [path for path in folder.iterdir() if path.is_dir()]
    site = folder / "site"
    with zipfile.ZipFile(built("wheel", unpacked, folder)) as wheel:
        wheel.extractall(site)
    return site


@pytest.fixture(scope="module")
def environment(clone, tmp_path_factory):
    """Both wheels, installed by pip into a folder, which goes before the packages that are there."""
    folder = tmp_path_factory.mktemp("environment")
    wheels = [built("wheel", place, folder) for place in (clone, clone / "packages" / "opt-mini")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*command, folder / "site", *wheels], check=True, timeout=120)
    return folder / "site"


def in_an_empty_folder(environment, folder, *command):
    paths = os.environ | {"PYTHONPATH": str(environment), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_two_wheels_write_text_in_an_empty_folder(environment, tmp_path):
    """A bundle is named as in a clone. Results go below the empty folder, not into the installation."""
    before = {path: path.stat().st_mtime_ns for path in (environment / "dejavu_opt_mini").rglob("*.*")}
    command = [environment / "bin" / "dejavu", "infer", "--bundle", "checkpoints/opt-mini/bundle", "--new_tokens=4"]
    command += ["--tokens=0", "--timing=false", "--backend=gather", "--generate", "The function returns"]
    (tmp_path / "checkpoints" / "opt-mini").mkdir(parents=True)  # of earlier results: no model's folder
    done = in_an_empty_folder(environment, tmp_path, *command)
    assert done.returncode == 0 and done.stdout.startswith("The function returns a"), done.stderr
    assert (tmp_path / "checkpoints" / "opt-mini" / "results.json").is_file()
    assert before == {path: path.stat().st_mtime_ns for path in (environment / "dejavu_opt_mini").rglob("*.*")}
    assert str(environment) in (tmp_path / "checkpoints" / "opt-mini" / "results.json").read_text()


def test_python_has_the_folders_of_the_installed_model(environment, tmp_path):
    code = """
from dejavu_opt_mini import BUNDLE, MODEL
from dejavu_train.models.installed import installed
assert (installed("checkpoints/opt-mini"), installed("checkpoints/opt-mini/bundle")) == (MODEL, BUNDLE)
for name in ("checkpoints/opt-mini/nothing", "checkpoints/other", "checkpoints", "opt-mini", "facebook/opt-125m", ""):
    assert installed(name) == name
import pathlib
pathlib.Path("checkpoints/opt-mini").mkdir(parents=True)
assert installed("checkpoints/opt-mini") == MODEL
pathlib.Path("checkpoints/opt-mini/config.json").write_text("mine")
assert installed("checkpoints/opt-mini") != MODEL and installed("checkpoints/opt-mini/bundle") != BUNDLE
"""
    assert in_an_empty_folder(environment, tmp_path, sys.executable, "-c", code).returncode == 0


def test_without_the_model_a_line_says_what_brings_it(installed, tmp_path):
    command = [sys.executable, "-m", "dejavu_train", "infer", "--bundle", "checkpoints/opt-mini/bundle"]
    done = in_an_empty_folder(installed, tmp_path, *command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no bundle folder checkpoints/opt-mini/bundle;")
    assert "the package dejavu-opt-mini brings checkpoints/opt-mini" in done.stderr


def test_both_distributions_have_one_version():
    files = (REPOSITORY / "pyproject.toml", REPOSITORY / "packages" / "opt-mini" / "pyproject.toml")
    versions = {tomllib.loads(file.read_text())["project"]["version"] for file in files}
    assert len(versions) == 1


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A stand-in for Hugging Face's package, too old for transformers to use."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text('__version__ = "0.0.1"\nmarker = "theirs"\n')
    (folder / "kernels-0.0.1.dist-info").mkdir()
    (folder / "kernels-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n"
    )
    return folder


def test_an_installation_holds_one_package_with_real_files(clone, installed):
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"dejavu_train"}
    files = [path for path in (clone / "dejavu_train" / "kernels").rglob("*.*") if path.suffix != ".pyc"]
    assert len(files) > 40
    for path in files:
        there = installed / path.relative_to(clone)
        assert there.read_bytes() == path.read_bytes() and not there.is_symlink()
    assert not [path for path in installed.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize(
    ("where", "order"),
    [("empty", ("dejavu_train", "kernels")), ("clone", ("kernels", "dejavu_train.kernels.mlp.pack"))],
)
def test_ours_and_hugging_faces_kernels_side_by_side(where, order, clone, installed, theirs, tmp_path):
    """In an empty folder ours is the installed one, in a clone that of the clone."""
    folder = {"empty": tmp_path, "clone": clone}[where]
    paths = {"empty": [installed, theirs], "clone": [clone, theirs]}[where]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", BOTH, str(theirs), *order]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(paths[0])
