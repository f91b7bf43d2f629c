"""Draws generation under sparsity: when texts part, whether errors accumulate, and what dense tokens buy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import STYLES, add_legend, make_panels, name_axes, pyplot, save

BLOCK = 16  # positions that a point of a curve over positions averages


def draw(rows: Sequence[Any], positions: Sequence[Any], stem: Path) -> bool:
    """Write ``stem``.svg and ``stem``.png. False without matplotlib, nothing is drawn then.

    Args:
        rows: of :class:`run.GenerationRow`. positions: of :class:`run.PositionRow`.
    """
    if pyplot() is None:
        return False
    decodings = list(dict.fromkeys(row.decoding for row in rows))
    guarded = any(row.guard_every for row in rows)
    columns = len(decodings)
    figure, grid = make_panels(columns, 4.6, 3.3, 2 + guarded)
    for column, decoding in enumerate(decodings):
        of_decoding = [row for row in positions if row.decoding == decoding and not row.guard_every]
        parting, drift = grid[column], grid[columns + column]
        for style, points in _curves(of_decoding):
            marker = style.pop("marker")
            x = [point.position + 1 for point in points]
            parting.plot(x, [100 * point.same_so_far for point in points], **style)
            blocks = [points[i : i + BLOCK] for i in range(0, len(points), BLOCK)]
            excess = [sum(p.nats - p.dense_nats for p in block) / len(block) for block in blocks]
            middle = [block[len(block) // 2].position + 1 for block in blocks]
            drift.plot(middle, excess, marker=marker, markersize=4, **style)
        name_axes(parting, "tokens behind the prompt", "texts not parted yet, %", f"{decoding}: when texts part")
        parting.set_ylim(-3, 103)
        parting.set_xscale("log")  # half the texts part within few tokens
        ticks = [2**i for i in range(12) if 2**i <= len({row.position for row in of_decoding})]
        parting.set_xticks(ticks, [str(tick) for tick in ticks])
        parting.set_xticks([], minor=True)
        drift.axhline(0, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
        title = f"{decoding}: under the dense model, over its own text"
        name_axes(drift, "tokens behind the prompt", "nats a token", title)
        if guarded:
            _draw_guards(grid[2 * columns + column], [row for row in rows if row.decoding == decoding], decoding)
    add_legend(figure)
    save(figure, stem)
    return True


def _styles(rows: Sequence[Any]) -> dict[tuple[float, str], tuple[str, str, str]]:
    """Colour, marker and line by density and start, the same in every panel."""
    kinds = dict.fromkeys((row.asked_mlp_density, row.sparse_from) for row in rows)
    return {kind: STYLES[place % len(STYLES)] for place, kind in enumerate(kinds)}


def _curves(positions: Sequence[Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Rows of positions by model, with how their line looks and what it is called."""
    curves = []
    for (density, start), (colour, marker, line) in _styles(positions).items():
        where = "behind the prompt" if start == "prompt" else "everywhere"
        style = {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.5}
        style["label"] = f"{100 * density:g} % of neurons, sparse {where}"
        curves.append(
            (style, [row for row in positions if (row.asked_mlp_density, row.sparse_from) == (density, start)])
        )
    return curves


def _draw_guards(panel: Any, rows: Sequence[Any], decoding: str) -> None:
    """Draw a text's loss under the dense model over how often a token is dense. Bars are paired errors."""
    intervals = sorted({row.guard_every for row in rows if row.guard_every}, reverse=True)
    places = {every: place for place, every in enumerate([0, *intervals])}
    pairs = sorted({(row.asked_mlp_density, row.thresholds) for row in rows if row.guard_every})
    styles = _styles(rows)
    for i, (density, thresholds) in enumerate(pairs):
        shown = [row for row in rows if row.asked_mlp_density == density and row.sparse_from == "prompt"]
        shown = [row for row in shown if not row.guard_every or row.thresholds == thresholds]
        shown.sort(key=lambda row: places[row.guard_every])
        x = [places[row.guard_every] + 0.06 * (i - (len(pairs) - 1) / 2) for row in shown]
        moved = thresholds == "moved"
        style = {"color": styles[density, "prompt"][0], "marker": "P" if moved else "x", "linewidth": 1.4}
        style |= {"linestyle": "-" if moved else ":", "label": f"{100 * density:g} %, guard, thresholds {thresholds}"}
        panel.errorbar(x, [100 * r.change for r in shown], [100 * (r.error or 0) for r in shown], capsize=2.5, **style)
    panel.axhline(0, color="0.35", linestyle=(0, (1, 1)), linewidth=1)
    panel.set_xticks(list(places.values()), ["none" if not every else f"1 in {every}" for every in places])
    name_axes(panel, "dense tokens", "perplexity over dense's, %", f"{decoding}: what a guard buys")
