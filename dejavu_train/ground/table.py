"""Rows of cells as aligned text."""

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, the first left-aligned.

    >>> print(table(["a", "b", "c"], [["x", "10", ""], ["yy", "5", "0.5"]]))
    a    b    c
    x   10
    yy   5  0.5
    """
    widths = [max(len(line[i]) for line in [headings, *rows]) for i in range(len(headings))]
    lines = []
    for line in [headings, *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(line.rstrip() for line in lines)
