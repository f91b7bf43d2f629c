"""Rows of measurements: the sources that they measured, their hash, and columns that come later."""

import csv
import json

import pytest
from conftest import REPOSITORY

from benchmarks import rows, tables
from benchmarks.rows import append_row, code_of, is_older, made_now, measured_sources
from benchmarks.table_maker import age
from benchmarks.tables import OLDER

FIRST = "2026-11-27"  # rows of earlier days may lack their sources


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A repository of a package: a module that is timed, one that it imports, and one that nobody imports."""
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "timed.py").write_text("from room.used import add\n\n\ndef run():\n    return add(1, 2)\n")
    (folder / "used.py").write_text('"""Adds."""\n\n\ndef add(a, b):\n    return a + b\n')
    (folder / "apart.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    forget()
    yield folder
    forget()


def forget():
    rows._read.cache_clear()
    measured_sources.cache_clear()


def rewrite(path, text):
    path.write_text(text)
    forget()


def test_a_row_is_older_when_what_it_ran_changed(room):
    row = made_now("room.timed")
    assert row["sources"].startswith("room.timed ") and not is_older(row) and age([row]) == ""
    rewrite(room / "apart.py", "VALUE = 2\n")
    assert not is_older(row), "nobody imports it"
    words = '"""Adds two\nnumbers."""\n\ndef add(a, b):  # both\n    """Their sum."""\n    return a + b\n'
    rewrite(room / "used.py", words)
    assert not is_older(row), "words changed, and no code"
    rewrite(room / "used.py", "def add(a, b):\n    return b + a\n")
    assert is_older(row) and is_older({}) and is_older({"sources": ""}) and is_older({"sources": "gone 0123456789ab"})
    assert OLDER.fullmatch(age([row, made_now("room.timed"), {}])).group(1) == "2 of 3 rows are older"


@pytest.mark.parametrize("line", ["from . import used", "from .used import add", "import room.used"])
def test_every_way_to_import_is_followed(room, line):
    rewrite(room / "timed.py", f"def run():\n    {line}\n")
    row = made_now("room.timed")
    rewrite(room / "used.py", "def add(a, b):\n    return b + a\n")
    assert is_older(row)


def test_types_of_annotations_do_not_run(room):
    rewrite(room / "timed.py", "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from room.used import add\n")
    row = made_now("room.timed")
    rewrite(room / "used.py", "def add(a, b):\n    return b + a\n")
    assert not is_older(row)


def test_a_row_is_older_when_settings_changed(room):
    (room / "h200.json").write_text('{"warps": 4}')
    row = made_now("room.timed", "room")
    assert not is_older(row)
    rewrite(room / "h200.json", '{"warps": 8}')
    assert is_older(row)


def test_a_module_that_is_none_is_named(room):
    with pytest.raises(ValueError, match="room.gone is no module"):
        made_now("room.gone")


def test_the_entries_of_benchmarks_are_modules():
    for entry in (rows.STEP, rows.CPU_STEP, rows.SERVER, rows.SCORE, tables.DEMO_SOURCES):
        assert measured_sources(*entry)


def test_code_is_the_same_for_every_version_of_python():
    """No text of tokens: later versions take f-strings apart."""
    source = "def f(x):\n    # why\n    return f'{x!r:>{3}} # {{}}'  # what\n\n"
    assert code_of(source) == "def f(x):\n    return f'{x!r:>{3}} # {{}}'"


def test_a_csv_gets_columns_that_come_later(tmp_path):
    path = tmp_path / "rows.csv"
    append_row(path, {"a": 1, "b": 2})
    append_row(path, {"a": 3, "sources": "room 01", "left out": 5}, ["a", "sources"])
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"a": "1", "b": "2", "sources": ""},
            {"a": "3", "b": "", "sources": "room 01"},
        ]


def test_committed_rows_name_the_sources_that_they_measured():
    checked = 0
    for folder in ("benchmarks/results", "docs"):
        for path in sorted((REPOSITORY / folder).rglob("*.*")):
            found = []
            if path.suffix == ".csv":
                with path.open(newline="") as file:
                    found = list(csv.DictReader(file))
            elif path.suffix == ".jsonl":
                found = [json.loads(line) for line in path.read_text().splitlines()]
            checked += len(found)
            bare = [row for row in found if (row.get("date") or "") >= FIRST and not row.get("sources")]
            assert not bare, f"{path}: rows without sources, see benchmarks/rows.py: {bare[:1]}"
    assert checked > 1000
