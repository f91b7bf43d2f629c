"""Tries launch settings of the attention block's kernels and of dense fc2 and LM head, each in a chain of its own.

python -m benchmarks.sparse_attention_sweep --models 6.7b
"""

import argparse
import itertools
import math
import time

import torch

from benchmarks.harness import measure
from benchmarks.sparse_attention_problem import ALL_SHAPES, Problem
from kernels import dense_gemv, dense_wide
from kernels.layer_norm import LayerNormWeights


def sweep(name: str, context: int, until: float) -> None:
    """Launch settings of the row kernels and of flash-decoding, each in a chain of its own."""
    shape = ALL_SHAPES[name]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ALL_SHAPES), choices=list(ALL_SHAPES))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing new starts")
    args = parser.parse_args()
    until = time.time() + args.time_limit
    for name in args.models:
        sweep(name, args.context, until)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
