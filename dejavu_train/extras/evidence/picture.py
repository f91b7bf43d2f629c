"""Pictures of parts: active neurons by layer, times and answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.evaluation.figure import BLUE, STYLES, pyplot, save
from dejavu_train.extras.evidence.cell import Row


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
    panel.barh([row["variant"] for row in own], [row["ms"] for row in own], color=BLUE)
    for place, row in enumerate(own):
        panel.text(row["ms"], place, f" {row['ms']:.3g}", va="center")
    panel.set_xlabel(f"ms of a token, one row, prompt of {first:,}")


def _answers(panel: Any, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row["set"] for row in rows))
    kinds = list(dict.fromkeys(row["variant"] for row in rows))
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        own = {row["set"]: 100 * row["accuracy"] for row in rows if row["variant"] == kind}
        x = [place + number * width for place, name in enumerate(names) if name in own]
        panel.bar(x, list(own.values()), width, label=kind, color=STYLES[number % len(STYLES)][0])
    panel.set_xticks([place + width * (len(kinds) - 1) / 2 for place in range(len(names))], names)
    panel.set_ylabel("right answers, %")
    panel.set_ylim(0, 100)
    panel.legend(frameon=False)


PANELS: dict[str, Callable[[Any, Sequence[Row]], None]] = {"active": _active, "speed": _speed, "generation": _answers}
