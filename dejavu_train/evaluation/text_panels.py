"""Reads results, draws every text as a panel with the same axes for all, so that drift is seen, for report.html."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.evaluation.figure import BLACK, BLUE, GREEN, ORANGE, PINK, RED, pyplot, save

# selection -> colour, marker, line, label
CURVES = {
    "predicted": (BLUE, "o", "-", "predicted"),
    "oracle": (GREEN, "s", "--", "oracle (knows this token's activations)"),
    "noncontextual": (PINK, "D", "-.", "non-contextual (embedding only)"),
    "static": (ORANGE, "^", "-", "static (most often active)"),
    "random": (RED, "v", ":", "random"),
    "as calibrated": (BLACK, "*", "", "the bundle as calibrated (its heads too)"),
}
_YARDSTICKS = ("noncontextual", "static", "random")
COLUMNS = 3
LINEAR_UP_TO = 1.0  # per cent; above it the scale of the increase is logarithmic
_TICKS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_NEAR = ("predicted", "oracle", "as calibrated")  # the others lie beyond any scale on which these two differ


def plot_texts(found: dict[str, Any], path: str | Path) -> bool:
    """Draw each text's increase of perplexity against the share of neurons selected (all heads, sparse everywhere).

    A panel per text has predicted and oracle near zero, all on the same scales. Another one per text that has
    yardsticks has them all, as a ratio to the dense model on a log scale.

    Args:
        found: results of schema 3.
        path: of the file. Its ending says the format, png or svg.
    Returns: False without matplotlib, nothing is drawn then.
    """
    plt = pyplot()
    if plt is None:
        return False
    scored = [row for row in found["quality"] if row["sparse_from"] == 0]
    rows = [row for row in scored if row["asked_head_density"] == 1 and not row.get("as_calibrated")]
    calibrated = [row for row in scored if row.get("as_calibrated") and row["selection"] == "predicted"]
    rows += [row | {"selection": "as calibrated"} for row in calibrated]
    by_text = {text["name"]: [row for row in rows if row["text"] == text["name"]] for text in found["texts"]}
    wide_texts = [
        name for name, calibrated in by_text.items() if any(row["selection"] in _YARDSTICKS for row in calibrated)
    ]
    panels = len(by_text) + len(wide_texts) + 1  # the last holds the legend
    columns = min(panels, COLUMNS)
    bands = math.ceil(panels / columns)
    size = (3.3 * columns, 0.7 + 2.75 * bands)
    figure, grid = plt.subplots(bands, columns, figsize=size, squeeze=False, layout="constrained")
    axes = grid.flatten().tolist()
    near, wide, rest = axes[: len(by_text)], axes[len(by_text) : panels - 1], axes[panels - 1 :]
    lines: dict[str, Any] = {}
    for panel, text in zip(near, found["texts"], strict=True):
        lines |= _draw(panel, by_text[text["name"]], _NEAR, lambda change, error: (100 * change, 100 * error))
        panel.set_title(f"{text['name']}\n{text['domain']}, {text['tokens']:,} tokens", fontsize=10)
        panel.set_ylabel("increase of perplexity, %", fontsize=9)
    for panel, name in zip(wide, wide_texts, strict=True):
        lines |= _draw(panel, by_text[name], tuple(CURVES), lambda change, error: (1 + change, 0 * error))
        panel.set_title(f"{name}\nwith the yardsticks", fontsize=10)
        panel.set_ylabel("perplexity / dense", fontsize=9)
    _scale_shares([*near, *wide], rows)
    _scale_near(near, rows)
    for panel in wide:
        panel.set_yscale("log")
        panel.axhline(1, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
    for panel in rest:
        panel.set_axis_off()
    labels = {CURVES[name][3]: lines[name] for name in CURVES if name in lines}
    note = f"bars: bootstrap errors over documents\nlinear up to {LINEAR_UP_TO:g} %, then logarithmic"
    rest[0].legend(
        labels.values(), labels.keys(), loc="center", frameon=False, fontsize=9, title=note, title_fontsize=8
    )
    figure.supxlabel("share of MLP neurons selected per token (all heads)", fontsize=10)
    figure.suptitle(f"{Path(found['model']).name}: perplexity of the sparse model over the dense one", fontsize=11)
    save(figure, Path(path).with_suffix(""), [Path(path).suffix.removeprefix(".")])
    return True


def _draw(
    panel: Any, rows: list[dict[str, Any]], names: tuple[str, ...], scaled: Callable[[Any, Any], tuple[Any, Any]]
) -> dict[str, Any]:
    """Draw one text's curves, with increases and errors as ``scaled`` returns them. Returns line by selection."""
    lines = {}
    for name in names:
        colour, marker, line, _ = CURVES[name]
        points = sorted(
            (row["mlp_selected"], row["increase"], row["increase_error"] or 0.0)
            for row in rows
            if row["selection"] == name and row["increase"] is not None
        )
        if points:
            x, change, error = np.array(points).T
            value, bar = scaled(change, error)
            style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4.5, "linewidth": 1.4}
            lines[name] = panel.errorbar(x, value, bar if bar.any() else None, capsize=2.5, **style)
    return lines


def _scale_shares(panels: list[Any], rows: list[dict[str, Any]]) -> None:
    """The same logarithmic axis of shares for all panels."""
    shares = [row["mlp_selected"] for row in rows if row["selection"] != "dense"]
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
        if shares:
            left, right = min(shares) / 1.25, min(1.0, max(shares) * 1.25)
            shown = [tick for tick in _TICKS if left <= tick <= right]
            panel.set_xlim(left, right)
            panel.set_xticks(shown, [f"{100 * tick:g} %" for tick in shown])


def _scale_near(panels: list[Any], rows: list[dict[str, Any]]) -> None:
    """The same axis of increases, in per cent, for the panels of all texts."""
    values = [
        (100 * row["increase"], 100 * (row["increase_error"] or 0.0))
        for row in rows
        if row["selection"] in _NEAR and row["increase"] is not None
    ]
    low = min([0.0, *(value - error for value, error in values)]) - 0.15
    high = 1.3 * max([LINEAR_UP_TO, *(value + error for value, error in values)])
    ticks = [tick for tick in (-1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high]
    for panel in panels:
        panel.axhline(0, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
        panel.set_yscale("symlog", linthresh=LINEAR_UP_TO, linscale=1.2)
        panel.set_yticks([], minor=True)
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_ylim(low, high)
