"""Reads frontier.csv, writes a PNG beside it: perplexity increase against the share of the MLP's bytes."""

import csv
import itertools
import math
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


def picked(rows: list[dict[str, str]], chosen_on: list[dict[str, str]]) -> list[tuple[float, float]]:
    """One point per budget of a family of variants: the variant with the least divergence on ``val`` there.

    Args:
        rows: test rows of the family.
        chosen_on: its rows on ``val``. Without any, as for training-free baselines, the best on test is drawn,
            which flatters them.
    Returns: (share of bytes, increase), rising in bytes.
    """
    known: dict[str, list[tuple[float, float]]] = {}
    for row in chosen_on:
        known.setdefault(row["method"], []).append((float(row["mlp_share"]), float(row["kl"])))

    def divergence(row: dict[str, str]) -> float:
        points = sorted(known.get(row["method"], []))
        if not points:
            return math.inf
        x = float(row["mlp_share"])
        for (left, low), (right, high) in itertools.pairwise(points):
            if left <= x <= right:
                part = (x - left) / max(right - left, 1e-9)
                return math.exp((1 - part) * math.log(low + 1e-9) + part * math.log(high + 1e-9))
        nearest = min(points, key=lambda point: abs(point[0] - x))
        return nearest[1] if abs(nearest[0] - x) < 0.012 else math.inf

    budgets: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        budgets.setdefault(row["asked"] or f"{float(row['mlp_share']):.2f}", []).append(row)
    found = []
    for found_rows in budgets.values():
        judged = [row for row in found_rows if divergence(row) < math.inf] if known else found_rows
        best = [min(judged, key=divergence)] if known and judged else judged
        found += [(float(row["mlp_share"]), float(row["increase"])) for row in best]
    return sorted(found) if known else envelope(found)


FAMILIES = (
    ("oracle", "black", lambda m: m == "oracle"),
    ("random", "lightgrey", lambda m: m == "random"),
    ("static", "grey", lambda m: m == "static"),
    ("non-contextual", "rosybrown", lambda m: m == "non-contextual"),
    ("original recipe, shared out", "tab:red", lambda m: m == "original recipe"),
    ("one predictor for all", "tab:pink", lambda m: m.startswith("one predictor")),
    ("SVD", "tab:orange", lambda m: m.startswith("SVD")),
    ("data-aware SVD", "gold", lambda m: m.startswith("data-aware SVD")),
    ("fc1 in few bits", "tab:olive", lambda m: m.startswith("fc1 in")),
    ("trained layer by layer", "tab:blue", lambda m: m.startswith("layer by layer")),
    ("tuned in the model", "tab:green", lambda m: m.startswith("tuned")),
    ("cascade", "tab:cyan", lambda m: m.startswith("cascade") and "tuned" not in m),
    ("cascade, tuned in the model", "tab:purple", lambda m: m.startswith("cascade") and "tuned" in m),
)


def draw(path: Path) -> Path:
    """One picture of a table; matplotlib is needed here only.

    Raises:
        UserError: no such table, or no matplotlib.
    """
    rows = [
        row
        for row in read_rows(path)
        if row["section"] in ("reference", "svd", "sketch", "trained", "cascade")
        and row["set"] in ("test", "val")
        and (row["sharing"] == "measured" or (row["sharing"] == "as trained" and row["section"] == "cascade"))
    ]
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'dejavu-train[train]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5))
    for label, colour, belongs in FAMILIES:
        own = [row for row in rows if belongs(row["method"])]
        points = picked([row for row in own if row["set"] == "test"], [row for row in own if row["set"] == "val"])
        points = [(100 * x, 100 * y) for x, y in points if y > 1e-4 and x <= 0.3]
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
