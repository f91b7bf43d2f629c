"""Verdicts of result pages that are written by hand: each of their numbers stands in a cell of the same page."""

import re

import pytest
from conftest import REPOSITORY

VERDICT = re.compile(r"\*\*Verdict\.\*\*.*?(?=\n\n|\n<!--|\n\|)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*[BM]\b)")  # no 66B, 100M


def strangers(text):
    """Numbers of the verdict that no cell has, rounded as they are."""
    cells = " ".join(line for line in text.splitlines() if line.startswith("|"))
    known = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cells)]
    found = []
    for number in NUMBER.findall(VERDICT.search(text)[0]):
        digits = len(number.partition(".")[2])
        if not any(round(each, digits) == float(number.replace(",", "")) for each in known):
            found.append(number)
    return found


def pages():
    for path in sorted((REPOSITORY / "docs" / "results").glob("*.md")):
        match = VERDICT.search(path.read_text(encoding="utf-8"))
        if match and "-verdict -->" not in match.string[: match.start()]:  # those are made from rows
            yield path.name


@pytest.mark.parametrize("name", pages())
def test_a_verdicts_numbers_stand_in_the_tables_of_its_page(name):
    assert strangers((REPOSITORY / "docs" / "results" / name).read_text(encoding="utf-8")) == []


def test_a_number_that_no_cell_has_is_found():
    page = "**Verdict.** At 66B it is 2.1 times, and 3.5 % of 1,200.\n\n| a | 2.08 |\n| b | 1,200 |\n"
    assert strangers(page) == ["3.5"]
