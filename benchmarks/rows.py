"""What scripts of benchmarks share: their command line, what stands in every row, files that grow row by row."""

import argparse
import ast
import csv
import datetime
import functools
import hashlib
import io
import json
import os
import subprocess
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of the script's docstring. No option may be abbreviated."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def needs_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends with one line and exit code 2 where torch finds no GPU."""
    if not torch.cuda.is_available():
        parser.exit(2, f"error: {parser.prog} times kernels on a CUDA device, and torch found none\n")


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


@functools.cache  # many sets of sources have files in common
def code_of(source: str) -> str:
    """Python without comments, docstrings and blank lines, the same for every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def measured_sources(*parts: str) -> str:
    """Files and folders of the repository and a hash over code and settings: ``kernels dejavu_train/engine 0123abcd``.

    Settings are the JSON files of a folder.
    """
    digest = hashlib.sha256()
    for part in parts:
        for path in sorted((ROOT / part).rglob("*.*")) if (ROOT / part).is_dir() else [ROOT / part]:
            if path.suffix in (".py", ".json"):
                text = path.read_text("utf-8")
                code = code_of(text) if path.suffix == ".py" else text
                digest.update(f"{path.relative_to(ROOT).as_posix()}\n{code}\n".encode())
    return " ".join((*parts, digest.hexdigest()[:12]))


def is_older(row: Mapping[str, Any]) -> bool:
    """Whether the sources that a row measured have changed since, or are not known."""
    parts = str(row.get("sources") or "").split()[:-1]
    return not all((ROOT / part).exists() for part in parts) or row.get("sources") != measured_sources(*parts)


def made_now(*parts: str) -> dict[str, str]:
    """Commit, date and sources of a row.

    parts: files and folders of the repository whose code the row measures.
    """
    return {"commit": commit(), "date": datetime.date.today().isoformat(), "sources": measured_sources(*parts)}


def device_name(device: torch.device | str = "cuda") -> str:
    """The GPU's name, or CPU."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"


def gpu_versions() -> dict[str, str]:
    """The GPU, torch and triton."""
    import triton

    return {"gpu": device_name(), "torch": torch.__version__, "triton": triton.__version__}


def append_row(path: str | Path, row: Mapping[str, Any], columns: Sequence[str] = ()) -> None:
    """One row at the end of a CSV, which is made where it is missing. Earlier rows have nothing in new columns.

    columns: those of the row by default. What has no column is left out.
    """
    path, names = Path(path), list(columns or row)
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier: list[dict[str, str]] = []
    before: list[str] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            before, earlier = list(reader.fieldnames or ()), list(reader)
    names = before + [name for name in names if name not in before]
    if names != before:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(earlier)
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, names, extrasaction="ignore").writerow(row)


def append_json(path: str | Path | None, row: Mapping[str, Any]) -> None:
    """Print a row as a line of JSON, and write it at the end of a file, if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def five_digits(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its fractions to five significant digits."""
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
