"""Pictures of parts: active neurons by layer, times, and quality by bytes. Means of rows for them and for tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import BLUE, STYLES, pyplot, save
from dejavu_train.extras.evidence.cell import Row


def means(by: str, rows: Sequence[Row]) -> list[Row]:
    """A row for each value of a column, with the mean of every column of fractions."""
    made = []
    for value in dict.fromkeys(row[by] for row in rows):
        own = [row for row in rows if row[by] == value]
        names = [name for name, each in own[0].items() if isinstance(each, float)]
        made.append(
            {by: value, "rows": len(own)} | {name: sum(row[name] or 0 for row in own) / len(own) for name in names}
        )
    return made


def draw(part: str, rows: Sequence[Row], stem: Path) -> bool:
    """Write ``stem``.png of a part. False where it has no picture, or without matplotlib."""
    plt = pyplot() if part in PANELS else None
    if plt is None:
        return False
    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    PANELS[part](panel, rows)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x" if part == "speed" else "y", alpha=0.3)
    save(figure, stem, ("png",))
    return True


def _active(panel: Any, rows: Sequence[Row]) -> None:
    for number, text in enumerate(dict.fromkeys(row["text"] for row in rows)):
        own = [row for row in rows if row["text"] == text]
        colour, marker, line = STYLES[number % len(STYLES)]
        x, y = [row["layer"] for row in own], [100 * row["nonzero"] for row in own]
        panel.plot(x, y, color=colour, marker=marker, linestyle=line, label=text)
    panel.set_xlabel("layer")
    panel.set_ylabel("neurons of a token that are not zero, %")
    panel.set_ylim(0, None)
    panel.legend(frameon=False)


def _speed(panel: Any, rows: Sequence[Row]) -> None:
    first = min(row["prompt"] for row in rows)
    own = [row for row in rows if row["rows"] == 1 and row["prompt"] == first][::-1]
    most = 3 * sorted(row["ms"] for row in own)[len(own) // 2]  # a longer bar is cut, and its number tells
    panel.barh([row["variant"] for row in own], [min(row["ms"], most) for row in own], color=BLUE)
    for place, row in enumerate(own):
        panel.text(min(row["ms"], most), place, f" {row['ms']:.3g}", va="center")
    panel.set_xlabel(f"ms of a token, one row, prompt of {first:,}")


def _quality(panel: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogFormatter

    for number, row in enumerate(means("variant", rows)):
        turn, place = divmod(number, len(STYLES))
        style = {"color": STYLES[place][0], "marker": STYLES[place - turn][1], "linestyle": "", "label": row["variant"]}
        panel.plot(row["megabytes"], 1 + row["increase"], **style)
    panel.set_xlabel("MB of weights that a step reads")
    panel.set_ylabel("perplexity over the dense model's")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # none beyond a decade, where they meet
    panel.set_xlim(0, None)
    panel.legend(frameon=False)


PANELS: dict[str, Callable[[Any, Sequence[Row]], None]] = {"active": _active, "speed": _speed, "quality": _quality}
