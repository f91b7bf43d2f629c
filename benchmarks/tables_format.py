"""How tables.py and tables_texts.py write numbers, cells and where rows come from."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import is_older

Row = dict[str, str]


class NoRows(Exception):
    """A table's file is there, but none of its rows belongs into the table. The text says what is missing."""


def percent(value: float) -> str:
    """An increase in per cent. From a thousand per cent on, how many times the dense model's value.

    >>> percent(0.0027), percent(0.1234), percent(9.3), percent(12.3)
    ('+0.27', '+12.3', '+930', '13-fold')
    """
    return f"{1 + value:,.0f}-fold" if value >= 10 else f"{100 * value:+z.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 1 else 1 if abs(value) >= 0.1 else 2


def card(row: Row) -> str:
    """A row's GPU without its maker.

    >>> card({"gpu": "NVIDIA H100 80GB HBM3"})
    'H100'
    """
    return row["gpu"].removeprefix("NVIDIA ").partition(" ")[0]


def verdict(over: float) -> str:
    """Of what was measured over its goal.

    >>> verdict(0.97), verdict(1.07)
    ('met', 'missed by 7 %')
    """
    return "met" if over <= 1 else f"missed by {100 * (over - 1):.0f} %"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def several(values: Sequence[float], errors: Sequence[float | None]) -> str:
    """One increase with its error, or the mean of several with their range, in per cent. Nothing for none.

    >>> several([0.1234], [0.011]), several([0.01, 0.03], [None, None])
    ('+12.3 ± 1.1', '+2.00 (+1.00 to +3.00)')
    """
    if len(values) > 1:
        return f"{percent(mean(values))} ({percent(min(values))} to {percent(max(values))})"
    if not values:
        return ""
    error = errors[0] if values[0] < 10 else None
    return percent(values[0]) + ("" if error is None else f" ± {100 * error:.{_decimals(values[0])}f}")


def share_range(shares: Sequence[float]) -> str:
    """Smallest and largest of some fractions, in per cent."""
    low, high = f"{100 * min(shares):.1f}", f"{100 * max(shares):.1f}"
    return low if low == high else f"{low} to {high}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its last line ended."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |".replace("  ", " ") + "\n" for cells in lines)


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


OLDER = re.compile(r" \((?:all|\d+) of \d+ rows older than the sources\)")


def age(rows: Sequence[Mapping[str, Any]]) -> str:
    """The mark of a table whose rows measured other sources than those that stand here. Empty for new rows."""
    older = sum(map(is_older, rows))
    return f" ({older} of {len(rows)} rows older than the sources)" if older else ""


def devices(rows: Sequence[Row], field: str = "gpu") -> str:
    """The devices of rows, with the version of torch, and the mark of older rows."""
    return " and ".join(sorted({f"{row[field]}, torch {row['torch'].partition('+')[0]}" for row in rows})) + age(rows)


def provenance(rows: Sequence[Row], field: str = "gpu") -> str:
    """Devices, commits and dates of rows."""
    return f"{devices(rows, field)}. {commits(rows)}"


def commits(rows: Sequence[Mapping[str, Any]]) -> str:
    """The commits of rows with their dates, oldest first."""
    made = sorted({(row["date"], row["commit"]) for row in rows})
    return "Commits: " + ", ".join(f"{commit} of {date}" for date, commit in made)
