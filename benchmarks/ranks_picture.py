"""Draws docs/results/several-gpus.png from tensor_parallel.csv: ms a token by prompt, and by the number of GPUs.

    python -m benchmarks.ranks_picture

The first panel has the form of the paper's figure of OPT-175B. One GPU's points are rows of decode.csv. Dotted lines
are the bytes of the rank that reads most, over the best read measured in the run.
"""

from pathlib import Path
from typing import Any

from benchmarks.rows import command_line
from benchmarks.tables_ranks import GOAL_CARD, Step, alone, ms_of, steps_of
from dejavu_train.evaluation.figure import save

LARGEST = "175b"
MODEL = "66b"
Line = dict[int, tuple[float, float]]  # by prompt or number of GPUs: ms a step, and of its floor


def label(step: Step) -> str:
    """What a line is."""
    return f"{step.weights}, " + ("dense" if step.neurons == 1 else f"heads {100 * step.heads:g} %")


def lines_of(root: Path, model: str, by: str) -> dict[str, Line]:
    """Of one row on the card of the goals, by "prompt" or by "gpus".

    By prompt it is on as many GPUs as were used at most. By GPUs it is behind 128 tokens.
    """
    found: dict[str, Line] = {}
    rows = {step: row for step, row in steps_of(root).items() if step.model == model and step.batch == 1}
    steps = {step: row for step, row in rows.items() if step.card == GOAL_CARD and not step.reckoned}
    most = max((step.gpus for step in steps), default=0)
    for step, row in steps.items():
        if step.neurons not in (0.1, 1.0) or (step.gpus != most if by == "prompt" else step.prompt != 128):
            continue
        line = found.setdefault(label(step), {})
        line[getattr(step, by)] = ms_of(row), float(row["floor_ms"])
        one = alone(root, step) if by == "gpus" else None
        if one is not None:
            line[1] = float(one["p50_ms"]), float(one["floor_ms"])
    return {name: dict(sorted(line.items())) for name, line in found.items()}


def draw(root: Path, picture: Path) -> None:
    """Write the picture of the rows below ``root``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.8))
    by_prompt, by_gpus = lines_of(root, LARGEST, "prompt"), lines_of(root, MODEL, "gpus")
    colours = {name: f"C{i}" for i, name in enumerate({**by_prompt, **by_gpus})}
    for axis, lines in zip(axes, (by_prompt, by_gpus), strict=True):
        for name, line in lines.items():
            draw_line(axis, line, colours[name])
        axis.set_xticks(sorted({place for line in lines.values() for place in line}))
        axis.set_ylim(bottom=0)
        axis.set_ylabel("ms a token")
        axis.spines[["top", "right"]].set_visible(False)
    most = max((step.gpus for step in steps_of(root) if step.model == LARGEST), default=0)
    axes[0].set(title=f"OPT-{LARGEST.upper()} shapes on {most} GPUs", xlabel="prompt tokens")
    axes[1].set(title=f"OPT-{MODEL.upper()} shapes, prompt 128", xlabel="GPUs")
    shown = [pyplot.Line2D([], [], color=colour, marker="o", label=name) for name, colour in colours.items()]
    shown.append(pyplot.Line2D([], [], color="grey", linestyle=":", label="bytes at the best read"))
    figure.legend(
        handles=shown, loc="lower center", ncols=3, frameon=False, fontsize=9,
        title=f"One row, {GOAL_CARD}. 10 % of the neurons where heads are named",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.19, 1, 1))
    save(figure, picture.with_suffix(""), ["png"])


def draw_line(axis: Any, line: Line, colour: str) -> None:
    axis.plot(list(line), [ms for ms, _ in line.values()], "o-", color=colour, markersize=4)
    axis.plot(list(line), [floor for _, floor in line.values()], ":", color=colour)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="folder with benchmarks/results")
    parser.add_argument("--picture", type=Path, default=Path("docs/results/several-gpus.png"))
    args = parser.parse_args()
    draw(args.root, args.picture)


if __name__ == "__main__":
    main()
