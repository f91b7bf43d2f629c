"""What pictures share: styles of lines, and how a figure becomes files."""

from pathlib import Path
from typing import Any

from dejavu_train.files import replacing

# Colours of Okabe and Ito differ for colour-blind people; markers and dashes tell lines apart too.
BLUE, GREEN, PINK, ORANGE, RED, BLACK = "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#000000"
STYLES = ((BLUE, "o", "-"), (RED, "s", "--"), (GREEN, "^", "-."), (PINK, "D", ":"), (ORANGE, "v", "-"))


def save(figure: Any, stem: Path) -> None:
    """Write ``stem``.svg (the same bytes for the same rows) and ``stem``.png, and close the figure."""
    import matplotlib
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": stem.name}):
        for kind, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 150})):
            with replacing(stem.with_suffix(f".{kind}")) as temporary:
                figure.savefig(temporary, format=kind, **options)
    plt.close(figure)
