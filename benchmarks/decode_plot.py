"""Draws ms per token against the prompt, a step's against the batch, fp16 beside 4 bits, from results/decode.csv.

python -m benchmarks.decode_plot
"""

import csv
from pathlib import Path
from typing import Any

from benchmarks.decode_problem import UNION
from benchmarks.rows import command_line
from benchmarks.tables_decode import INT4_GOALS, int4_steps

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, str]
AHEAD = "site=1"
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


def best(rows: list[Row], model: str, engine: str, ahead: bool = False) -> list[tuple[int, float, float]]:
    """(prompt, ms, floor in ms) of the fastest row of each prompt: batch 1, MLP 10 %, predictors at their own site, or
    fused half a block ahead."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        if (row["model"], row["engine"], row["batch"]) != (model, engine, "1") or not row["p50_ms"]:
            continue
        if (row["options"] != AHEAD if ahead else "site=" in row["options"]) or (
            engine == "sparse" and not 0.09 < float(row["mlp_density"]) < 0.11
        ):
            continue
        point = float(row["p50_ms"]), float(row["floor45_ms"])
        found[int(row["prompt"])] = min(point, found.get(int(row["prompt"]), point))
    return [(prompt, *point) for prompt, point in sorted(found.items())]


def batches(rows: list[Row], model: str, engine: str) -> list[tuple[int, float]]:
    """(batch, ms a step), sparse ones at the union densities of the table and with attention dense."""
    found = []
    for row in rows:
        batch = int(row["batch"])
        if (row["model"], row["engine"]) != (model, engine) or batch not in UNION[model] or not row["p50_ms"]:
            continue
        if "crossover" in row["options"]:
            continue
        found.append((batch, float(row["p50_ms"])))
    return sorted(found)


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

    with (RESULTS / "decode.csv").open(newline="", encoding="utf-8") as file:
        every = list(csv.DictReader(file))
    rows = [row for row in every if "weights=" not in row["options"]]
    models = ("6.7b", "30b", "66b")
    figure, axes = plt.subplot_mosaic([list(models), ["batches", "int4", "int4"]], figsize=(12.6, 7.2))
    for model in models:
        axis = axes[model]
        for engine, colour in (("dense", "black"), ("sparse", "tab:blue")):
            points = best(rows, model, engine)
            prompts = [point[0] for point in points]
            axis.plot(prompts, [point[1] for point in points], "o-", color=colour, label=engine, markersize=4)
            axis.plot(prompts, [point[2] for point in points], ":", color=colour, label=f"{engine}, bytes at 4.5 TB/s")
        ahead = best(rows, model, "sparse", ahead=True)
        if ahead:
            label = "sparse, MLP predicted half a block ahead"
            axis.plot([p[0] for p in ahead], [p[1] for p in ahead], "^--", color="tab:green", label=label, markersize=4)
        compiled = [row for row in rows if (row["model"], row["engine"]) == (model, "hf-compile") and row["p50_ms"]]
        if compiled:
            label = "transformers, static cache + compile"
            axis.plot([int(compiled[-1]["prompt"])], [float(compiled[-1]["p50_ms"])], "x", color="tab:red", label=label)
        axis.set(title=f"OPT-{model.upper()} shapes", xlabel="prompt tokens", ylabel="ms per token")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    for engine, colour in (("dense", "black"), ("sparse", "tab:blue")):
        for model, style in (("66b", "o-"), ("6.7b", "s--")):
            points = batches(rows, model, engine)
            label = f"{engine}, {model.upper()}"
            axes["batches"].plot(*zip(*points, strict=True) if points else ((), ()), style, color=colour, label=label)
    axes["batches"].set(title="Batches, MLP at its union", xlabel="rows", ylabel="ms a step", xscale="log")
    axes["batches"].set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes["batches"].minorticks_off()
    axes["batches"].set_ylim(bottom=0)
    axes["batches"].legend(fontsize=6)
    draw_four_bits(axes["int4"])
    where = f"{rows[-1]['gpu']}, rows of decode.csv up to {max(row['date'] for row in every)}"
    condition = "Batch 1: MLP 10 %, heads 50 %, 60 % of the selected neurons live"
    figure.suptitle(f"Decoding, fp16 but for the last panel, {where}. {condition}", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "decode.png", dpi=130)
    print(RESULTS / "decode.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
