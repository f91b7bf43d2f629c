"""Counts code lines: no comments, docstrings or blanks, in the formatting that stands there.

    python tests/count_lines.py                 this tree
    python tests/count_lines.py 2de014c         a commit beside it, and the change in per cent

A line counts where a token of code stands on it. A text that is a statement of its own, as a docstring is, does not.
"""

import argparse
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {  # name -> where its files lie
    "library": ("dejavu_train/", "train.py", "infer.py"),
    "kernels": ("kernels/",),
    "papers": ("papers/",),
    "benchmarks": ("benchmarks/",),
    "tests": ("tests/",),
}
SUMS = (("library", "papers"), ("library", "kernels"), ("library", "kernels", "papers"))
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            statement.append(token)
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if any(each.type != tokenize.STRING for each in statement):
                lines.update(line for each in statement for line in range(each.start[0], each.end[0] + 1))
            statement = []
    return len(lines)


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """(path, text) of every Python file that git knows, of the working tree or of a commit."""
    if commit is None:
        known = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
        yield from ((name, (ROOT / name).read_text("utf-8")) for name in known if (ROOT / name).is_file())
        return
    archive = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files.getmembers():
            file = files.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode("utf-8")


def count(commit: str | None = None) -> dict[str, int]:
    """Code lines of every part, and sums of some."""
    found = dict.fromkeys(PARTS, 0)
    for name, source in sources(commit):
        for part, places in PARTS.items():
            found[part] += code_lines(source) if name.startswith(places) else 0
    return found | {" + ".join(parts): sum(found[part] for part in parts) for parts in SUMS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="to compare with")
    commit = parser.parse_args(argv).commit
    now, before = count(), count(commit) if commit else {}
    print(f"| code lines | {f'{commit} | now | change' if commit else 'now'} |")
    print("| --- |" + " --- |" * (3 if commit else 1))
    for name, lines in now.items():
        change = f"{100 * (lines / before[name] - 1):+.1f} %" if before.get(name) else ""
        print(f"| {name} | {f'{before[name]:,} | {lines:,} | {change}' if commit else f'{lines:,}'} |")


if __name__ == "__main__":
    main()
