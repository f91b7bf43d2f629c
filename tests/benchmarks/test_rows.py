"""Rows of measurements: the sources that they measured, their hash, and columns that come later."""

import csv
import json

import pytest
from conftest import REPOSITORY

from benchmarks import rows
from benchmarks.rows import append_row, code_of, is_older, made_now, measured_sources
from benchmarks.tables_format import OLDER, age

FIRST = "2026-11-27"  # rows of earlier days may lack their sources


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A repository of one module."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "module.py").write_text('"""Adds."""\n\n\ndef add(a, b):\n    return a + b\n')
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    measured_sources.cache_clear()
    yield tmp_path / "room" / "module.py"
    measured_sources.cache_clear()


def test_a_row_is_older_when_code_changed_and_not_when_words_did(sources):
    row = made_now("room")
    assert row["sources"].startswith("room ") and not is_older(row) and age([row]) == ""
    sources.write_text('"""Adds two\nnumbers."""\n\ndef add(a, b):  # both\n    """Their sum."""\n    return a + b\n')
    measured_sources.cache_clear()
    assert not is_older(row)
    sources.write_text(sources.read_text().replace("a + b", "b + a"))
    measured_sources.cache_clear()
    assert is_older(row) and is_older({}) and is_older({"sources": ""}) and is_older({"sources": "gone 0123456789ab"})
    assert OLDER.fullmatch(age([row, made_now("room"), {}])).group().startswith(" (2 of 3 rows")


def test_a_row_is_older_when_settings_changed(sources):
    settings = sources.with_name("h200.json")
    settings.write_text('{"warps": 4}')
    row = made_now("room")
    assert not is_older(row)
    settings.write_text('{"warps": 8}')
    measured_sources.cache_clear()
    assert is_older(row)


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
