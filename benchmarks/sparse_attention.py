"""The attention block of every OPT shape over the selected heads: q/k/v, attention, out-projection, selection counted.

    python -m benchmarks.sparse_attention --csv benchmarks/results/sparse_attention.csv     measure (one GPU)
    python -m benchmarks.sparse_attention --sweep --csv sweep.csv                           candidates for settings
    python -m benchmarks.sparse_attention --plot benchmarks/results/sparse_attention.csv    draw from committed rows

"block" is LayerNorm, head predictor, selection, q/k/v, flash-decoding and the out-projection with bias and residual, as
a decoding step runs them; "projections" is q/k/v and out-projection alone, with the selection given. Dense is the two
cuBLAS products alone ("projections") or our dense stages ("block"). Weights are rotated past the L2.
"""

import argparse
import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.decode import SHAPES
from benchmarks.harness import BenchRow, Rows, measure, read_rows, sets_for
from dejavu_train.opt_model import OPTShape
from kernels import dense_gemv, dense_wide, flash_decode, head_select, out_projection, qkv
from kernels.layer_norm import LayerNormWeights

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
SHAPES_HERE = SHAPES | {"175b": OPTShape(12288, 49152, 96, 96, 50272, 2048)}
# The original's kernels on the same GPU model, microseconds: q/k/v and out-projection at 50 % of the heads.
ORIGINAL = {4096: {0.5: 15.6 + 8.5}, 9216: {0.5: 61.1 + 24.6}, 12288: {0.5: 106.6 + 39.2}}


