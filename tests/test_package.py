"""The package as a stranger meets it: version, what is missing, examples, docstrings, the troubleshooting page."""

import ast
import doctest
import importlib
import re
import runpy
import tomllib
from importlib.metadata import version

import pytest
from conftest import REPOSITORY
from test_imports import TRAINING_ONLY, python

import dejavu_train
from dejavu_train.cli.commands import COMMANDS
from dejavu_train.evaluation.command import read_config
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.run.command import parse_config


def test_version_is_that_of_the_installation_and_read_when_asked_for():
    assert dejavu_train.__version__ == version("dejavu-train")
    said = python("import dejavu_train, sys; print('importlib.metadata' in sys.modules, dejavu_train.__version__)")
    assert said.split() == ["False", dejavu_train.__version__]


def test_changelog_begins_with_the_version_that_stands_in_pyproject():
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(releases), headings
    version_here = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert releases[0][1] == version_here
    kinds = re.findall(r"^### (.+)$", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_file_beside_the_modules_is_installed_with_them():
    taken = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = [REPOSITORY / package.replace(".", "/") for package in taken]
    given = zip(folders, taken.values(), strict=True)
    installed = {path for folder, names in given for name in names for path in folder.glob(name)}
    beside = set((REPOSITORY / "dejavu_train").rglob("*.*"))
    # rglob does not follow links: those to the kernels' rooms and to the configurations.
    rooms = (REPOSITORY / "dejavu_train" / "kernels").iterdir()
    beside |= {path for room in rooms if room.is_dir() for path in room.glob("**/*.*")}
    beside |= {path for path in (REPOSITORY / "dejavu_train" / "configs").glob("**/*.*")}
    beside = {path for path in beside if path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts}
    assert installed == beside and installed


def test_without_the_training_packages_train_says_what_to_install():
    code = """
import contextlib, io, sys
from dejavu_train.run.command import main
from dejavu_train.cli.commands import COMMANDS
from dejavu_train.ground.errors import exit_on_user_error
for argv in ([], ["--trainer.help"]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert exit_on_user_error(main, argv) == 2
    print(said.getvalue(), end="")
assert "torch" not in sys.modules
"""
    line = "error: training needs lightning, torchmetrics, h5py: pip install 'dejavu-train[train]'"
    assert python(code, TRAINING_ONLY).splitlines() == [line, line]


def example(name, *argv) -> int:
    path = REPOSITORY / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 40
    return exit_on_user_error(runpy.run_path(str(path))["main"], [str(value) for value in argv])


def test_the_example_that_generates(tiny_opt, bundle_folder, capsys):
    assert example("generate", tiny_opt, bundle_folder, "--prompt=the model", "--tokens=4", "--backend=gather") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["dense", "sparse"]
    assert all("the model" in line for line in lines)


def test_the_example_that_scores(tiny_opt, bundle_folder, text_file, capsys):
    assert example("densities", tiny_opt, bundle_folder, text_file, "--mlp_density", "1.0", "0.2", "--tokens=64") == 0
    found = re.findall(r"density (\S+): perplexity (\S+) on 63 tokens", capsys.readouterr().out)
    assert [density for density, _ in found] == ["1.00", "0.20"] and found[0][1] != found[1][1]
    assert example("densities", tiny_opt, bundle_folder / "nowhere", text_file) == 2


@pytest.mark.parametrize("name", ["README.md", "docs/start/python.md", "docs/guides/which-density.md"])
def test_the_python_of_a_page_runs(name, tiny_opt, bundle_folder, tmp_path, monkeypatch):
    """Block by block, in one namespace, on the tiny model and through gather, which needs no compiler."""
    monkeypatch.chdir(tmp_path)
    model = dejavu_train.SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle_folder, backend="gather")
    names = {"model": model}
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / name).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        block = re.sub(r'"checkpoints/[\w/-]*bundle"', f"{str(bundle_folder)!r}, backend='gather'", block)
        block = block.replace("backend='gather', backend=\"gather\"", "backend='gather'")
        exec(block.replace('"checkpoints/opt-mini"', repr(str(tiny_opt))), names)


def code_texts() -> list[str]:
    """Every string of dejavu_train as one, with U+2026 where a value is put in."""
    found = []
    for path in (REPOSITORY / "dejavu_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.0-9]*[sdfg]", "…", node.value))
    return found


PAGE = (REPOSITORY / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def texts():
    return code_texts()


@pytest.mark.parametrize("quoted", re.findall(r"^> (.+)$", PAGE, re.MULTILINE))
def test_a_line_of_the_troubleshooting_page_stands_in_the_code(texts, quoted):
    plain = quoted.strip("… :")
    assert len(plain) > 20
    assert any(plain in text for text in texts), quoted


def test_every_flag_of_the_troubleshooting_page_exists(capsys):
    for parse in (parse_config, read_config):
        with pytest.raises(SystemExit):
            parse(["--help", "all"])
    known = capsys.readouterr().out
    flags = {flag for flag in re.findall(r"`(--[a-z_.]+)", PAGE)}
    assert len(flags) > 8
    assert [flag for flag in sorted(flags) if not re.search(rf"{re.escape(flag)}\b", known)] == []


def test_every_key_of_the_configuration_page_has_its_meaning():
    page = (REPOSITORY / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    key_rows = runpy.run_path(str(REPOSITORY / "docs" / "key_rows.py"))["key_rows"]
    asked = re.findall(r"^```\{keys\} (.+)$", page, re.MULTILINE)
    rows = [row for each in asked for row in key_rows(*each.split())]
    assert len(rows) > 150 and [key for key, _, meaning in rows if not meaning] == []
    assert ("heads", "", "Predictors of the attention heads.") in rows and ("port", "8000") in [row[:2] for row in rows]
    assert [name for name in COMMANDS if f"\n## {name}\n" not in page] == ["compare"], "which has no keys"


ROOMS = [REPOSITORY / name for name in ("benchmarks", "dejavu_train", "papers")]
EXAMPLES = [path for room in ROOMS for path in sorted(room.rglob("*.py")) if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_a_module_are_true(path):
    module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed
