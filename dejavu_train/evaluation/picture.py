"""Reads results, draws curve.png or curve.svg for a reader of ten seconds: one text, one panel, a verdict as title."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import BLACK, BLUE, GREEN, ORANGE, pyplot, save
from dejavu_train.evaluation.verdict import likelihood, widest

CURVES = {  # selection -> colour, marker, label; where curves meet, labels stand in this order
    "dense": (BLACK, "", "dense model:\nreads all {units}"),
    "oracle": (GREEN, "s", "oracle: the best choice,\nknown only in hindsight"),
    "predicted": (BLUE, "o", "predicted: small networks\nchoose for each token"),
    "static": (ORANGE, "^", "static: the same {units}\nfor every token"),
}
_GAP = 0.13  # between two labels, of the panel's height
_ZOOMED_FROM = 60  # per cent; where all curves stay above it, the axis does not begin at 0


def plot_curves(found: Mapping[str, Any], path: str | Path) -> bool:
    """Draw how likely a token of the first text stays against the share of neurons that are read.

    Predicted stands beside dense, oracle and static.

    Args:
        found: results of schema 3.
        path: of the file. Its ending says the format, png or svg.
    Returns: False without matplotlib or without a predicted row, nothing is drawn then.
    """
    plt = pyplot()
    if plt is None:
        return False
    scored = [row for row in found["quality"] if row["sparse_from"] == 0 and row["increase"] is not None]
    predicted = [row for row in scored if row["selection"] == "predicted"]
    if not predicted:
        return False
    mlp = any(row["mlp_selected"] not in (None, 1) for row in predicted)
    share, units = ("mlp_selected", "MLP neurons") if mlp else ("head_selected", "heads")
    calibrated = [row for row in predicted if row.get("as_calibrated")]
    # Rows that differ in one density alone make a curve.
    curve = [row for row in predicted if not row.get("as_calibrated") and (row["asked_head_density"] == 1 or not mlp)]
    told = (calibrated or widest(curve or predicted))[0]
    asked = {_asked(row) for row in curve or [told]}
    figure, panel = plt.subplots(figsize=(9, 5), layout="constrained")
    panel.axhline(100, color=BLACK, linewidth=1.2)
    panel.axvline(100 * told[share], color="0.8", linewidth=1, zorder=0)
    ends, marked = {"dense": 100.0}, []
    shares, values = [100 * told[share]], [100.0]
    for name in ("static", "oracle", "predicted"):
        of_selection = [row for row in scored if row["selection"] == name and row["text"] == told["text"]]
        points = sorted((100 * row[share], _kept(row)) for row in of_selection if _asked(row) in asked)
        if points:
            colour, marker, _ = CURVES[name]
            x, y = zip(*points, strict=True)
            panel.plot(x, y, color=colour, marker=marker, linewidth=2.2, markersize=7, clip_on=False)
            ends[name] = y[-1]
            shares += x
            values += y
        if name != "oracle":
            marked += [(name, row) for row in of_selection if _asked(row) == _asked(told)][:1]
    values += [_kept(row) for _, row in marked]
    _scale(panel, max(shares), min(values), max(values))
    for name, row in marked:
        _say(panel, 100 * row[share], _kept(row), likelihood(row["increase"]), name)
    _label(panel, ends, units)
    part = f"{100 * told[share]:.2g} %"
    panel.set_xlabel(f"{units} that are read for a token, % of all", fontsize=11)
    panel.set_ylabel("how likely a token stays, dense model = 100 %", fontsize=11)
    tokens = next(text["tokens"] for text in found["texts"] if text["name"] == told["text"])
    model = Path(found["model"]).name
    panel.annotate(
        f"With {part} of the {units}, a token is {likelihood(told['increase'])}", (0, 1), xycoords="axes fraction",
        xytext=(0, 30), textcoords="offset points", fontsize=15, fontweight="bold",
    )  # fmt: skip
    about = f"than to the dense model. {model} on {tokens:,} tokens of {told['text']}."
    panel.set_title(about, loc="left", fontsize=11, pad=9)
    save(figure, Path(path).with_suffix(""), [Path(path).suffix.removeprefix(".")])
    return True


def _asked(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["asked_mlp_density"], row["asked_head_density"]


def _kept(row: Mapping[str, Any]) -> float:
    """A token's likelihood, geometric mean, in per cent of the dense model's."""
    return float(100 / (1 + row["increase"]))


def _say(panel: Any, x: float, y: float, words: str, name: str) -> None:
    """Mark a point and write ``words`` beside it: below the predicted curve, which rises, above that at the bottom."""
    colour, marker, _ = CURVES[name]
    right = x > 0.8 * panel.get_xlim()[1]
    panel.plot([x], [y], color=colour, marker=marker, markersize=11, clip_on=False)
    panel.annotate(
        words, (x, y), xytext=(-8 if right else 8, -20 if name == "predicted" else 11), textcoords="offset points",
        ha="right" if right else "left", color=colour, fontsize=11, fontweight="bold",
    )  # fmt: skip


def _scale(panel: Any, widest_share: float, lowest: float, highest: float) -> None:
    """Both axes from zero, unless all curves lie near the dense model."""
    bottom = 0.0 if lowest < _ZOOMED_FROM else lowest - 0.4 * (100 - lowest) - 0.2
    panel.set_ylim(bottom, highest + 0.06 * (highest - bottom))
    panel.set_xlim(0, min(100.0, 1.2 * widest_share))
    panel.xaxis.set_major_formatter("{x:g} %")
    panel.yaxis.set_major_formatter("{x:g} %")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.3)


def _label(panel: Any, ends: Mapping[str, float], units: str) -> None:
    """Write each curve's name at its right end, apart from its neighbours."""
    bottom, top = panel.get_ylim()
    place = 1.0 + _GAP
    for name in sorted(ends, key=lambda name: (-round(ends[name]), list(CURVES).index(name))):
        place = min((ends[name] - bottom) / (top - bottom), place - _GAP)
        panel.annotate(
            CURVES[name][2].format(units=units), (1, ends[name]), xycoords=("axes fraction", "data"),
            xytext=(1.05, place), textcoords="axes fraction", va="center", fontsize=10.5, color=CURVES[name][0],
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": CURVES[name][0], "relpos": (0, 0.5), "shrinkB": 0},
        )  # fmt: skip