def order_of(mask: torch.Tensor) -> torch.Tensor:
    """The selected heads in order and, at the end, their number: (h + 1) int32."""
    ids = mask[0].nonzero().flatten()
    order = torch.zeros(mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    order[: len(ids)], order[-1] = ids, len(ids)
    return order


class Problem:
    """Sets of weights, caches and selections of one shape; steps by set."""

    def __init__(self, shape: OPTShape, context: int, density: float) -> None:
        d, h, hd = shape.d_model, shape.n_heads, shape.head_dim
        self.shape, self.context, self.density = shape, context, density
        self.sets = sets_for(int(density * 8 * d * d), 8 * d * d + 4 * context * d)
        self.sets = min(self.sets, 24)
        self.picked = max(1, round(density * h))

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=torch.float16, device="cuda").normal_(0, 0.02)

        def one() -> SimpleNamespace:
            selection = head_select.head_selection(h, "cuda")
            mask = torch.zeros(1, h, dtype=torch.bool, device="cuda")
            mask[0, torch.randperm(h, device="cuda")[: self.picked]] = True
            selection.set_mask(mask)
            own = head_select.head_selection(h, "cuda")
            bias = torch.where(mask[0], 100.0, -100.0)  # the predictor runs and decides as the given selection does
            return SimpleNamespace(
                qkv=normal(h, 3, hd, d), qkv_bias=normal(h, 3, hd), out=normal(d, d), out_bias=normal(d),
                predictor=normal(h, d), bias=bias, selection=selection, own=own,
                k=normal(1, h, context + 1, hd), v=normal(1, h, context + 1, hd), attn_in=normal(1, context + 1, d),
                watermark=torch.full((1, h), context, dtype=torch.int32, device="cuda"),
                ids=mask[0].nonzero().flatten(), order=order_of(mask),
            )  # fmt: skip

        self.data = [one() for _ in range(self.sets)]
        self.ln = LayerNormWeights(torch.ones(d, dtype=torch.float16, device="cuda"), normal(d))
        self.x = torch.randn(1, d, device="cuda")
        self.y = torch.empty(1, d, device="cuda")
        self.half = normal(1, d)
        self.threshold = torch.zeros(1, device="cuda")
        self.position = torch.full((1,), context, dtype=torch.int32, device="cuda")
        self.row_state = torch.ones(1, dtype=torch.int32, device="cuda")
        self.q = torch.empty(1, h, hd, device="cuda")
        self.order = torch.zeros(h + 1, dtype=torch.int32, device="cuda")
        self.mixed = torch.randn(1, d, device="cuda")
        self.scratch = flash_decode.AttentionScratch.empty(1, h, hd, context + 1, "cuda")

    def select(self, i: int, pdl: bool) -> None:
        s = self.data[i]
        head_select.head_select(
            self.x, self.ln, s.predictor, s.bias, self.threshold, self.position, self.row_state, s.attn_in, s.own, pdl
        )

    def project(self, i: int, pdl: bool, settings: dense_gemv.RowSettings | None = None) -> None:
        s = self.data[i]
        qkv.qkv(s.attn_in, s.qkv, s.qkv_bias, s.selection, self.position, s.watermark, None, self.q, s.k, s.v,
                self.order, "backfill", pdl, settings)  # fmt: skip

    def attend(self, i: int, pdl: bool, dense: bool = False, positions: int | None = None) -> None:
        s = self.data[i]
        flash_decode.flash_decode(self.q, s.k, s.v, None if dense else s.selection, self.position,
                                  None if dense else s.watermark, None, self.mixed, self.scratch, pdl,
                                  positions)  # fmt: skip

    def out(self, i: int, pdl: bool, dense: bool = False, settings: dense_gemv.RowSettings | None = None) -> None:
        s = self.data[i]
        out_projection.project_heads(self.mixed, s.out, s.out_bias, self.x, None if dense else s.selection, s.order,
                                     self.y, pdl, settings)  # fmt: skip

    def block(self, i: int, pdl: bool) -> None:
        self.select(i, pdl)
        self.project(i, pdl)
        self.attend(i, pdl)
        self.out(i, pdl)

    def dense_project(self, i: int, pdl: bool, settings: dense_gemv.RowSettings | None = None) -> None:
        s = self.data[i]
        qkv.qkv_dense(self.x, self.ln, s.qkv, s.qkv_bias, self.position, self.q, s.k, s.v, pdl, settings)

    def dense_block(self, i: int, pdl: bool) -> None:
        self.dense_project(i, pdl)
        self.attend(i, pdl, True)
        self.out(i, pdl, True)

    def cublas(self, i: int) -> None:
        s = self.data[i]
        torch.nn.functional.linear(self.half, s.qkv.view(-1, self.shape.d_model))
        torch.nn.functional.linear(self.half, s.out)

    def indexing(self, i: int) -> None:
        s = self.data[i]
        torch.nn.functional.linear(self.half, s.qkv[s.ids].view(-1, self.shape.d_model))
        columns = s.out.view(self.shape.d_model, self.shape.n_heads, -1)[:, s.ids].reshape(self.shape.d_model, -1)
        torch.nn.functional.linear(self.half[:, : columns.shape[1]], columns)

    def bytes(self) -> dict[str, int]:
        d, hd = self.shape.d_model, self.shape.head_dim
        rows = 4 * self.picked * hd * d * 2
        cache = self.picked * hd * 2 * 2 * (self.context + 1)
        return {"projections": rows, "qkv": rows * 3 // 4, "out": rows // 4, "cache": cache,
                "block": rows + cache + self.shape.n_heads * d * 2}  # fmt: skip


