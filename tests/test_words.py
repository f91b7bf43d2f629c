"""The rule for writers, as far as `make lint` holds it: planted offenders fail, the baseline only shrinks."""

import subprocess
from pathlib import Path

import pytest
import words

LONG = "One sentence of this page goes on " + "and on " * 12 + "until nobody remembers how it began.\n"
SOUND = (
    "# Page\n\nA `list; of; code` counts 1 word. See [the page](page.md#page).\n\n| 1 | 2 | 3; |\n| --- | --- | --- |\n"
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / words.BASELINE).write_text("")
    (tmp_path / "page.md").write_text(
        SOUND + f"\n```\n{LONG}```\n\n    {LONG}\n<!-- table: x -->\n\n{LONG}\n<!-- end -->\n"
    )
    (tmp_path / "code.py").write_text(
        'def add():\n    """Adds two numbers.\n\n    >>> add(1, 2, 3, 4)\n    4\n    """\n'
    )
    subprocess.run("git init -q && git add .", shell=True, cwd=tmp_path, check=True)
    return tmp_path


def check(root: Path, capsys: pytest.CaptureFixture, *flags: str) -> tuple[int, str]:
    code = words.main(flags, root)
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("page.md", LONG, "long: One sentence"),
        ("page.md", "This one was fast; that one was not.\n", "semicolon:"),
        ("page.md", "Rows 2, 3 and 4 are read.\n", "numbers:"),
        ("page.md", "It reads 12 of 13 rows.\n\n" * 5, "numbers in 100 words:"),
        ("page.md", "It was measured on 2026-11-21.\n", "date:"),
        ("page.md", "It was measured at 6ca39ef.\n", "commit:"),
        ("page.md", "The latter is read.\n", "word: The latter"),
        ("page.md", "See [another](other.md).\n", "link: other.md"),
        ("page.md", "See [a heading](page.md#heading).\n", "link: page.md#heading"),
        ("code.py", f'\n\ndef subtract():\n    """{LONG}"""\n', "long: One sentence"),
        ("code.py", f'\n\nclass Settings:\n    rank: int = 1\n    """{LONG}"""\n', "long: One sentence"),
        ("code.py", f'\n\nraise ValueError(f"{{3}} " + "{LONG[:-2]}")\n', "long: X One sentence"),
        ("code.py", '\n\nlogger.warning("measured at 6ca39ef; pass %s", 3)\n', "commit: measured"),
    ],
)
def test_planted(repository: Path, capsys: pytest.CaptureFixture, file: str, text: str, said: str) -> None:
    assert check(repository, capsys) == (0, "")
    with (repository / file).open("a") as page:
        page.write("\n" + text)
    code, printed = check(repository, capsys)
    assert code == 1 and printed.startswith(file) and said in printed, printed


def test_docstrings_of_the_library_begin_with_a_noun_or_a_verb(tmp_path: Path) -> None:
    (tmp_path / "dejavu_train").mkdir()
    for path in ("dejavu_train/code.py", "code.py"):
        (tmp_path / path).write_text(
            '"""Code.\n\nOf no use."""\n\nclass A:\n    seed: int = 0\n    """Of the draws."""\n'
        )
    found = list(words.offenders(tmp_path, ["dejavu_train/code.py", "code.py"]))
    assert [(each.path, each.rule, each.text) for each in found] == [
        ("dejavu_train/code.py", "beginning", "Of the draws.")
    ]


def test_make_lint_runs_the_check() -> None:
    """So what is planted above fails `make lint`."""
    command = ["make", "--dry-run", "--no-print-directory", "lint"]
    done = subprocess.run(command, cwd=words.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("tests/words.py")


def test_words_of_the_glossary(repository: Path, capsys: pytest.CaptureFixture) -> None:
    glossary = repository / words.GLOSSARY
    glossary.parent.mkdir(parents=True)
    glossary.write_text("**candidate**: a neuron that may be read.\nNot: `proposal`, `guess`.\n")
    (repository / "page.md").write_text("Proposals are read, the latter first.\n")
    code, printed = check(repository, capsys)
    assert code == 1 and "word: Proposals" in printed and printed.count("word:") == 1


def test_baseline_only_shrinks(repository: Path, capsys: pytest.CaptureFixture) -> None:
    page, baseline = repository / "page.md", repository / words.BASELINE
    page.write_text(LONG)
    (offender,) = words.offenders(repository, ["page.md"])
    baseline.write_text(f"{offender.key}\n")
    assert check(repository, capsys) == (0, "")
    (repository / "code.py").write_text(f'"""{LONG}"""\n')  # an old offender excuses one place
    assert check(repository, capsys)[0] == 1
    page.write_text(SOUND)  # moved: the key knows no place
    assert check(repository, capsys) == (0, "")
    (repository / "code.py").write_text("")
    code, printed = check(repository, capsys)
    assert code == 1 and "lists 1 that are gone" in printed
    assert check(repository, capsys, "--shrink")[0] == 0 and baseline.read_text() == ""
    page.write_text(LONG)
    assert check(repository, capsys, "--shrink")[0] == 1 and baseline.read_text() == ""


def test_files_that_a_page_names_exist(repository: Path, capsys: pytest.CaptureFixture) -> None:
    (repository / "README.md").write_text("Read `tests/words_baseline.txt` first.\n")
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    assert check(repository, capsys) == (0, "")
    (repository / "README.md").write_text("Read `tests/gone.py` first.\n")
    code, printed = check(repository, capsys)
    assert code == 1 and printed.startswith("README.md:1: file: tests/gone.py")


def test_no_excuse_for_what_is_read_first(repository: Path, capsys: pytest.CaptureFixture) -> None:
    (repository / "docs/start").mkdir(parents=True)
    (repository / "docs/start/page.md").write_text(LONG)
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    (offender,) = words.offenders(repository, ["docs/start/page.md"])
    (repository / words.BASELINE).write_text(f"{offender.key}\n")
    assert check(repository, capsys)[0] == 1


def test_readme_stays_short() -> None:
    """Tables and what stands under them are not counted among the words."""
    lines = (words.ROOT / "README.md").read_text("utf-8").splitlines()
    prose = [line for line in lines if not line.startswith(("|", "Rows: "))]
    assert len(" ".join(prose).split()) <= 850 and len(lines) <= 150
