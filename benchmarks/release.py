"""Checks a release and tags it: make release, make tag

    python -m benchmarks.release          says what the release says, and exits with 1 where something is missing
    python -m benchmarks.release --fold   moves what CHANGELOG.md has under Unreleased into the section of the version
    python -m benchmarks.release --tag    the same check, then an annotated tag with these words

The demo's rows must have measured the sources of the release: anybody makes them again in ten minutes. Rows of other
tables need a GPU, quiet cores or days. They may be older, and the release names them.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rows import ROOT, command_line
from benchmarks.tables import FILES, MARKED, OLDER, fill

CHANGELOG = "CHANGELOG.md"
MUST_BE_NEW = ("demo",)
SECTION = re.compile(r"^## \[(.+?)\].*$", re.M)


def older_tables() -> Iterator[tuple[str, str, str]]:
    """(table, page, how many rows) of every table that shows rows of other sources."""
    for page in FILES:
        for table in MARKED.finditer(fill((ROOT / page).read_text("utf-8"), ROOT, page)):
            yield from ((table[2], page, mark) for mark in OLDER.findall(table[3]))


def sections(changelog: str) -> dict[str, str]:
    """Name of a release -> what stands below its heading."""
    headings = list(SECTION.finditer(changelog))
    ends = [*(match.start() for match in headings[1:]), len(changelog)]
    return {match[1]: changelog[match.end() : end].strip() for match, end in zip(headings, ends, strict=True)}


def parts(section: str) -> dict[str, str]:
    """Added, Changed and so on -> what stands below it."""
    pieces = re.split(r"^### (.+)$", section, flags=re.M)[1:]
    return {kind: text.strip() for kind, text in zip(pieces[::2], pieces[1::2], strict=True)}


def folded(changelog: str, version: str) -> str:
    """``changelog`` with the lines of Unreleased behind those of the version, kind by kind.

    >>> later = "## [Unreleased]\\n\\n### Added\\n\\n- b\\n\\n"
    >>> print(folded(later + "## [1.0.0] - today\\n\\n### Added\\n\\n- a\\n", "1.0.0"))
    ## [Unreleased]
    <BLANKLINE>
    ## [1.0.0] - today
    <BLANKLINE>
    ### Added
    <BLANKLINE>
    - a
    - b
    <BLANKLINE>
    """
    written = sections(changelog)
    if not written.get("Unreleased"):
        return changelog
    merged = parts(written[version])
    for kind, text in parts(written["Unreleased"]).items():
        before = merged.get(kind, "")
        grouped = any(line.endswith(":") or line.startswith("|") for line in before.splitlines())
        merged[kind] = before + ("\n\nBesides:\n\n" if grouped else "\n" if before else "") + text
    order = [kind for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security") if kind in merged]
    whole = "".join(f"\n### {kind}\n\n{merged[kind]}\n" for kind in order)
    start = re.search(r"^## \[Unreleased\]", changelog, re.M)
    heading = re.search(rf"^## \[{re.escape(version)}\].*\n", changelog, re.M)
    assert start and heading
    end = changelog.find("\n## [", heading.end())
    return (
        changelog[: start.start()] + "## [Unreleased]\n\n" + heading[0] + whole + ("" if end < 0 else changelog[end:])
    )


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--fold", action="store_true", help="move Unreleased into the section of the version")
    parser.add_argument("--tag", action="store_true", help="make the annotated tag when nothing is missing")
    options = parser.parse_args(argv)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    changelog = (ROOT / CHANGELOG).read_text("utf-8")
    if options.fold:
        Path(ROOT / CHANGELOG).write_text(folded(changelog, version), "utf-8")
        print(f"{CHANGELOG}: Unreleased is part of {version}; commit it")
        return 0
    found, missing = sections(changelog), []
    if version not in found:
        missing.append(f"{CHANGELOG} has no section of {version}; write it")
    if found.get("Unreleased"):
        missing.append(f"{CHANGELOG} has lines under Unreleased; python -m benchmarks.release --fold moves them")
    lines = [f"dejavu_train {version}", "", found.get(version, ""), ""]
    older = list(older_tables())
    lines += ["Tables with rows of earlier sources:", ""] * bool(older)
    for table, page, mark in older:
        lines.append(f"- {page}, {table}: {mark}")
        if table in MUST_BE_NEW:
            missing.append(f"{page}, table {table}: {mark}; run what its last line names")
    words = "\n".join(lines).strip() + "\n"
    if not options.tag:
        print(words)
    elif git("status", "--porcelain", "--untracked-files=no"):
        missing.append("the working tree differs from its commit; commit what belongs to the release")
    elif git("tag", "--list", f"v{version}"):
        missing.append(f"the tag v{version} is there; raise the version in pyproject.toml, or delete the tag")
    if missing:
        print("not ready:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    if options.tag:
        git("tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", words)
        print(f"tagged v{version}; git show v{version} shows its words, git push origin v{version} publishes it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
