"""What scripts of benchmarks share: their command line, what stands in every row, CSV files that grow row by row."""

import argparse
import csv
import datetime
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of the script's docstring; no option may be abbreviated."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


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


def made_now() -> dict[str, str]:
    """Commit and date of a row."""
    return {"commit": commit(), "date": datetime.date.today().isoformat()}


def device_name(device: torch.device | str = "cuda") -> str:
    """The GPU's name, or CPU."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"


def gpu_versions() -> dict[str, str]:
    """The GPU, torch and triton."""
    import triton

    return {"gpu": device_name(), "torch": torch.__version__, "triton": triton.__version__}


def append_row(path: str | Path, row: Mapping[str, Any], columns: Sequence[str] = ()) -> None:
    """One row at the end of a CSV, which is made where it is missing.

    columns: the row's own by default; what has no column is left out.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(row), extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow(row)


def five_digits(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its fractions to five significant digits."""
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
