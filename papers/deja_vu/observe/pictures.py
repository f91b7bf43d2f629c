"""Draws the observations: one figure a function, from the rows alone.

Colours of Okabe and Ito, or one ramp of viridis where lines are layers: both differ for colour-blind people and in grey
print. Markers and dashes tell lines apart too. Legends stand below the panels, where no data can be.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dejavu_train.evaluation.figure import (
    BLACK,
    BLUE,
    CURVES,
    GREEN,
    ORANGE,
    PINK,
    RED,
    STYLES,
    add_legend,
    make_panels,
    name_axes,
)
from dejavu_train.families import Target
from papers.deja_vu.observe.attention import HeadRow, UniformityRow
from papers.deja_vu.observe.cost import PARTS, PHASES, CostRow
from papers.deja_vu.observe.neighbours import NeighbourRow
from papers.deja_vu.observe.predictors import PredictorRow
from papers.deja_vu.observe.residual import CosineRow
from papers.deja_vu.observe.selections import SelectionRow
from papers.deja_vu.observe.union import UnionRow, mean_over_layers
from papers.deja_vu.observe.units import SparsityRow

MARKERS = "os^DvP*X<>"
TARGETS = {Target.HEADS: "attention heads", Target.MLP: "MLP neurons"}
UNION_STYLES = {
    "documents": (BLACK, "o", "-", "different documents"),
    "random": (ORANGE, "v", "--", "random tokens"),
    "embedding": (GREEN, "^", "-.", "grouped by embedding"),
    "selections": (BLUE, "s", "-", "grouped by previous selections"),
    "independent": (PINK, "x", ":", "independent, same frequencies"),
}


def _plain(axis: Any) -> None:
    """Numbers of a logarithmic axis as 20 and 0.5, not as powers."""
    from matplotlib.ticker import FuncFormatter

    for kind in (axis.set_major_formatter, axis.set_minor_formatter):
        kind(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.1e}"[0] in "125" else ""))


def _whole(panel: Any, values: Sequence[int]) -> None:
    """An axis of layers: whole numbers, at most nine of them."""
    known = sorted(set(values))
    panel.set_xticks(known[:: -(-len(known) // 9)])


def _line(panel: Any, x: Sequence[float], y: Sequence[float], style: int, label: str | None = None) -> None:
    colour, marker, dash = STYLES[style % len(STYLES)]
    panel.plot(x, y, color=colour, marker=marker, linestyle=dash, markersize=4.5, linewidth=1.5, label=label)


def _ramp(place: int, count: int) -> Any:
    """A colour of viridis, without its palest end."""
    import matplotlib

    return matplotlib.colormaps["viridis"](0.9 * place / max(1, count - 1))


def sparsity(rows: Sequence[SparsityRow]) -> Any:
    """Fig. 3: share of heads and of neurons that a token can do without, a line for each loss."""
    figure, panels = make_panels(2)
    for panel, (target, name) in zip(panels, TARGETS.items(), strict=True):
        of_target = [row for row in rows if row.target == target]
        units = {row.layer: row.needed / (1 - row.silenced) for row in of_target if row.silenced < 1}
        for style, loss in enumerate(sorted({row.loss for row in of_target}, reverse=True)):
            line = sorted((row for row in of_target if row.loss == loss), key=lambda row: row.layer)
            text = f"loss of norm up to {100 * loss:g} %" if loss else "inactive (ReLU), no loss"
            layers = [row.layer for row in line]
            _line(panel, layers, [100 * row.silenced for row in line], style, text)
            ends = [[100 * (1 - row_p / units[row.layer]) for row, row_p in _pairs(line, p)] for p in ("p90", "p10")]
            panel.fill_between(layers, *ends, color=STYLES[style % len(STYLES)][0], alpha=0.13, linewidth=0)
        least = min(100 * (1 - row.needed_p90 / units[row.layer]) for row in of_target)
        panel.set_ylim(
            0 if least < 50 else max(0, least - 3), 101
        )  # nearly all neurons are silent: the end of the axis
        _whole(panel, [row.layer for row in of_target])
        name_axes(panel, "layer", "silenced, % of units", name)
    add_legend(figure, 3)
    return figure


def _pairs(rows: Sequence[SparsityRow], name: str) -> list[tuple[SparsityRow, float]]:
    return [(row, getattr(row, f"needed_{name}")) for row in rows]


def cosine(rows: Sequence[CosineRow]) -> Any:
    """Fig. 5a, b: similarity of consecutive layers by layer, and of layers further apart."""
    figure, panels = make_panels(2, sharey=True)
    near = [row for row in rows if row.distance == 1]
    layers = [row.layer for row in near]
    panels[0].plot(layers, [row.median for row in near], color=BLACK, marker="x", linewidth=1.5, label="median")
    for low, high, alpha, text in (("p25", "p75", 0.3, "middle 50 %"), ("p10", "p90", 0.15, "middle 80 %")):
        ends = [[getattr(row, name) for row in near] for name in (low, high)]
        panels[0].fill_between(layers, *ends, color=BLACK, alpha=alpha, linewidth=0, label=text)
    _whole(panels[0], layers)
    name_axes(panels[0], "layer l", "cosine similarity", "residual stream before l and l + 1")
    starts = sorted({row.layer for row in rows if row.distance == 2} or set(layers))
    starts = starts[:: -(-len(starts) // 5)]
    for style, start in enumerate(starts):
        of_layer = [row for row in rows if row.layer == start]
        _line(
            panels[1], [row.distance for row in of_layer], [row.median for row in of_layer], style, f"from l = {start}"
        )
    name_axes(panels[1], "distance n", "", "before l and l + n, medians")
    panels[1].set_xticks(range(1, 1 + max(row.distance for row in rows)))
    add_legend(figure, 4)
    return figure


def heads(rows: Sequence[HeadRow], correlations: Sequence[UniformityRow]) -> Any:
    """Fig. 4: uniformity of heads against the norm of their output, and the rank correlation by layer."""
    figure, panels = make_panels(2)
    layers = sorted({row.layer for row in rows})
    for place, layer in enumerate(layers):
        of_layer = [row for row in rows if row.layer == layer]
        colour, marker = _ramp(place, len(layers)), MARKERS[place % len(MARKERS)]
        label = f"layer {layer}" if place in (0, len(layers) - 1) or len(layers) <= 8 else None
        x, y = [row.uniformity for row in of_layer], [row.output for row in of_layer]
        panels[0].scatter(x, y, s=22, color=colour, marker=marker, edgecolors="black", linewidths=0.3, label=label)
    panels[0].set_yscale("log")
    _plain(panels[0].yaxis)
    name_axes(panels[0], "uniformity (1: looks at all alike)", "norm of the head's output", "heads, means over tokens")
    after = [row.layer for row in correlations]
    panels[1].axhline(0, color="0.35", linewidth=1)
    panels[1].errorbar(
        after, [row.per_token for row in correlations], [row.spread for row in correlations], color=BLUE, marker="o",
        linestyle="-", capsize=2.5, markersize=4.5, label="within a token, mean and deviation",
    )  # fmt: skip
    _line(panels[1], after, [row.of_means for row in correlations], 1, "of the heads' means")
    panels[1].set_ylim(-1.05, 1.05)
    _whole(panels[1], after)
    name_axes(panels[1], "layer", "rank correlation", "uniformity and norm of the output")
    add_legend(figure, 4)
    return figure


def union(rows: Sequence[UnionRow]) -> Any:
    """Fig. 8 and App. C.1: sparsity of a batch's union, mean over the layers, and what grouping makes of it."""
    figure, panels = make_panels(2, height=2.9, bands=2)
    mean = mean_over_layers(rows)
    sizes = sorted({row.batch for row in rows})
    for place, (target, name) in enumerate(TARGETS.items()):
        whole, gained = panels[place], panels[place + 2]
        for grouping, (colour, marker, dash, text) in UNION_STYLES.items():
            of_grouping = [row for row in mean if (row.target, row.grouping) == (target, grouping)]
            of_grouping.sort(key=lambda row: row.batch)
            style = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4.5, "linewidth": 1.5}
            batches = [row.batch for row in of_grouping]
            whole.plot(batches, [100 * row.sparsity for row in of_grouping], label=text, **style)
            gained.plot(batches, [100 * row.gain for row in of_grouping], label=text, **style)
        whole.set_ylim(bottom=0)
        name_axes(whole, "", "in no row's set, % of units", name)
        name_axes(gained, "rows of a batch", "smaller union, %", f"{name}: gain over different documents")
        for panel in (whole, gained):
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set_xticks([], minor=True)
    add_legend(figure, 3)
    return figure