def run_shape(rows: Rows, shape: OPTShape, context: int, until: float) -> None:
    for density in DENSITIES:
        problem = Problem(shape, context, density)
        size = problem.bytes()

        def add(op, provider, step, n_bytes, conditions, problem=problem, density=density):
            if time.time() > until:
                return
            times = measure(step, problem.sets)
            rows.add(BenchRow(op, provider, shape.n_heads, shape.d_model, problem.picked / shape.n_heads, 1.0, 1, 0,
                              "fp16", *times, n_bytes, n_bytes / times[1] / 1e3, conditions))  # fmt: skip

        where = f"context {context}"
        add("block", "sparse", lambda i, problem=problem: problem.block(i, True), size["block"], f"PDL, {where}")
        add(
            "select",
            "sparse",
            lambda i, problem=problem: problem.select(i, True),
            shape.n_heads * shape.d_model * 2,
            f"PDL, {where}",
        )
        add("qkv", "sparse", lambda i, problem=problem: problem.project(i, True), size["qkv"], f"PDL, {where}")
        add("attention", "sparse", lambda i, problem=problem: problem.attend(i, True), size["cache"], f"PDL, {where}")
        add("out", "sparse", lambda i, problem=problem: problem.out(i, True), size["out"], f"PDL, {where}")

        def both(i, problem=problem):
            problem.project(i, True)
            problem.out(i, True)

        add("projections", "sparse", both, size["projections"], f"PDL, {where}")
        add("projections", "torch indexing", problem.indexing, size["projections"], "list given")
        if density == 1.0:
            add("projections", "cuBLAS", problem.cublas, size["projections"], "two products alone")
            add(
                "block",
                "dense ours",
                lambda i, problem=problem: problem.dense_block(i, True),
                size["block"],
                f"PDL, {where}",
            )
        torch.cuda.empty_cache()


def sweep(rows: Rows, name: str, context: int, until: float) -> None:
    """Launch settings of the row kernels and of flash-decoding, each in a chain of its own."""
    shape = SHAPES_HERE[name]
    for density, dense in ((1.0, True), (0.5, False)):
        problem = Problem(shape, context, density)
        problem.sets = min(problem.sets, 8)
        size = problem.bytes()
        found = []
        for programs, n_rows, warps in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4), (4, 8, 16)):
            tile = n_rows * shape.d_model * 2
            if tile > 36000 or programs * warps > 64 or tile * programs < 12000 or tile / warps > 6000:
                continue
            if time.time() > until:
                break
            settings = dense_gemv.RowSettings(programs, n_rows, warps)
            step = problem.dense_project if dense else problem.project
            times = measure(lambda i, step=step, settings=settings: step(i, True, settings), problem.sets, 12)
            found.append((times[1], f"p{programs} r{n_rows} w{warps}"))
        found.sort()
        label = "qkv dense" if dense else "qkv 50 %"
        best = "  ".join(f"{t:.2f} [{what}]" for t, what in found[:8])
        print(f"sweep {name} {label} ({size['qkv'] / 1e6:.1f} MB): {best} ... {found[-1:]}", flush=True)
        for positions in (64, 128, 256):
            times = measure(
                lambda i, p=positions, problem=problem, dense=dense: problem.attend(i, True, dense, p), problem.sets, 12
            )
            print(f"sweep {name} attention {label} positions {positions}: {times[1]:.2f} us", flush=True)
        time_of = measure(lambda i, problem=problem: problem.select(i, True), problem.sets, 12)[1]
        print(f"sweep {name} select {time_of:.2f} us", flush=True)
        found = []
        for programs, n_rows, warps in itertools.product((2, 4, 6, 8), (1, 2, 4, 8, 16, 32), (2, 4, 8)):
            tile = n_rows * shape.d_model * 2
            if dense and (tile > 36000 or programs * warps > 64 or tile * programs < 12000 or tile / warps > 6000):
                continue
            if not dense and (programs > 2 or n_rows < 4):
                continue
            if time.time() > until:
                break
            settings = dense_gemv.RowSettings(programs, n_rows, warps)
            step = lambda i, s=settings, problem=problem, dense=dense: problem.out(i, True, dense, s)  # noqa: E731
            found.append((measure(step, problem.sets, 12)[1], f"p{programs} r{n_rows} w{warps}"))
        found.sort()
        best = "  ".join(f"{t:.2f} [{what}]" for t, what in found[:6])
        print(f"sweep {name} out {label} ({size['out'] / 1e6:.1f} MB): {best}", flush=True)
        torch.cuda.empty_cache()
    # fc2 dense: few long rows.
    d = shape.d_model
    mats = [torch.empty(d, shape.d_ffn, dtype=torch.float16, device="cuda").normal_(0, 0.02) for _ in range(4)]
    y, base, to = torch.randn(1, shape.d_ffn, device="cuda"), torch.zeros(1, d, device="cuda"), torch.empty(1, d).cuda()
    found = []
    for choice in itertools.product((4, 8, 16), (512, 1024, 2048), (4, 8)):
        if choice[0] * choice[1] / choice[2] > 4096 or choice[0] * choice[1] / choice[2] < 512 or time.time() > until:
            continue
        step = lambda i, c=choice: dense_wide.dense_wide(y, mats[i], mats[i][0, :d], base, to, True, c)  # noqa: E731
        found.append((measure(step, 4, 8)[1], choice))
    found.sort()
    best = "  ".join(f"{t:.1f} {what} {mats[0].nbytes / t / 1e6:.2f} TB/s" for t, what in found[:5])
    print(f"sweep {name} fc2 dense: {best}", flush=True)
    # The LM head: one long matrix.
    d = shape.d_model
    weights = [torch.empty(50272, d, dtype=torch.float16, device="cuda").normal_(0, 0.02) for _ in range(3)]
    x, out = torch.randn(1, d, device="cuda"), torch.empty(1, 50272, device="cuda")
    ln = LayerNormWeights(torch.ones(d, dtype=torch.float16, device="cuda"), torch.zeros(d, device="cuda").half())
    found = []
    for programs, n_rows, warps in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4), (4, 8, 16)):
        tile = n_rows * d * 2
        if tile > 36000 or programs * warps > 64 or tile * programs < 12000 or tile / warps > 6000:
            continue
        if time.time() > until:
            break
        settings = dense_gemv.RowSettings(programs, n_rows, warps)
        times = measure(
            lambda i, settings=settings: dense_gemv.dense_rows(x, ln, weights[i], None, "none", out, True, settings),
            3,
            8,
        )
        found.append((times[1], f"p{programs} r{n_rows} w{warps}"))
    found.sort()
    print(f"sweep {name} LM head ({weights[0].nbytes / 1e6:.0f} MB): "
          + "  ".join(f"{t:.1f} [{what}] {weights[0].nbytes / t / 1e6:.2f} TB/s" for t, what in found[:6]))  # fmt: skip


