"""Reads results, draws curve.png: every text a panel, the same axes for all, so that drift is seen."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.files import replacing

# selection -> colour, marker, line, label. Colours of Okabe and Ito, which differ for colour-blind people too.
CURVES = {
    "predicted": ("#0072B2", "o", "-", "predicted"),
    "oracle": ("#009E73", "s", "--", "oracle (knows this token's activations)"),
    "noncontextual": ("#CC79A7", "D", "-.", "non-contextual (embedding only)"),
    "static": ("#E69F00", "^", "-", "static (most often active)"),
    "random": ("#D55E00", "v", ":", "random"),
}
COLUMNS = 4
LINEAR_UP_TO = 1.0  # per cent; above it the scale of the increase is logarithmic
_TICKS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def plot_curves(found: dict[str, Any], path: str | Path) -> bool:
    """Draw each text's increase of perplexity against the share of neurons selected (all heads, sparse everywhere).

    Upper panel: predicted against oracle, near zero. Lower panel: with the yardsticks, as a ratio to the dense model.

    Args:
        found: results of schema 2.
        path: of the PNG file.
    Returns: False without matplotlib, nothing is drawn then.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    texts = found["texts"]
    columns, bands = min(len(texts), COLUMNS), math.ceil(len(texts) / COLUMNS)
    figure, grid = plt.subplots(
        2 * bands,
        columns,
        figsize=(max(7.0, 1.0 + 2.75 * columns), 0.9 + 4.9 * bands),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    rows = [row for row in found["quality"] if row["asked_head_density"] == 1 and row["sparse_from"] == 0]
    near_panels, wide_panels = grid[0::2].flatten(), grid[1::2].flatten()
    legend: dict[str, Any] = {}
    for text, near, wide in zip(texts, near_panels, wide_panels, strict=False):
        legend |= _draw_text([row for row in rows if row["text"] == text["name"]], near, wide)
        near.set_title(f"{text['name']}\n{text['domain']}, {text['tokens']:,} tokens", fontsize=10)
    _dress(near_panels[: len(texts)], wide_panels[: len(texts)], rows)
    for axes in (*near_panels[len(texts) :], *wide_panels[len(texts) :]):
        axes.set_visible(False)
    for band in range(bands):
        grid[2 * band, 0].set_ylabel(f"increase, %\n(linear up to {LINEAR_UP_TO:g} %)")
        grid[2 * band + 1, 0].set_ylabel("perplexity / dense")
    figure.supxlabel("share of MLP neurons selected per token, all heads", fontsize=10)
    figure.suptitle(f"{Path(found['model']).name}: perplexity of the sparse model over the dense one", fontsize=11)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
    return True


def _draw_text(rows: list[dict[str, Any]], near: Any, wide: Any) -> dict[str, Any]:
    """Draw one text's curves; returns line by label."""
    lines = {}
    for name, (colour, marker, line, label) in CURVES.items():
        points = sorted(
            (row["mlp_density"], row["increase"], row["increase_error"] or 0.0)
            for row in rows
            if row["selection"] == name and row["increase"] is not None
        )
        if not points:
            continue
        x, change, error = np.array(points).T
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4.5, "linewidth": 1.4}
        lines[label] = wide.plot(x, 1 + change, **style)[0]
        if name in ("predicted", "oracle"):  # the others lie beyond any scale on which these two differ
            near.errorbar(x, 100 * change, 100 * error, capsize=2.5, **style)
    return lines


def _dress(near_panels: Any, wide_panels: Any, rows: list[dict[str, Any]]) -> None:
    """Scales, ticks and grids, the same for all texts."""
    densities = [row["mlp_density"] for row in rows if row["selection"] != "dense"]
    near = [
        (100 * row["increase"], 100 * (row["increase_error"] or 0.0))
        for row in rows
        if row["selection"] in ("predicted", "oracle") and row["increase"] is not None
    ]
    low = min([0.0, *(value - error for value, error in near)])
    high = max([LINEAR_UP_TO, *(value + error for value, error in near)])
    ratios = [1 + row["increase"] for row in rows if row["increase"] is not None]
    if densities:
        left, right = min(densities) / 1.25, min(1.0, max(densities) * 1.25)
        shown = [tick for tick in _TICKS if left <= tick <= right]
    for axes in (*near_panels, *wide_panels):
        if densities:
            axes.set_xscale("log")
            axes.set_xlim(left, right)
            axes.set_xticks(shown, [f"{100 * tick:g} %" for tick in shown], fontsize=8)
            axes.set_xticks([], minor=True)
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
    for axes in near_panels:
        axes.axhline(0, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
        axes.set_yscale("symlog", linthresh=LINEAR_UP_TO, linscale=1.2)
        ticks = [-0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
        ticks = [tick for tick in ticks if low - 0.25 <= tick <= 1.3 * high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.set_ylim(low - 0.15, 1.3 * high)
    for axes in wide_panels:
        axes.axhline(1, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
        axes.set_yscale("log")
        if ratios:
            axes.set_ylim(0.8 * min(ratios), 1.6 * max(ratios))