def predictors(rows: Sequence[PredictorRow]) -> Any:
    """Section 5.2: accuracy, recall and precision of the predictors by layer."""
    present = [target for target in TARGETS if any(row.target == target for row in rows)]
    figure, panels = make_panels(len(present), sharey=True)
    for panel, target in zip(panels, present, strict=True):
        of_target = [row for row in rows if row.target == target]
        for style, column in enumerate(("accuracy", "recall", "precision")):
            _line(
                panel,
                [row.layer for row in of_target],
                [100 * getattr(row, column) for row in of_target],
                style,
                column,
            )
        if target == Target.MLP:  # of the heads as many are positive as are selected
            panel.plot(
                [row.layer for row in of_target], [100 * (1 - row.active) for row in of_target],
                color="0.35", linestyle=":",
                label="accuracy of selecting none",
            )  # fmt: skip
        panel.set_ylim(0, 102)
        _whole(panel, [row.layer for row in of_target])
        name_axes(panel, "layer", "%", TARGETS[target])
    add_legend(figure, 4)
    return figure


def neighbours(rows: Sequence[NeighbourRow]) -> Any:
    """App. C.2: what selecting costs, and what the selection is worth."""
    figure, (panel,) = make_panels(1, width=5.6)
    styles = {"exact": (BLACK, "s"), "hnsw": (RED, "o"), "predictor": (BLUE, "^")}
    names = {"exact": "exact search", "hnsw": "graph (HNSW)", "predictor": "this bundle's predictors"}
    for method, (colour, marker) in styles.items():
        of_method = [row for row in rows if row.method == method]
        if of_method:
            change = [100 * row.increase for row in of_method]
            bars = [100 * (row.increase_error or 0) for row in of_method]
            panel.errorbar(
                [row.ms_per_token for row in of_method], change, bars, color=colour, marker=marker, linestyle=":",
                capsize=2.5, label=names[method],
            )  # fmt: skip
        for row in of_method:
            if row.ef is not None:
                top = (row.ms_per_token, 100 * (row.increase + (row.increase_error or 0)))
                panel.annotate(f"ef {row.ef}", top, (0, 5), textcoords="offset points", ha="center", fontsize=8)
    panel.set_xscale("log")
    _plain(panel.xaxis)
    panel.margins(x=0.2, y=0.15)
    title = f"{100 * rows[0].density:.0f} % of the neurons"
    name_axes(panel, "ms to select for one token, all layers", "increase of perplexity, %", title)
    add_legend(figure, 3)
    return figure


