"""Draws docs/notes/lossless.png: speed of lossless decoding against the acceptance of a drafted token.

    python -m benchmarks.lossless_picture

A line is of a true shape. Its cycles were timed at each length of a draft, and it takes the best length. Points are
whole runs, from rows of `benchmarks.lossless_gpu` and `benchmarks.lossless`. Where acceptance was forced by coins, a
point stands at the acceptance that the coins gave, since a run has few of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import command_line
from benchmarks.tables_format import Row, read_csv
from benchmarks.tables_lossless import CPU, CPU_DRAFT, GPU, cpu_cycles, last_of
from dejavu_train.evaluation.figure import save

SHARES = [0.5 + 0.005 * i for i in range(101)]


@dataclass(frozen=True)
class Line:
    """A true shape.

    Attributes:
        cycles: dense steps that a cycle takes, by length of the draft. points: (acceptance, speed) of whole runs.
    """

    name: str
    cycles: dict[int, float]
    points: list[tuple[float, float]]


def best_speed(cycles: dict[int, float], a: float) -> float:
    """Tokens a dense step by the best length, cycles in dense steps by length.

    >>> round(best_speed({0: 1.0, 3: 1.5}, 0.9), 3)
    2.293
    """
    return max(sum(a**i for i in range(g + 1)) / cycles[g] for g in cycles)


def by_token(accepted: float, drafted: float) -> float:
    """The probability that a token is accepted, of drafts of so many tokens of which so many were, on average.

    >>> round(by_token(0.9 + 0.81, 2), 6)
    0.9
    """
    low, high, whole = 0.0, 1.0, int(drafted)
    for _ in range(50):
        a = (low + high) / 2
        expected = sum(a**i for i in range(1, whole + 1)) + (drafted - whole) * a ** (whole + 1)
        low, high = (a, high) if expected < accepted else (low, a)
    return high


def lines_of(gpu: Sequence[Row], cpu: Sequence[Row]) -> list[Line]:
    """Every shape that was timed, the newest row of each kind. The draft is the fastest of its own weights."""
    found = []
    for model, weights in dict.fromkeys((row["model"], row["weights"]) for row in gpu if row["what"] == "cycle"):
        way = "sparse" if weights == "int4" else "sparse, 4 bits"
        mine = [row for row in gpu if (row["model"], row["weights"], row["way"]) == (model, weights, way)]
        cycles = {int(row["length"]): float(row["ratio"]) for row in mine if row["what"] == "cycle"}
        name = f"{model.upper()} {'in 4 bits' if weights == 'int4' else 'fp16'}, GPU"
        found.append(Line(name, cycles, _points(mine, "forced", "forced")))
    for model in dict.fromkeys(row["model"] for row in cpu if row["what"] == "cycles"):
        mine = [row for row in cpu if (row["model"], row["way"]) == (model, CPU_DRAFT)]
        found.append(Line(f"{model.upper()} fp32, CPU", cpu_cycles(mine), _points(mine, "forced", "forced")))
    return [line for line in found if line.cycles]


def measured(gpu: Sequence[Row], cpu: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Points of trained models' whole texts by name: greedy, and at each temperature."""
    found = {}
    for rows, way, device in ((gpu, "sparse, 4 bits", "GPU"), (cpu, CPU_DRAFT, "CPU")):
        for model in dict.fromkeys(row["model"] for row in rows if row["what"] == "speed"):
            mine = [row for row in rows if (row["model"], row["way"], row["text"]) == (model, way, "all")]
            found[f"{model}'s texts, {device}"] = _points(mine, "speed", "decoding")
    return {name: points for name, points in found.items() if points}


def _points(rows: Sequence[Row], what: str, by: str) -> list[tuple[float, float]]:
    """Acceptance of a token and speed, of the newest row of each ``by``."""
    found = []
    for value in sorted({row[by] for row in rows if row["what"] == what}):
        row = last_of(rows, what=what, **{by: value})
        if row is not None and row["ratio"] and float(row["acceptance"] or 0):
            length = float(row["mean_length"])
            found.append((by_token(length, length / float(row["acceptance"])), float(row["ratio"])))
    return found


def draw(root: Path, picture: Path) -> None:
    """Write the picture of the rows below ``root``. Text stands at each line's end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpu, cpu = (read_csv(root / name) if (root / name).exists() else [] for name in (GPU, CPU))
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    for i, line in enumerate(lines_of(gpu, cpu)):
        speeds = [best_speed(line.cycles, a) for a in SHARES]
        axes.plot(SHARES, speeds, color=f"C{i}")
        axes.text(1.01, speeds[-1], line.name, color=f"C{i}", va="center")
        axes.plot([a for a, _ in line.points], [speed for _, speed in line.points], "o", color=f"C{i}")
    for marker, (name, points) in zip("x+^v", measured(gpu, cpu).items(), strict=False):
        axes.plot(*zip(*points, strict=True), marker, color="black", markersize=8, linestyle="none", label=name)
    axes.plot([], [], "o", color="grey", label="whole run, acceptance forced")
    axes.plot([], [], color="grey", label="best length of a draft, by timed cycles")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.text(0.51, 0.97, "our dense engine", fontsize=9, va="top")
    axes.set_xlabel("probability that a drafted token is accepted")
    axes.set_ylabel("times our dense engine's tokens a second")
    axes.set_xlim(0.5, 1)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(figure, picture.with_suffix(""), ["png"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="folder with benchmarks/results")
    parser.add_argument("--picture", type=Path, default=Path("docs/notes/lossless.png"))
    args = parser.parse_args()
    draw(args.root, args.picture)


if __name__ == "__main__":
    main()
