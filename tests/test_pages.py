"""Names that pages have between backticks: options are options of a command, kernels are launched by the engine."""

import json
import re
import runpy

import pytest
from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
STEP = (DOCS / "concepts" / "decoding-step.md").read_text(encoding="utf-8")
WALKS = (DOCS / "notes" / "walks.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "notes")  # notes name what was tried, too
CODE = ("dejavu_train", "kernels", "papers", "benchmarks")


@pytest.fixture(scope="module")
def code() -> str:
    """All Python of the product, its benchmarks and the observations."""
    return "\n".join(
        path.read_text(encoding="utf-8") for folder in CODE for path in (REPOSITORY / folder).rglob("*.py")
    )


@pytest.fixture(scope="module")
def options(code) -> set[str]:
    """Keys of every command's configuration, and what scripts parse themselves."""
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    key_rows = runpy.run_path(str(DOCS / "key_rows.py"))["key_rows"]
    asked = re.findall(r"^```\{keys\} (.+)$", page, re.MULTILINE)
    keys = {key for each in asked for key, _, _ in key_rows(*each.split())}
    keys |= {f"heads.{key.removeprefix('mlp.')}" for key in keys if key.startswith("mlp.")}
    return {name.removeprefix("--").replace("-", "_") for name in {*keys, *re.findall(r"--[a-z][\w.-]*", code)}}


def test_kernels_of_the_step_are_those_that_are_queued():
    queued = json.loads((REPOSITORY / "tests" / "engine" / "queued_kernels.json").read_text())
    table = STEP.split("## The kernels of one layer")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    screened = {"screen", "rescore"}
    prose = {"predict", "add"}  # of the first layer and the last
    assert named - screened | prose == set(queued["4 bits, ahead, int4, fused"].split())
    assert screened < set(queued["a screen"].split())


def test_names_of_the_step_and_of_the_walks_stand_in_the_code(code):
    named = set(re.findall(r"`([a-z_]\w*)`", STEP))
    assert {name for name in named if not re.search(rf"\b_?{name}(_kernel)?\b", code)} == set()
    files = re.findall(r"`([\w/]+\.(?:py|json))`", STEP)
    files += [f"dejavu_train/{file}" for file in re.findall(r"`([\w/]+\.py)`", WALKS)]
    assert len(files) > 60 and [file for file in files if not (REPOSITORY / file).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_options_of_a_page_are_options_of_a_command(path, options):
    named = [name.replace("-", "_") for name in re.findall(r"`--([a-z][\w.-]*)", path.read_text(encoding="utf-8"))]
    roots = {"trainer", "resources", "predictor"}  # keys below are those of Lightning, Ray and of a class of yours
    assert [name for name in named if name not in options and name.split(".")[0] not in roots] == []
