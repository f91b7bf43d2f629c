"""Writes the tables of README.md, the model card, the plug-in and docs/ from committed rows: make tables

    python -m benchmarks.tables             writes them
    python -m benchmarks.tables --check     writes nothing, exits with 1 where a file would change
    python -m benchmarks.tables --demo checkpoints/demo/results.json    takes the demo's rows, draws, writes

A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``. What stands there is replaced. A table
whose rows do not exist is left empty, and one line says so. Sentences of a verdict are such a table. No number of a
table is typed by hand. It is a field of a row, or a mean, a range, a ratio or a difference of such fields.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import ROOT, command_line, measured_sources
from benchmarks.table_maker import NoRows, Table
from benchmarks.table_specs import DEMO, TABLES
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.schema import current

FILES = (
    "README.md",
    *(f"docs/guides/{name}.md" for name in ("families", "lossless", "sweeps")),
    *(f"docs/results/{name}.md" for name in "demo families serving speed texts".split()),
    *(f"docs/notes/{name}.md" for name in ("lossless", "one-model")),
    "checkpoints/opt-mini/README.md",
    "packages/dejavu-vllm/README.md",
)
CURVE = "docs/results/curve.png"
DEMO_SOURCES = ("dejavu_train.run.pipeline", "dejavu_train.evaluation.run")
LINKED = re.compile(r"\]\(([^):]+)\)")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OLDER = re.compile(r" (\d+ of \d+ rows are older) than the sources\.")


def fill(text: str, root: Path, page: str = "README.md") -> str:
    """``text`` with every table made anew. One whose rows are missing becomes empty, so that no withdrawn row is shown.

    page: where the text stands below ``root``. Tables link files from the root, and a page from its own folder.

    Raises:
        KeyError: a marker names no table.
    """

    folder = Path(page).parent

    def from_page(match: re.Match[str]) -> str:
        return f"]({os.path.relpath(match[1], folder)})"

    def table(match: re.Match[str]) -> str:
        spec = TABLES[match[2]]
        try:
            made = spec.make(root) if isinstance(spec, Table) else spec(root)
            return f"{match[1]}\n{LINKED.sub(from_page, made)}\n{match[4]}"
        except (FileNotFoundError, NoRows) as error:
            why = error if isinstance(error, NoRows) else f"no {error.filename}"
            print(f"table {match[2]}: {why}, left empty", file=sys.stderr)
            return f"{match[1]}{match[4]}"

    return MARKED.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where text and rows disagree")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="results.json that `make demo` wrote just now")
    options = parser.parse_args(argv)
    if options.demo:
        results = json.loads(options.demo.read_text()) | {"sources": measured_sources(*DEMO_SOURCES)}
        (ROOT / DEMO).write_text(json.dumps(results, indent=1) + "\n")
        plot_curves(current(results), ROOT / CURVE)
    changed = []
    for name in FILES:
        path = ROOT / name
        before = path.read_text()
        after = fill(before, ROOT, name)
        if (OLDER.sub("", after) != OLDER.sub("", before)) if options.check else after != before:
            changed.append(name)
            if not options.check:
                path.write_text(after)
    print(f"{'differ from their rows' if options.check else 'written'}: {', '.join(changed) or 'none'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
