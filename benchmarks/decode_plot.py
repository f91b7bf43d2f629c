"""Draws milliseconds per token against the prompt, and a step's against the batch, from benchmarks/results/decode.csv.

python -m benchmarks.decode_plot
"""

import csv
from pathlib import Path

from benchmarks.decode_problem import UNION

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, str]
AHEAD = "site=1 look_ahead=fused"


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


def main() -> int:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with (RESULTS / "decode.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    models = ("6.7b", "30b", "66b")
    figure, axes = plt.subplots(1, len(models) + 1, figsize=(4.2 * len(models) + 4.2, 3.6))
    for axis, model in zip(axes, models, strict=False):
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
            axes[-1].plot(*zip(*points, strict=True) if points else ((), ()), style, color=colour, label=label)
    axes[-1].set(title="Batches, MLP at its union", xlabel="rows", ylabel="ms a step", xscale="log")
    axes[-1].set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes[-1].minorticks_off()
    axes[-1].set_ylim(bottom=0)
    axes[-1].legend(fontsize=6)
    where = f"{rows[-1]['gpu']}, {rows[-1]['date']}, commit {rows[-1]['commit']}"
    figure.suptitle(f"Decoding, fp16, {where}. Batch 1: MLP 10 %, heads 50 %, 60 % of the selected neurons live")
    figure.tight_layout()
    figure.savefig(RESULTS / "decode.png", dpi=130)
    print(RESULTS / "decode.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
