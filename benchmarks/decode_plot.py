"""Draws milliseconds per token against the prompt from benchmarks/results/decode.csv, our dense and sparse engine.

python -m benchmarks.decode_plot
"""

import csv
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def best(rows: list[dict[str, str]], model: str, engine: str) -> list[tuple[int, float, float]]:
    """(prompt, ms, floor in ms) of the fastest row of each prompt: batch 1, MLP 10 %, predictors at their own site."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        if (row["model"], row["engine"], row["batch"]) != (model, engine, "1") or not row["p50_ms"]:
            continue
        if "site=" in row["options"] or (engine == "sparse" and not 0.09 < float(row["mlp_density"]) < 0.11):
            continue
        point = float(row["p50_ms"]), float(row["floor45_ms"])
        found[int(row["prompt"])] = min(point, found.get(int(row["prompt"]), point))
    return [(prompt, *point) for prompt, point in sorted(found.items())]


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
    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 3.6))
    for axis, model in zip(axes, models, strict=True):
        for engine, colour in (("dense", "black"), ("sparse", "tab:blue")):
            points = best(rows, model, engine)
            prompts = [point[0] for point in points]
            axis.plot(prompts, [point[1] for point in points], "o-", color=colour, label=engine, markersize=4)
            axis.plot(prompts, [point[2] for point in points], ":", color=colour, label=f"{engine}, bytes at 4.5 TB/s")
        compiled = [row for row in rows if (row["model"], row["engine"]) == (model, "hf-compile")]
        if compiled:
            label = "transformers, static cache + compile"
            axis.plot([int(compiled[-1]["prompt"])], [float(compiled[-1]["p50_ms"])], "x", color="tab:red", label=label)
        axis.set(title=f"OPT-{model.upper()} shapes", xlabel="prompt tokens", ylabel="ms per token")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    figure.suptitle(f"Decoding, batch 1, fp16, {rows[0]['gpu']}, {rows[0]['date']}: MLP 10 %, heads 50 %, 60 % live")
    figure.tight_layout()
    figure.savefig(RESULTS / "decode.png", dpi=130)
    print(RESULTS / "decode.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
