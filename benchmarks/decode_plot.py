"""Draws ms per token against the prompt, a step's against the batch, fp16 beside 4 bits, from results/decode.csv.

python -m benchmarks.decode_plot
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rows import command_line
from benchmarks.tables_decode import INT4_GOALS, batch_steps, int4_steps, prompt_steps, timed_rows

RESULTS = Path(__file__).resolve().parent / "results"
Steps = Mapping[tuple[float, int, str], dict[str, str]]  # rows by size, prompt or batch, and kind
KINDS = (("dense", "black", "dense"), ("sparse", "tab:blue", "sparse"),
         ("ahead", "tab:green", "sparse, look-ahead"))  # fmt: skip
BARS = {  # label of a bar -> what is asked, the kinds of steps of which the fastest is drawn, colour
    "dense, fp16": ("dense", ("fp16",), "black"),
    "dense, 4 bits": ("dense", ("own site", "screen"), "tab:gray"),
    "sparse, heads 85 %, fp16": ("heads 85 %", ("fp16",), "tab:blue"),
    "sparse, heads 85 %, 4 bits": (
        "heads 85 %",
        ("own site", "look-ahead", "ahead", "screen", "screen, ahead"),
        "tab:cyan",
    ),
}


def line(steps: Steps, model: str, kind: str, column: str) -> tuple[list[int], list[float]]:
    """The prompts or batches of a model, and a column of their rows, in order."""
    points = sorted(
        (place, float(row[column])) for (size, place, of), row in steps.items() if (f"{size:g}b", of) == (model, kind)
    )
    return [place for place, _ in points], [value for _, value in points]


def draw_four_bits(axis: Any) -> None:
    """A bar for each kind of step, by model."""
    steps = int4_steps(RESULTS.parents[1])
    for place, (label, (what, kinds, colour)) in enumerate(BARS.items()):
        for group, model in enumerate(INT4_GOALS):
            rows = [steps[model, what, kind] for kind in kinds if (model, what, kind) in steps]
            if not rows:
                continue
            ms = min(float(row["p50_ms"]) for row in rows)
            bar = axis.bar(group + 0.2 * (place - 1.5), ms, 0.2, color=colour, label="" if group else label)
            axis.bar_label(bar, fmt="%.3g", fontsize=7)
    axis.set(title="fp16 and 4 bits, prompt 128", ylabel="ms per token")
    axis.set_xticks(range(len(INT4_GOALS)), [model.upper() for model in INT4_GOALS])
    axis.legend(fontsize=6)


def main() -> int:
    command_line(__doc__).parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    every = timed_rows(RESULTS.parents[1])
    rows = [row for row in every if "weights=" not in row["options"]]
    prompts, batches = prompt_steps(RESULTS.parents[1]), batch_steps(RESULTS.parents[1])
    models = ("6.7b", "30b", "66b")
    figure, axes = plt.subplot_mosaic([list(models), ["batches", "int4", "int4"]], figsize=(12.6, 7.2))
    for model in models:
        axis = axes[model]
        for kind, colour, name in KINDS:
            axis.plot(*line(prompts, model, kind, "p50_ms"), "o-", color=colour, label=name, markersize=4)
        for kind, colour, _ in KINDS[:2]:
            floor = f"{kind}, bytes at 4.5 TB/s"
            axis.plot(*line(prompts, model, kind, "floor45_ms"), ":", color=colour, label=floor)
        compiled = [row for row in rows if (row["model"], row["engine"]) == (model, "hf-compile")]
        if compiled:
            label = "transformers, static cache + compile"
            axis.plot([int(compiled[-1]["prompt"])], [float(compiled[-1]["p50_ms"])], "x", color="tab:red", label=label)
        axis.set(title=f"OPT-{model.upper()} shapes", xlabel="prompt tokens", ylabel="ms per token")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    for engine, colour in (("dense", "black"), ("sparse", "tab:blue")):
        for model, marks in (("66b", "o-"), ("6.7b", "s--")):
            style = {"color": colour, "label": f"{engine}, {model.upper()}"}
            axes["batches"].plot(*line(batches, model, engine, "p50_ms"), marks, **style)
    axes["batches"].set(title="Batches, MLP at its union", xlabel="rows", ylabel="ms a step", xscale="log")
    axes["batches"].set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes["batches"].minorticks_off()
    axes["batches"].set_ylim(bottom=0)
    axes["batches"].legend(fontsize=6)
    draw_four_bits(axes["int4"])
    where = f"{rows[-1]['gpu']}, rows of decode.csv up to {max(row['date'] for row in every)}"
    condition = "Batch 1: MLP 10 %, heads 50 %, 60 % of the selected neurons active"
    figure.suptitle(f"Decoding, fp16 but for the last panel, {where}. {condition}", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "decode.png", dpi=130)
    print(RESULTS / "decode.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
