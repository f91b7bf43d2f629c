"""Draws ms a token over the share of active neurons: all rows read, silent ones left out, and by predictors.

python -m benchmarks.break_even        reads benchmarks/results/exact.csv, writes docs/pictures/break-even.svg
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from benchmarks.rows import ROOT, command_line
from benchmarks.table_maker import read_rows
from benchmarks.table_specs import EXACT, IN_ONE, weights_of

MODELS = {"6.7b": "OPT-6.7B", "afm-4.5b": "AFM-4.5B", "prosparse-7b": "ProSparse-7B"}
LINES = {"dense": ("all rows read", "0.5"), "exact": ("silent neurons left out", "C0"), "sparse": ("predicted", "C1")}
PICTURE = ROOT / "docs/pictures/break-even.svg"


def points(root: Path, model: str, weights: str, engine: str) -> list[tuple[float, float]]:
    """(active share, ms) of one row with all heads, the fastest of each share."""
    best: dict[float, float] = {}
    chains = (row for row in read_rows(root / EXACT) if row["p50_ms"] and IN_ONE not in row["note"])
    for row in chains:
        kind = (row["model"], weights_of(row), row["engine"], row["batch"])
        if kind == (model, weights, engine, "1") and float(row["head_union"]) == 1:
            share, ms = round(float(row["active"]), 2), float(row["p50_ms"])
            best[share] = min(ms, best.get(share, ms))
    return sorted(best.items())


def main() -> int:
    command_line(__doc__).parse_args()
    plt.rcParams["svg.hashsalt"] = "break-even"  # the same picture has the same bytes
    figure, panels = plt.subplots(2, len(MODELS), figsize=(10, 5.4), sharex=True)
    for column, (model, title) in enumerate(MODELS.items()):
        for panel, weights in zip(panels[:, column], ("fp16", "4 bits"), strict=True):
            for engine, (label, colour) in LINES.items():
                found = points(ROOT, model, weights, engine)
                if engine == "dense" and found:  # reads the same whatever is active
                    panel.axhline(found[0][1], color=colour, linestyle="--", label=label)
                elif found:
                    shares, ms = zip(*found, strict=True)
                    panel.plot([100 * share for share in shares], ms, "o-", color=colour, label=label)
            panel.set_title(f"{title}, {weights}", fontsize=10)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    for panel in panels[1]:
        panel.set_xlabel("active neurons, %")
    for panel in panels[:, 0]:
        panel.set_ylabel("ms per token, one H200")
    panels[0, 0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
