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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# What timed things enter by: steps on a GPU and on a CPU, a server, and whatever scores a model without an engine.
STEP = ("dejavu_train.engine.decode", "dejavu_train.kernels.settings")
CPU_STEP = ("dejavu_train.engine.cpu.engine",)
SERVER = ("dejavu_train.extras.serving.server", *STEP, *CPU_STEP)
SCORE = ("dejavu_train.evaluation.perplexity", "dejavu_train.sparse.masked")


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


def _file_of(module: str) -> Path | None:
    """The file of a module of the repository, found by its name. None for modules of other packages."""
    paths = [root.joinpath(*module.split(".")) for root in (ROOT, ROOT / "packages" / "dejavu-vllm")]
    files = [file for path in paths for file in (path.with_name(f"{path.name}.py"), path / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _imports(file: Path, module: str) -> Iterator[str]:
    """Names of the modules that a file imports anywhere, but for the types of annotations."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(file.read_text("utf-8"))
    typing = (each for each in ast.walk(tree) if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test))
    left_out = {inner for each in typing for part in each.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in left_out:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in left_out:
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{name}.{alias.name}" if _file_of(f"{name}.{alias.name}") else name


@functools.cache
def _read(module: str) -> tuple[str, frozenset[str]]:
    """A module's code, with the JSON files of a package, and the modules of the repository that it imports."""
    file = _file_of(module)
    if file is None:
        raise ValueError(f"{module} is no module of this repository")
    texts = [code_of(file.read_text("utf-8"))]
    if file.name == "__init__.py":
        texts += [path.read_text("utf-8") for path in sorted(file.parent.glob("*.json"))]
    return "\n".join(texts), frozenset(name for name in _imports(file, module) if _file_of(name))


@functools.cache
def measured_sources(*modules: str) -> str:
    """Modules and a hash over what runs: ``dejavu_train.engine.decode 0123abcd``.

    Hashed are these modules and what they import of the repository, whatever imports it in turn. Comments and
    docstrings do not count. Settings, which are JSON files of a package, do.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module], imported = _read(module)
            waiting += imported
    whole = "".join(f"{module}\n{found[module]}\n" for module in sorted(found))
    return " ".join((*modules, hashlib.sha256(whole.encode()).hexdigest()[:12]))


def is_older(row: Mapping[str, Any]) -> bool:
    """Whether the sources that a row measured have changed since, or are not known."""
    modules = str(row.get("sources") or "").split()[:-1]
    if not modules or not all(_file_of(module) for module in modules):
        return True
    return row.get("sources") != measured_sources(*modules)


def made_now(*modules: str) -> dict[str, str]:
    """Commit, date and sources of a row.

    modules: those that the timed thing enters by, such as ``dejavu_train.engine.decode``.
    """
    return {"commit": commit(), "date": datetime.date.today().isoformat(), "sources": measured_sources(*modules)}


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
