"""Rows of benchmarks: which commit they were made at, and CSV files that grow row by row."""

import csv
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit measured: DEJAVU_COMMIT where the tree travels without its history, else git's."""
    named = os.environ.get("DEJAVU_COMMIT")
    if named:
        return named
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append_row(path: str | Path, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """One row at the end of a CSV, which is made where it is missing; what has no column is left out."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow(row)


def five_digits(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its fractions to five significant digits."""
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
