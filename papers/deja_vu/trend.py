"""Draws rows of ``fig7``: mean accuracy and perplexity over the total sparsity, predicted and oracle."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import CURVES, make_panels, pyplot, save

COLUMNS = 3


def plot_trend(rows: Sequence[dict[str, Any]], stem: Path) -> bool:
    """A panel for the mean accuracy at every number of shots, and one for every perplexity. Bars are paired errors.

    Args:
        rows: flat rows of :func:`paper`. Others than those of ``fig7`` are passed over.
        stem: of the files, ``stem``.svg and ``stem``.png.
    Returns: False without such rows or without matplotlib. Nothing is drawn then.
    """
    shown = [r for r in rows if r["table"] == "fig7" and (r["task"] == "mean" or r["metric"] == "perplexity")]
    if not shown:
        return False
    if pyplot() is None:
        return False
    kinds = list(dict.fromkeys((row["metric"] == "perplexity", row["task"], row["shots"]) for row in shown))
    kinds.sort()
    columns = min(COLUMNS, len(kinds))
    figure, axes = make_panels(columns, 3.3, 3.2, math.ceil(len(kinds) / columns))
    for panel in axes[len(kinds) :]:
        panel.set_axis_off()
    for panel, (is_perplexity, task, shots) in zip(axes, kinds, strict=False):
        of_task = [row for row in shown if (row["task"], row["shots"]) == (task, shots)]
        dense = of_task[0]["dense"] if is_perplexity else 100 * of_task[0]["dense"]
        panel.axhline(dense, color="0.35", linestyle=(0, (1, 1)), linewidth=1, label="dense")
        for selection in dict.fromkeys(row["selection"] for row in of_task):
            colour, marker, line, label = CURVES[selection]
            points = sorted((r for r in of_task if r["selection"] == selection), key=lambda r: r["total_sparsity"])
            x = [100 * row["total_sparsity"] for row in points]
            value = [row["value"] if is_perplexity else 100 * row["value"] for row in points]
            scale = dense if is_perplexity else 100  # the error is of the relative increase, or of the difference
            bar = [scale * (row["error"] or 0.0) for row in points]
            style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4.5, "linewidth": 1.4}
            panel.errorbar(x, value, bar, capsize=2.5, label=label.split(" (")[0], **style)
        panel.set_title(f"{task}, {shots} shot" if is_perplexity else f"mean accuracy, {shots} shot", fontsize=10)
        panel.set_ylabel("perplexity" if is_perplexity else "accuracy, %", fontsize=9)
        if is_perplexity:
            panel.set_yscale("log")
        panel.set_xlim(0, 100)
    axes[0].legend(fontsize=8, frameon=False)
    figure.supxlabel("share of all blocks' weights that is not read, %", fontsize=10)
    save(figure, stem)
    return True
