"""Draws the pictures of README and docs/concepts as SVG files beside this one: python docs/pictures/draw.py."""

from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
INK, SOFT, LINE, PAPER = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
READ, IDLE, SMALL = "#2563eb", "#e5e7eb", "#f59e0b"


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    """An SVG on white paper, so that it is readable on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">\n'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def text(x: float, y: float, said: str, color: str = INK, anchor: str = "middle", size: int = 14) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{said}</text>'


def box(x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str = PAPER) -> str:
    """A box with lines of text in its middle. The first line is the title."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>']
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        parts.append(text(x + width / 2, top + 18 * i, line, SOFT if i else INK, size=12 if i else 14))
    return "\n".join(parts)


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'


def matrix(x: float, y: float, width: float, rows: int, chosen: Sequence[int], step: float = 11) -> str:
    """Rows of weights, the chosen ones filled."""
    return "\n".join(
        f'<rect x="{x}" y="{y + step * i}" width="{width}" height="{step - 3}" rx="2" '
        f'fill="{READ if i in chosen else IDLE}"/>'
        for i in range(rows)
    )


def idea() -> str:
    """A hidden state, the predictor, the list, and the rows that are read."""
    chosen = (2, 5, 11)
    parts = [
        box(20, 110, 130, 60, ["hidden state", "of one token"]),
        arrow((150, 125), (210, 80)),
        box(212, 40, 150, 66, ["predictor", "a small network"], "#fef3c7"),
        arrow((362, 73), (408, 73)),
        box(410, 40, 120, 66, ["list", "2, 5, 11"], "#fef3c7"),
        arrow((530, 73), (583, 73)),
        arrow((150, 155), (583, 155)),
        text(370, 147, "multiplied with the listed rows alone", SOFT, size=12),
        matrix(590, 40, 150, 14, chosen),
        text(665, 26, "weights of the layer"),
        text(665, 212, "3 of 14 rows read", READ, size=13),
        arrow((745, 112), (790, 112)),
        box(792, 82, 88, 60, ["output"]),
    ]
    return picture(900, 230, parts)


def sparsity() -> str:
    """Which neurons three tokens use: others for each, and few."""
    used = {"The": (1, 7, 19), "cat": (3, 7, 12, 22), "sat": (0, 9, 16)}
    parts = [text(20, 30, "Neurons of one layer, by token. Blue: active, so their weights matter.", anchor="start")]
    for row, (word, active) in enumerate(used.items()):
        y = 60 + 40 * row
        parts.append(text(60, y + 14, word, anchor="end"))
        for i in range(24):
            color = READ if i in active else IDLE
            parts.append(f'<rect x="{80 + 24 * i}" y="{y}" width="18" height="20" rx="3" fill="{color}"/>')
    parts.append(
        text(20, 195, "Each token uses others: no fixed part of the weights can be left out.", SOFT, "start", 13)
    )
    return picture(680, 212, parts)


def step() -> str:
    """One layer of a decoding step: two halves, each with its predictor."""
    parts = [
        text(
            20,
            28,
            "One layer of a decoding step, one token. Yellow: predictors. Blue: rows of the list alone.",
            anchor="start",
        ),
        text(20, 128, "residual", anchor="start"),
        arrow((80, 124), (880, 124)),
        arrow((105, 124), (105, 172)),
        box(60, 174, 90, 42, ["LayerNorm"]),
        arrow((150, 195), (178, 195)),
        box(180, 166, 120, 58, ["q, k, v", "of listed heads"], "#dbeafe"),
        arrow((300, 195), (328, 195)),
        box(330, 166, 110, 58, ["attention", "listed heads"]),
        arrow((440, 195), (458, 195)),
        box(460, 166, 60, 58, ["out"], "#dbeafe"),
        arrow((490, 166), (490, 128)),
        arrow((105, 216), (105, 262), (178, 262)),
        box(180, 240, 170, 46, ["heads' predictor", "site: attn_in"], "#fef3c7"),
        arrow((240, 240), (240, 228)),
        text(360, 268, "back-fill: K and V that a", SOFT, "start", 12),
        text(360, 284, "listed head has missed", SOFT, "start", 12),
        arrow((575, 124), (575, 172)),
        box(530, 174, 90, 42, ["LayerNorm"]),
        arrow((620, 195), (648, 195)),
        box(650, 166, 90, 58, ["fc1", "listed rows"], "#dbeafe"),
        arrow((740, 195), (768, 195)),
        box(770, 166, 90, 58, ["fc2", "listed rows"], "#dbeafe"),
        arrow((815, 166), (815, 128)),
        arrow((575, 216), (575, 262), (618, 262)),
        box(620, 240, 170, 46, ["neurons' predictor", "site: mlp_in"], "#fef3c7"),
        arrow((695, 240), (695, 228)),
        text(20, 66, "attention half", SOFT, "start", 13),
        text(530, 66, "MLP half", SOFT, "start", 13),
        f'<path d="M20 76H510" stroke="{LINE}"/><path d="M530 76H880" stroke="{LINE}"/>',
    ]
    return picture(900, 304, parts)


def backfill() -> str:
    """K and V of one head: computed where it was selected, filled in when it is selected again."""
    parts = [
        text(20, 28, "Keys and values of one head, by position. Selected at 0, 1, 2 and again at 6.", anchor="start")
    ]
    states = {"after position 5": (READ,) * 3 + (IDLE,) * 3, "at position 6": (READ,) * 3 + (SMALL,) * 3 + (READ,)}
    for row, (name, colors) in enumerate(states.items()):
        y = 56 + 52 * row
        parts.append(text(150, y + 20, name, anchor="end", size=13))
        for i, color in enumerate(colors):
            parts.append(f'<rect x="{170 + 52 * i}" y="{y}" width="44" height="30" rx="4" fill="{color}"/>')
            parts.append(text(192 + 52 * i, y + 20, str(i), PAPER if color == READ else INK, size=12))
    parts += [
        f'<path d="M{170 + 52 * 3 - 4} 46V96" stroke="{INK}" stroke-dasharray="4 3"/>',
        text(332, 44, "watermark: valid below it", SOFT, "start", 12),
        text(20, 180, "Orange: computed now, from the kept inputs of these positions.", SOFT, "start", 13),
    ]
    return picture(640, 196, parts)


if __name__ == "__main__":
    for draw in (idea, sparsity, step, backfill):
        (HERE / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