def plot(csv_path: str) -> None:
    """One panel a shape: time of the projections and of the whole block against the density of heads."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_rows(csv_path)
    widths = sorted({int(row["d"]) for row in rows})
    columns = min(3, len(widths))
    figure, axes = plt.subplots(math.ceil(len(widths) / columns), columns, figsize=(5 * columns, 8), squeeze=False)
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
        line("block", "sparse", "whole block, selection counted", "o-")
        line("block", "dense ours", "whole block, our dense", "k*")
        line("projections", "sparse", "q/k/v and out", "s-")
        line("projections", "torch indexing", "torch indexing", "x-")
        line("attention", "sparse", "attention over the cache", ".-")
        if d in ORIGINAL:
            axis.plot(*zip(*ORIGINAL[d].items(), strict=True), "v", label="original, q/k/v and out")
        axis.set(title=f"d {d}", xlabel="density of heads", ylabel="us")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    figure.suptitle(f"Attention block, batch 1, fp16, {rows[0]['gpu']}, {rows[0]['date']}, {rows[0]['conditions']}")
    figure.tight_layout()
    target = Path(csv_path).parent / "sparse_attention.png"
    figure.savefig(target, dpi=130)
    print(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="benchmarks/results/sparse_attention.csv")
    parser.add_argument("--models", nargs="+", default=list(SHAPES_HERE), choices=list(SHAPES_HERE))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sweep", action="store_true")
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
        if args.sweep:
            sweep(rows, name, args.context, until)
        else:
            run_shape(rows, SHAPES_HERE[name], args.context, until)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
