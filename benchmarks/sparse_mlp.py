"""The sparse MLP of every OPT shape against dense cuBLAS, torch indexing, the ideal line and the original's kernels.

    python -m benchmarks.sparse_mlp --csv benchmarks/results/sparse_mlp.csv       measure (one GPU)
    python -m benchmarks.sparse_mlp --batch 8 --densities 0.1 0.2 0.4             a batch, by the density of its union
    python -m benchmarks.sparse_mlp --plot benchmarks/results/sparse_mlp.csv      draw from committed rows (no GPU)

The stages are the decode engine's. "whole" counts LayerNorm, predictor, selection, fc1, fc2, bias and residual,
launched as programmatic dependents of each other but not of the step before; "chain" lets it overlap that too, as a
decoding step does; "mlp" is fc1 and fc2 in one grid with the list given, "fc1" and "fc2" are
kernels of their own (for one row fc2 is what follows a cascade, fc1 is for comparison; for batches they are the
engine's), all three in chains of themselves. Dense is the two cuBLAS products alone, or what the engine
would run instead. Bytes count fc2 rows of live neurons only.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script, also run where nothing is installed

from benchmarks.best_read import D, N, best_read
from benchmarks.harness import BenchRow, Rows, measure, read_rows, sets_for

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
# The original's kernels on the same GPU model, microseconds, fc1 + fc2 without selection (its own autotune's best).
ORIGINAL = {
    4096: {0.05: 15.2, 0.1: 17.8, 0.2: 24.6, 0.4: 37.7, 0.8: 60.2, 1.0: 71.6},
    9216: {0.05: 29.8, 0.1: 44.4, 0.2: 73.7, 0.4: 139.0, 0.8: 275.2, 1.0: 346.7},
    12288: {0.05: 42.1, 0.1: 66.5, 0.2: 128.8, 0.4: 242.0, 0.8: 484.7, 1.0: 600.7},
}
ORIGINAL_SELECTION = {4096: 19.9 + 56.0, 9216: 37.5 + 31.0, 12288: 46.7 + 31.0}  # rank-1000 predictor and top-k
STEPS = 48  # in a graph: its start-up, 7-11 us, then adds less than 0.3 to a step


def best_read_row(rows: Rows) -> None:
    """The row that shares of the best read are counted with."""
    times, size = best_read()
    rows.add(BenchRow("read", "best row kernel", N, D, 1.0, 1.0, 1, 0, "fp16", *times, size, size / times[1] / 1e3,
                      "graph of 12 steps"))  # fmt: skip


def run_shape(
    rows: Rows, d: int, densities: tuple[float, ...], live: float, predictor: str, batch: int, until: float, warm: bool
) -> None:
    """All providers of one shape. predictor: "fp16", "fp16-half" (half the rank) or "int8"."""
    from benchmarks.sparse_mlp_problem import Problem

    rank = max(64, d // (32 if predictor == "fp16-half" else 16))
    touched = int((0.05 * 1.6 * 8 + (0.3 if predictor == "int8" else 0.6)) * d * d)
    sets = 2 if warm else sets_for(touched, 17 * d * d)
    problem = Problem(d, rank, sets, live, torch.int8 if predictor == "int8" else None, batch)
    main = predictor == "fp16" and live == 0.6
    rounds = 1 if warm else -(-STEPS // sets)

    def add(op: str, provider: str, step: Callable[[int], None], size: int, conditions: str = "") -> None:
        if time.time() > until:
            return
        times = measure(step, sets, 1 if warm else 11, rounds=rounds)
        rows.add(BenchRow(op, provider, problem.n, d, problem.density, live, batch, rank, predictor, *times, size,
                          size / times[1] / 1e3, conditions))  # fmt: skip

    for density in densities:
        if time.time() > until:
            return
        problem.set_density(density)
        problem.check()
        size = problem.bytes()
        add("whole", "sparse", problem.step_whole, size["whole"], "PDL inside")
        add("whole", "sparse", partial(problem.step_whole, enter=True), size["whole"], "chain")
        if batch == 1 and (main or live == 1.0):
            add("mlp", "sparse", partial(problem.both, pdl=True), size["fc1"] + size["fc2"], "chain")
        if main or live == 1.0:
            add("fc1", "sparse", partial(problem.first, pdl=True), size["fc1"], "chain")
            add("fc2", "sparse", partial(problem.second, pdl=True), size["fc2"], "chain")
        if main and batch == 1:
            add("whole", "sparse", partial(problem.step_whole, inner=False), size["whole"], "no PDL")
            add("mlp", "torch indexing", problem.step_indexing, size["fc1"] + size["fc2"], "list given")
    problem.set_density(densities[0])
    size = problem.bytes()
    add("predict", "predict + select", partial(problem.predict, pdl=True), size["predictor"], "chain")
    if batch == 1:
        add("pack", "list", partial(problem.pack, pdl=True), 0, "chain")
    if main:
        problem.density = 1.0
        add("dense", "cuBLAS", problem.step_dense_cublas, size["dense"], "two products alone")
        add("dense", "engine", problem.step_dense_engine, size["dense"], "LayerNorm to residual, chain")


def plot(csv_path: str, folder: str | None) -> None:
    """One panel a shape: time against density, batch 1."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in read_rows(csv_path) if row["batch"] == "1"]
    widths = sorted({int(row["d"]) for row in rows if row["op"] == "dense"})
    columns = min(3, len(widths))
    figure, axes = plt.subplots(math.ceil(len(widths) / columns), columns, figsize=(5 * columns, 8), squeeze=False)
    for axis, d in zip(axes.flat, widths, strict=False):
        mine = [row for row in rows if int(row["d"]) == d and row["dtype"] == "fp16"]

        def line(op, provider, live, conditions, label, style, axis=axis, mine=mine):
            points = sorted((float(r["density"]), float(r["p50_us"])) for r in mine
                            if (r["op"], r["provider"], float(r["live"])) == (op, provider, live)
                            and conditions in r["conditions"])  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=3)

        dense = next(float(r["p50_us"]) for r in mine if r["op"] == "dense" and r["provider"] == "cuBLAS")
        axis.axhline(dense, color="black", label="dense cuBLAS")
        axis.plot([0, 1], [0, dense], ":", color="grey", label="dense x density")
        line("whole", "sparse", 0.6, "PDL inside", "whole, predictor counted (60 % live)", "o-")
        line("whole", "sparse", 0.6, "chain", "the same in a chain of steps", "o:")
        line("mlp", "sparse", 0.6, "", "fc1 + fc2 only (60 % live)", "s-")
        line("mlp", "sparse", 1.0, "", "fc1 + fc2 only (all live)", "^--")
        line("mlp", "torch indexing", 0.6, "", "torch indexing", "x-")
        if d in ORIGINAL:
            points = sorted(ORIGINAL[d].items())
            axis.plot(*zip(*points, strict=True), "v-", label="original's kernels only", markersize=3)
            counted = [(x, y + ORIGINAL_SELECTION[d]) for x, y in points]
            axis.plot(*zip(*counted, strict=True), "v--", label="original, selection counted", markersize=3)
        predict = [float(r["p50_us"]) for r in mine if r["op"] == "predict"]
        if predict:
            axis.axhline(predict[0], color="tab:red", linewidth=0.8, label="predictor + selection alone")
        axis.set(title=f"{4 * d} x {d}", xlabel="density", ylabel="µs", ylim=(0, 1.6 * dense))
        axis.legend(fontsize=6)
    gpu = rows[0]["gpu"] if rows else ""
    figure.suptitle(f"Sparse MLP, batch 1, fp16, {gpu}, {rows[0]['date']}, CUDA graph, weights past the L2")
    figure.tight_layout()
    target = Path(folder or Path(csv_path).parent) / "sparse_mlp.png"
    figure.savefig(target, dpi=130)
    print(target)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="benchmarks/results/sparse_mlp.csv", help="rows are appended here")
    parser.add_argument("--d", type=int, nargs="*", default=[4096, 9216, 12288, 7168, 5120, 2048])
    parser.add_argument("--densities", type=float, nargs="*", default=list(DENSITIES))
    parser.add_argument("--live", type=float, nargs="*", default=[0.6, 1.0], choices=[0.6, 1.0])
    parser.add_argument("--predictors", nargs="*", default=["fp16", "fp16-half", "int8"])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop measuring after this long")
    parser.add_argument("--warm", action="store_true", help="only compile: several processes fill the cache")
    parser.add_argument("--plot", metavar="CSV", help="draw committed rows; no GPU needed")
    arguments = parser.parse_args(argv)
    if arguments.plot:
        plot(arguments.plot, None)
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA GPU; --plot draws the committed rows without one")
    until = time.time() + arguments.seconds
    rows = Rows(arguments.csv)
    if not arguments.warm and 1 in arguments.batch:
        best_read_row(rows)
    cases = [(predictor, 0.6) for predictor in arguments.predictors if 0.6 in arguments.live]
    cases += [("fp16", 1.0)] if 1.0 in arguments.live and "fp16" in arguments.predictors else []
    for batch in arguments.batch:
        for predictor, live in cases:
            for d in arguments.d:
                every = tuple(arguments.densities) if predictor == "fp16" else (0.1,)
                run_shape(rows, d, every, live, predictor, batch, until, arguments.warm)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
