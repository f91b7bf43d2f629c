"""Draws whole-block bytes against perplexity, fp16 and 4 bits, dense and sparse, from docs/frontier/int4.csv.

    python -m benchmarks.quantize_plot [MODEL]      docs/frontier/MODEL-int4.png, MODEL is opt-mini

A panel for each text that has sparse rows; of rows measured twice the newest, over seeds their mean. The line goes
through what no other point beats, in bytes and perplexity both.
"""

import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FRONTIER = Path(__file__).resolve().parents[1] / "docs" / "frontier"
KIND = ("text", "weights", "predictors", "asked_mlp", "asked_heads")
STYLES = {  # by weights and whether the heads are all kept; hollow marks: selected heads
    ("fp16", "none"): ("fp16, dense", "s", "black"),
    ("gptq", "none"): ("4 bits, dense", "s", "tab:red"),
    ("fp16", "before"): ("fp16, sparse", "o", "black"),
    ("gptq", "before"): ("4 bits, sparse", "o", "tab:red"),
    ("gptq", "after"): ("4 bits, sparse, predictors trained after quantising", "^", "tab:blue"),
}
COLUMNS = 4  # panels side by side
Row = Mapping[str, str]
Point = tuple[float, float, float]  # bytes over those of fp16, increase of perplexity and its error, in per cent


def kinds_of(rows: Iterable[Row], model: str) -> dict[tuple[str, ...], list[Row]]:
    """The report's rows of a model by what they measured: the newest of each seed."""
    newest = {
        (*(row[name] for name in KIND), row["seed"]): row
        for row in rows
        if row["what"] == "report" and row["model"] == model
    }
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for (*kind, _), row in newest.items():
        kinds.setdefault(tuple(kind), []).append(row)
    return kinds


def point_of(found: Sequence[Row]) -> Point:
    """Means over seeds, the largest of their errors."""
    mean = {name: sum(float(row[name]) for row in found) / len(found) for name in ("block_bytes", "increase")}
    error = max(float(row["error"] or 0) for row in found)
    return 100 * mean["block_bytes"], 100 * math.expm1(mean["increase"]), 100 * math.exp(mean["increase"]) * error


def unbeaten(points: Iterable[Point]) -> list[Point]:
    """Those for which no other has fewer bytes and a smaller increase, by bytes."""
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def draw(rows: Iterable[Row], model: str, target: Path) -> None:
    """Write the picture of a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = kinds_of(rows, model)
    texts = list(dict.fromkeys(kind[0] for kind in kinds if kind[3] != "1"))
    if not texts:
        raise SystemExit(f"error: no sparse rows of {model}")
    lines = math.ceil(len(texts) / COLUMNS)
    columns = math.ceil(len(texts) / lines)
    size = (4.2 * columns, 3.9 * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(texts) :]:
        axis.set_visible(False)
    for axis, text in zip(axes.flat, texts, strict=False):
        own = {kind[1:]: point_of(found) for kind, found in kinds.items() if kind[0] == text and kind[1:3] in STYLES}
        best = unbeaten(own.values())
        axis.plot([p[0] for p in best], [p[1] for p in best], "-", color="grey", linewidth=1, label="best of all")
        for style, (label, marker, colour) in STYLES.items():
            for whole in (True, False):
                points = [p for kind, p in own.items() if kind[:2] == style and (kind[3] == "1") == whole]
                if not points:
                    continue
                x, y, error = zip(*points, strict=True)
                fill = colour if whole else "white"
                name = label if whole else f"{label}, selected heads"
                axis.errorbar(x, y, error, fmt=marker, color=colour, mfc=fill, markersize=5, elinewidth=0.8, label=name)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_xticks([10, 12, 15, 20, 26, 40, 60, 100], labels=["10", "12", "15", "20", "26", "40", "60", "100"])
        axis.minorticks_off()
        axis.set_title(text)
        axis.set_xlabel("bytes of the blocks, % of fp16")
    for axis in axes[:, 0]:
        axis.set_ylabel("increase of perplexity, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{model}: whole blocks, scales and predictors included")
    figure.savefig(target, dpi=110)


def main(argv: Sequence[str]) -> int:
    model = argv[0] if argv else "opt-mini"
    with (FRONTIER / "int4.csv").open(newline="", encoding="utf-8") as file:
        draw(csv.DictReader(file), model, FRONTIER / f"{model}-int4.png")
    print(FRONTIER / f"{model}-int4.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
