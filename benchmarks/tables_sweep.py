"""The tables of docs/guides/sweeps.md: the runs of examples/sweep.sh, as `dejavu compare` left them."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables_format import Row, markdown, read_csv, several

SWEEP = "docs/results/sweep/compare.csv"
THREE = ("rank-8-at-0.2", "rank-64-at-0.2", "rank-64-at-0.4")


def sweep_table(root: Path) -> str:
    """All runs of the sweep."""
    rows = read_csv(root / SWEEP)
    runs = len({row["experiment"] for row in rows})
    return _table(rows) + f"\nRows: {SWEEP}, of {runs} runs of Weights & Biases.\n"


def three_table(root: Path) -> str:
    """Three of them."""
    rows = read_csv(root / SWEEP)
    return _table([row for name in THREE for row in rows if row["run"] == name]) + f"\nRows: {SWEEP}.\n"


def _table(rows: Sequence[Row]) -> str:
    headings = ["run", "neurons selected, %", "MLP bytes, %", "recall, %", "retained mass, %", "increase, %"]
    cells = []
    for row in rows:
        shares = [
            f"{100 * float(row[key]):.3g}" for key in ("mlp_selected", "mlp_bytes", "mlp_recall", "mlp_retained_mass")
        ]
        time = f"{float(row['ms_per_token']):.3g} ({float(row['ms_p20']):.3g} to {float(row['ms_p80']):.3g})"
        cells.append([row["run"], *shares, several([float(row["increase"])], [float(row["increase_error"])]), time])
    return markdown([*headings, "ms a token, p20 to p80"], cells)


SWEEP_TABLES = {"compared": three_table}
