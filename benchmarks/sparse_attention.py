"""The attention block of every OPT shape over the selected heads: q/k/v, attention, out-projection, selection counted.

    python -m benchmarks.sparse_attention                                               measure (one GPU)
    python -m benchmarks.sparse_attention --plot benchmarks/results/sparse_attention.csv     draw from committed rows

"block" is LayerNorm, head predictor, selection, q/k/v, flash-decoding and the out-projection with bias and residual, as
a decoding step runs them; "projections" is q/k/v and out-projection alone, with the selection given. Dense is the two
cuBLAS products alone ("projections") or our dense stages ("block"). "gaps": selected heads first fill the K/V that they
skipped. Weights are rotated past the L2; the block is compared with the references before it is timed.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import BenchRow, Rows, measure, read_rows
from benchmarks.sparse_attention_problem import ALL_SHAPES, Problem
from dejavu_train.models.opt import OPTShape

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
# The original's kernels on the same GPU model, microseconds: q/k/v and out-projection at 50 % of the heads.
ORIGINAL = {4096: {0.5: 15.6 + 8.5}, 9216: {0.5: 61.1 + 24.6}, 12288: {0.5: 106.6 + 39.2}}


def run_shape(rows: Rows, shape: OPTShape, context: int, batch: int, until: float) -> None:
    """All rows of one shape and batch; a batch gets the block alone, sparse and dense."""
    for density in DENSITIES:
        if time.time() > until:
            print("time limit: left out from here:", shape.d_model, batch, density, flush=True)
            return
        _run(rows, Problem(shape, context, density, batch=batch))
        torch.cuda.empty_cache()


def _run(rows: Rows, problem: Problem) -> None:
    shape, batch, size = problem.shape, problem.batch, problem.bytes()
    density = problem.picked / shape.n_heads
    problem.gaps = True
    problem.check()

    def add(op: str, provider: str, step: Callable[[int], None], conditions: str = "PDL") -> None:
        # The attention advances the watermarks, so a step with it can pass the sets only once between two resets.
        rounds = 1 if op in ("block", "attention") else 4
        times = measure(step, problem.sets, before=problem.reset, rounds=rounds)
        where = f"{conditions}, context {problem.context}"
        if batch > 1:
            where += f", union {problem.union:.3f}"
        rows.add(BenchRow(op, provider, shape.n_heads, shape.d_model, density, 1.0, batch, 0, "fp16", *times,
                          size[op], size[op] / times[1] / 1e3, where))  # fmt: skip

    add("block", "sparse, gaps", problem.block)
    if batch == 1:
        add("qkv", "sparse, gaps", problem.project)
    problem.gaps = False
    add("block", "sparse", problem.block)
    if density == 1:
        add("block", "dense ours", problem.dense_block)
    if batch > 1:
        return
    add("select", "sparse", problem.select)
    add("qkv", "sparse", problem.project)
    add("attention", "sparse", problem.attend)
    add("out", "sparse", problem.out)
    add("projections", "sparse", problem.projections)
    add("projections", "torch indexing", problem.indexing, "list given")
    if density == 1:
        add("projections", "cuBLAS", problem.cublas, "two products alone")


def plot(csv_path: str) -> None:
    """One panel a shape: time of the projections and of the whole block against the density of heads."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in read_rows(csv_path) if row["batch"] == "1"]
    # A shape that a time limit cut short has no dense rows, which come last.
    widths = sorted({int(row["d"]) for row in rows if row["provider"] == "cuBLAS"})
    columns = min(3, len(widths))
    lines = math.ceil(len(widths) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4.2 * lines), squeeze=False)
    for axis in axes.flat[len(widths) :]:
        axis.set_visible(False)
    for axis, d in zip(axes.flat, widths, strict=False):
        mine = [row for row in rows if int(row["d"]) == d]

        def line(op, provider, label, style, axis=axis, mine=mine):
            points = sorted((float(r["density"]), float(r["p50_us"])) for r in mine
                            if (r["op"], r["provider"]) == (op, provider))  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=3)

        dense = [float(r["p50_us"]) for r in mine if (r["op"], r["provider"]) == ("projections", "cuBLAS")]
        if dense:
            axis.axhline(dense[0], color="black", label="q/k/v and out dense, cuBLAS")
            axis.plot([0, 1], [0, dense[0]], ":", color="grey", label="dense x density")
        line("block", "sparse, gaps", "whole block, missing K/V filled", "o-")
        line("block", "sparse", "whole block, nothing missing", "o--")
        line("block", "dense ours", "whole block, our dense", "k*")
        line("projections", "sparse", "q/k/v and out", "s-")
        line("projections", "torch indexing", "q/k/v and out, torch indexing", "x-")
        line("attention", "sparse", "attention over the cache", ".-")
        line("select", "sparse", "predictor and selection", ".:")
        if d in ORIGINAL:
            axis.plot(*zip(*ORIGINAL[d].items(), strict=True), "v", label="original, q/k/v and out")
        axis.set(title=f"d {d}", xlabel="density of heads", ylabel="us")
        axis.set_ylim(0, 2.2 * dense[0] if dense else None)
        axis.legend(fontsize=6)
    first = rows[0]
    where = f"{first['gpu']}, {first['date']}, commit {first['commit']}, {first['conditions']}"
    figure.suptitle(f"Attention block, batch 1, fp16, {where}")
    figure.tight_layout()
    target = Path(csv_path).parent / "sparse_attention.png"
    figure.savefig(target, dpi=130)
    print(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="benchmarks/results/sparse_attention.csv")
    parser.add_argument("--models", nargs="+", default=list(ALL_SHAPES), choices=list(ALL_SHAPES))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--plot", metavar="CSV")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing new starts")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return 0
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    until = time.time() + args.time_limit
    rows = Rows(args.csv)
    for name in args.models:
        for batch in args.batches:
            run_shape(rows, ALL_SHAPES[name], args.context, batch, until)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
