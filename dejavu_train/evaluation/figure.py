"""Helpers of pictures: styles of lines, and how a figure becomes files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejavu_train.ground.files import replacing

# Colours of Okabe and Ito differ for colour-blind people; markers and dashes tell lines apart too.
BLUE, GREEN, PINK, ORANGE, RED, BLACK = "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#000000"
# selection -> colour, marker, line, label
CURVES = {
    "predicted": (BLUE, "o", "-", "predicted"),
    "oracle": (GREEN, "s", "--", "oracle (knows this token's activations)"),
    "noncontextual": (PINK, "D", "-.", "non-contextual (embedding only)"),
    "static": (ORANGE, "^", "-", "static (most often active)"),
    "random": (RED, "v", ":", "random"),
    "as calibrated": (BLACK, "*", "", "the bundle as calibrated (its heads too)"),
}
STYLES = ((BLUE, "o", "-"), (RED, "s", "--"), (GREEN, "^", "-."), (PINK, "D", ":"), (ORANGE, "v", "-"))


def pyplot() -> Any:
    """``matplotlib.pyplot``, which draws into files alone. None where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        return None
    return matplotlib.pyplot


def make_panels(
    count: int, width: float = 4.2, height: float = 3.6, bands: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """``bands`` rows of ``count`` panels, each ``width`` x ``height`` inches, in reading order. Needs matplotlib."""
    size = (width * count, height * bands)
    figure, grid = pyplot().subplots(bands, count, figsize=size, squeeze=False, layout="constrained", **options)
    made = grid.flatten().tolist()
    for panel in made:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=9)
    return figure, made


def name_axes(panel: Any, x: str, y: str, title: str) -> None:
    """Name both axes, and the panel."""
    panel.set_xlabel(x, fontsize=10)
    panel.set_ylabel(y, fontsize=10)
    panel.set_title(title, fontsize=10)


def add_legend(figure: Any, columns: int = 2) -> None:
    """One legend for all panels, below them. What two panels name alike stands there once."""
    known: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            known.setdefault(name, handle)
    options = {"loc": "outside lower center", "frameon": False, "handlelength": 3.2}
    figure.legend(known.values(), known.keys(), fontsize=9, ncols=columns, **options)


def save(figure: Any, stem: Path, kinds: Sequence[str] = ("svg", "png")) -> None:
    """Write ``stem``.svg (the same bytes for the same rows) and ``stem``.png, and close the figure."""
    import matplotlib.pyplot

    options: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 150}}
    with matplotlib.rc_context({"svg.hashsalt": stem.name}):
        for kind in kinds:
            with replacing(stem.with_suffix(f".{kind}")) as temporary:
                figure.savefig(temporary, format=kind, **options[kind])
    matplotlib.pyplot.close(figure)
