"""Rows of the paper's tables with their conditions: python -m papers.deja_vu.record [picture] [--option value ...]

Takes the options of `python -m papers.deja_vu.tables`. Appends rows, as they come, to paper.csv in
papers/deja_vu/results (or in the folder that DEJAVU_RESULTS names). `picture`, which takes no options, draws paper.svg
and paper.png there from the newest rows of `fig7`.
"""

import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import append_row, five_digits
from benchmarks.tasks import conditions
from dejavu_train.extras.tasks.tasks import quiet
from dejavu_train.ground.errors import exit_on_user_error
from papers.deja_vu.tables import paper, read_config
from papers.deja_vu.trend import plot_trend

RESULTS = Path(os.environ.get("DEJAVU_RESULTS", Path(__file__).parent / "results"))


def newest_trend(path: Path) -> list[dict[str, Any]]:
    """Of paper.csv, for the model of its last row, the last row of every point of ``fig7``. Numbers as numbers."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points: dict[tuple[str, ...], dict[str, Any]] = {}
    identity = ("selection", "asked_mlp_density", "asked_head_density", "task", "shots", "metric")
    numbers = ("total_sparsity", "value", "dense", "error")
    for row in rows:
        if row["table"] == "fig7" and row["model"] == rows[-1]["model"]:
            point = row | {name: float(row[name] or 0) for name in numbers} | {"shots": int(row["shots"])}
            points[tuple(row[name] for name in identity)] = point
    return list(points.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Raises :class:`UserError` for what the user can mend."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags == ["picture"]:
        plot_trend(newest_trend(RESULTS / "paper.csv"), RESULTS / "paper")
        return
    quiet()
    config = read_config(flags, "python -m papers.deja_vu.record")
    shared = conditions(config)  # the commit at the start: a run may outlast it
    for rows in paper(config):
        for row in rows:
            append_row(RESULTS / "paper.csv", five_digits(row.flat()) | shared)
        print(f"appended {len(rows)} rows to {RESULTS / 'paper.csv'}", flush=True)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