def selections(rows: Sequence[SelectionRow]) -> Any:
    """Fig. 1, section 5.2: perplexity against sparsity, contextual, static and non-contextual."""
    figure, (panel,) = make_panels(1, width=5.6, height=4.4)
    for name, (colour, marker, dash, text) in CURVES.items():
        points = sorted((100 * row.sparsity, row.perplexity) for row in rows if row.selection == name)
        if points:
            panel.plot(
                *zip(*points, strict=True), color=colour, marker=marker, linestyle=dash, markersize=4.5, linewidth=1.5,
                label=text,
            )  # fmt: skip
    dense = next(row.perplexity for row in rows if row.selection == "dense")
    panel.axhline(dense, color="0.35", linestyle=(0, (1, 1)), linewidth=1.2, label="dense")
    panel.set_yscale("log")
    _plain(panel.yaxis)
    name_axes(panel, "MLP neurons left out, %", "perplexity", "all heads; each takes as many neurons as predicted")
    add_legend(figure, 2)
    return figure


def cost(rows: Sequence[CostRow]) -> Any:
    """Tables 1 to 3: theory beside measured, for the prompt and for one generated token."""
    figure, panels = make_panels(2)
    for panel, phase in zip(panels, PHASES, strict=True):
        of_part = {row.part: row for row in rows if row.phase == phase}
        columns = (
            ("compute_ms", "operations / peak", 0),
            ("read_ms", "bytes / bandwidth", 3),
            ("measured_ms", "measured", 1),
        )
        for place, (column, text, style) in enumerate(columns):
            x = [index + 0.27 * (place - 1) for index in range(len(PARTS))]
            hatch = (None, "//", "..")[place]
            panel.bar(
                x, [getattr(of_part[part], column) for part in PARTS], 0.25, color=STYLES[style][0], hatch=hatch,
                edgecolor="white", label=text,
            )  # fmt: skip
        panel.set_xticks(range(len(PARTS)), ["attention", "MLP", "head and rest"])
        panel.set_yscale("log")
        _plain(panel.yaxis)
        what = f"prompt of {rows[0].prompt} tokens" if phase == "prompting" else "one generated token"
        name_axes(panel, "", "ms, all layers", f"{what}, batch {rows[0].batch}")
    add_legend(figure, 3)
    return figure


DRAWN: dict[str, Callable[..., Any]] = {
    "sparsity": sparsity,
    "cosine": cosine,
    "heads": heads,
    "union": union,
    "selections": selections,
    "predictors": predictors,
    "neighbours": neighbours,
    "cost": cost,
}
