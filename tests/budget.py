"""Counts lines of code files by room, and words of pages, and compares them with budget.toml.

    python tests/budget.py                 exits with 1 where a room is above its budget, and prints the room
    python tests/budget.py 5dc7270d        a table: that commit, this tree, the budget

A line is a line of a .py, .sh, .cu or .cuh file that git knows. Raising a number is a commit of its own that says what
left.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS, EXTRAS, PLUGIN = "dejavu_train/kernels", "dejavu_train/extras", "packages/dejavu-vllm"
# Rooms of the package as they were called before extras had a folder of their own.
BEFORE = {
    "kernels": KERNELS,
    "dejavu_train/serving": EXTRAS,
    "dejavu_train/evaluation/survey": EXTRAS,
    "dejavu_train/evaluation/generation": EXTRAS,
    "dejavu_train/evaluation/lm_eval": EXTRAS,
    "dejavu_train/training/pretrain": EXTRAS,
}


def room_of(path: str) -> str:
    """The room whose budget a file counts for. "" where it counts for none."""
    for old, new in BEFORE.items():
        if path.startswith(f"{old}/"):
            return new
    if path.startswith(f"{PLUGIN}/") and path.endswith((".py", ".sh", ".cu", ".cuh")):
        return "tests" if path.startswith(f"{PLUGIN}/tests/") else PLUGIN
    top, *rest = path.split("/")
    if path.endswith(".md"):
        return "docs, words" if top == "docs" else ""
    if top == "dejavu_train":
        return f"{top}/{rest[0]}" if len(rest) > 1 else "dejavu_train, loose"
    return top if rest and top in ("benchmarks", "papers", "tests") else ""


def files(commit: str | None) -> Iterator[tuple[str, str]]:
    """(path, text) of the files that count, of the working tree or of a commit."""
    if commit is None:
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            if (
                name.endswith((".py", ".sh", ".cu", ".cuh", ".md"))
                and (ROOT / name).is_file()
                and not (ROOT / name).is_symlink()
            ):
                yield name, (ROOT / name).read_text("utf-8")
        return
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["git", "archive", commit], cwd=ROOT))) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith((".py", ".sh", ".cu", ".cuh", ".md")):
                yield member.name, file.read().decode("utf-8")


def count(commit: str | None = None) -> dict[str, int]:
    """Lines of every room, words of pages, and the sum of the core: the package without kernels and extras."""
    found: dict[str, int] = {}
    for name, text in files(commit):
        room = room_of(name)
        size = len(text.split()) if name.endswith(".md") else text.count("\n")
        found[room] = found.get(room, 0) + size
    found.pop("", None)
    core = [room for room in found if room.startswith("dejavu_train") and room not in (KERNELS, EXTRAS)]
    return dict(sorted(found.items())) | {"core": sum(found[room] for room in core)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="to compare with")
    commit = parser.parse_args(argv).commit
    budget: dict[str, int] = tomllib.loads((ROOT / "budget.toml").read_text("utf-8"))
    now = count()
    if commit:
        before = count(commit)
        print(f"| room | {commit} | now | budget |\n| --- | --- | --- | --- |")
        for room in sorted({*before, *now, *budget}):
            print(f"| {room} | {before.get(room, 0):,} | {now.get(room, 0):,} | {budget.get(room, 0):,} |")
    above = [room for room in now if now[room] > budget.get(room, 0)]
    for room in above:
        print(f"{room}: {now[room]:,}, and budget.toml has {budget.get(room, 0):,}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
