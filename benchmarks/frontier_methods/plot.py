"""Reads frontier.csv, writes a PNG beside it: perplexity increase against the share of the MLP's bytes."""

import csv
from pathlib import Path

from dejavu_train.errors import UserError


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table.

    Raises:
        UserError: no such file.
    """
    if not path.is_file():
        raise UserError(f"there is no table {path}; run benchmarks/frontier.py --model ... first")
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def envelope(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest increase reached at each number of bytes or fewer.

    >>> envelope([(0.1, 2.0), (0.2, 3.0), (0.3, 1.0)])
    [(0.1, 2.0), (0.3, 1.0)]
    """
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


FAMILIES = (
    ("oracle", "black", lambda m: m == "oracle"),
    ("random", "lightgrey", lambda m: m == "random"),
    ("static", "grey", lambda m: m == "static"),
    ("non-contextual", "rosybrown", lambda m: m == "non-contextual"),
    ("original recipe", "tab:red", lambda m: m == "original recipe"),
    ("one predictor for all", "tab:pink", lambda m: m.startswith("one predictor")),
    ("SVD", "tab:orange", lambda m: m.startswith("SVD")),
    ("data-aware SVD", "gold", lambda m: m.startswith("data-aware SVD")),
    ("fc1 in few bits", "tab:olive", lambda m: m.startswith("fc1 in")),
    ("trained layer by layer", "tab:blue", lambda m: m.startswith("layer by layer")),
    ("tuned in the model", "tab:green", lambda m: m.startswith("tuned")),
)


def draw(path: Path) -> Path:
    """One picture of a table; matplotlib is needed here only.

    Raises:
        UserError: no such table, or no matplotlib.
    """
    rows = [
        row
        for row in read_rows(path)
        if row["set"] == "report" and row["section"] in ("reference", "svd", "sketch", "trained") and row["increase"]
    ]
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'dejavu-train[train]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5))
    for label, colour, belongs in FAMILIES:
        points = [(100 * float(r["mlp_share"]), 100 * float(r["increase"])) for r in rows if belongs(r["method"])]
        points = [(x, y) for x, y in envelope(points) if y > 0.01 and x <= 30]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=label)
    axes.set(xlabel="MLP bytes read per token, % of dense", ylabel="perplexity increase, %", yscale="log", xlim=(0, 28))
    for level in (1.0, 0.3):
        axes.axhline(level, color="grey", lw=0.6, ls=":")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    axes.set_title(f"{rows[0]['model']}, {rows[0]['text']}" if rows else path.stem)
    target = path.with_suffix(".png")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target
