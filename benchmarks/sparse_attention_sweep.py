"""Tries launch settings of the attention block's kernels and of dense fc1, fc2 and LM head, each in a chain of its own.

    python -m benchmarks.sparse_attention_sweep --models 6.7b --kernels qkv out

Compiling takes longer than measuring: --once runs every candidate one time, so that several processes can fill the
compiler's cache first.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.harness import measure
from benchmarks.sparse_attention_problem import ALL_SHAPES, Problem
from kernels.attention.out_projection import HeadTileSettings, ProjectSettings
from kernels.attention.qkv import TileSettings
from kernels.common.layer_norm import LayerNormWeights
from kernels.dense import dense_gemv, dense_wide
from kernels.dense.dense_gemv import RowSettings

KERNELS = ("select", "qkv", "attention", "out", "qkv-dense", "attention-dense", "out-dense", "fc1", "fc2", "lm-head")
STEPS = 12  # of a graph, at least: its start, some microseconds, is shared out over them


def tiles() -> Iterable[TileSettings]:
    """Tiles of 16 rows and one warp fill the machine evenly; of 32, they share the input."""
    sizes = ((128, 4), (128, 6), (128, 8), (256, 3), (256, 4), (256, 6), (512, 2), (512, 3))
    for (rows, warps), (block, stages) in itertools.product(((16, 1), (16, 2), (32, 2), (32, 4)), sizes):
        if (rows + 8) * block * 2 * stages <= 100_000 and block * rows / warps <= 8192:
            yield TileSettings(rows, 8, block, stages, warps, 8)


def row_candidates(d: int) -> Iterable[RowSettings]:
    for programs, rows, (width, warps) in itertools.product(
        (2, 3, 4, 6, 8), (1, 2, 4), ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16))
    ):
        held = rows * d * 2  # bytes of the rows in flight; twice that and the input are in registers
        if 8000 <= held * programs <= 131_072 and held / warps <= 5000 and programs * warps <= 32:
            yield RowSettings(programs, rows, warps, width)


def output_candidates(dense: bool) -> Iterable[ProjectSettings | HeadTileSettings]:
    if not dense:
        yield from (HeadTileSettings(rows, stages, rows // 16) for rows in (16, 32) for stages in (3, 4, 5, 6, 8))
    for rows, (width, warps) in itertools.product((2, 4, 8, 16), ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8))):
        if rows * width / warps <= 4096:
            yield ProjectSettings(rows, width, warps)


def candidates(kernel: str, problem: Problem) -> tuple[Callable[[int, Any], None], Iterable[Any], int]:
    """(step of a set under some settings, the settings, bytes that a step reads)."""
    shape, size = problem.shape, problem.bytes()
    d, ffn = shape.d_model, shape.d_ffn

    def many(rows: int, columns: int) -> list[torch.Tensor]:
        return [torch.empty(rows, columns, dtype=torch.float16, device="cuda").normal_(0, 0.02) for _ in range(4)]

    if kernel == "select":
        return lambda i, _: problem.select(i), (None,), shape.n_heads * d * 2
    if kernel == "qkv":
        return lambda i, s: problem.project(i, True, s), tiles(), size["qkv"]
    if kernel == "qkv-dense":
        return lambda i, s: problem.dense_project(i, True, s), row_candidates(d), size["qkv"]
    if kernel.startswith("attention"):
        dense = kernel.endswith("dense")
        choices = ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
        return lambda i, s: problem.attend(i, True, dense, *s), choices, size["cache"]
    if kernel.startswith("out"):
        dense = kernel.endswith("dense")
        return lambda i, s: problem.out(i, True, dense, s), output_candidates(dense), size["out"]
    if kernel == "fc2":
        mats, y = many(d, ffn), torch.randn(1, ffn, device="cuda")
        base, to = torch.zeros(1, d, device="cuda"), torch.empty(1, d, device="cuda")
        wide = [
            c for c in itertools.product((4, 8, 16), (512, 1024, 2048), (4, 8)) if 512 <= c[0] * c[1] / c[2] <= 4096
        ]
        return (
            lambda i, c: dense_wide.dense_wide(y, mats[i % 4], mats[i % 4][0, :d], base, to, True, c),
            wide,
            2 * d * ffn,
        )
    n = ffn if kernel == "fc1" else shape.vocab_size
    mats, out = many(n, d), torch.empty(1, n, device="cuda")
    ln = LayerNormWeights(torch.ones(d, device="cuda").half(), torch.zeros(d, device="cuda").half())
    return (
        lambda i, s: dense_gemv.dense_rows(problem.x, ln, mats[i % 4], None, "none", out, True, s),
        row_candidates(d),
        2 * n * d,
    )


def sweep(name: str, kernel: str, density: float, once: bool, until: float) -> None:
    dense = kernel.endswith("dense")
    problem = Problem(ALL_SHAPES[name], 256, 1.0 if dense else density, gaps=not dense)
    step, choices, size = candidates(kernel, problem)
    found = []
    for settings in choices:
        if time.time() > until:
            break
        try:
            if once:
                step(0, settings)
                continue

            def run(i: int, settings: Any = settings) -> None:
                step(i % problem.sets, settings)

            times = measure(run, max(problem.sets, STEPS), 15, problem.reset)
        except Exception as error:  # too much shared memory, for instance: a candidate less
            print(f"sweep {name} {kernel} {settings}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        found.append((times[1], str(settings).partition("(")[2].rstrip(")") if settings else ""))
    found.sort()
    for microseconds, what in found[:8]:
        print(f"sweep {name} {kernel}: {microseconds:.2f} us {size / microseconds / 1e6:.2f} TB/s [{what}]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ALL_SHAPES), choices=list(ALL_SHAPES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--once", action="store_true", help="run every candidate once, to compile it")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing new starts")
    args = parser.parse_args()
    until = time.time() + args.time_limit
    for name, kernel in itertools.product(args.models, args.kernels):
        if time.time() < until:
            sweep(name, kernel, args.density, args.once, until)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
