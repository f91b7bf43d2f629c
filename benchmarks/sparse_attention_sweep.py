"""Tries launch settings of the attention block's kernels and of dense fc2 and LM head, each in a chain of its own.

python -m benchmarks.sparse_attention_sweep --models 6.7b
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.harness import measure
from benchmarks.sparse_attention_problem import ALL_SHAPES, Problem
from kernels import dense_gemv, dense_wide
from kernels.layer_norm import LayerNormWeights
from kernels.out_projection import ProjectSettings
from kernels.qkv import TileSettings


def row_choices(d: int) -> Iterator[dense_gemv.RowSettings]:
    """What can be in flight without spilling: 12 to 36 KB a program, 6 KB a warp, 64 warps a multiprocessor."""
    for programs, n_rows, warps in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4), (4, 8, 16)):
        tile = n_rows * d * 2
        if tile <= 36000 and programs * warps <= 64 and tile * programs >= 12000 and tile / warps <= 6000:
            yield dense_gemv.RowSettings(programs, n_rows, warps)


def tile_choices() -> Iterator[TileSettings]:
    for rows, block, stages, warps in itertools.product((16, 32), (64, 128, 256), (3, 4, 6), (1, 2)):
        if rows * block * stages * 2 <= 64 * 1024:
            yield TileSettings(rows, 8, block, stages, warps)


def project_choices() -> Iterator[ProjectSettings]:
    for rows, width, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (2, 4, 8)):
        yield ProjectSettings(rows, width, warps)


def best(
    label: str, n_bytes: int, sets: int, choices: Iterable[Any], run: Callable[[int, Any], None], until: float
) -> None:
    """Prints the four fastest of `choices`, each given to run(set, choice)."""
    found = []
    for choice in choices:
        if time.time() > until:
            break
        try:
            found.append((measure(lambda i, choice=choice: run(i, choice), sets, 12)[1], choice))
        except Exception as error:  # shared memory, registers
            print(f"  {choice}: {str(error).splitlines()[0][:80]}", flush=True)
    for t, choice in sorted(found, key=lambda pair: pair[0])[:4]:
        print(f"{label}: {t:.2f} us, {n_bytes / t / 1e6:.2f} TB/s, {choice}", flush=True)


def sweep_attention(name: str, context: int, until: float) -> None:
    shape = ALL_SHAPES[name]
    problem = Problem(shape, context, 1.0)
    size = problem.bytes()
    rows = row_choices(shape.d_model)
    best(f"{name} qkv dense", size["qkv"], problem.sets, rows, lambda i, c: problem.dense_project(i, True, c), until)
    projects = list(project_choices())
    best(f"{name} out dense", size["out"], problem.sets, projects, lambda i, c: problem.out(i, True, True, c), until)
    half = Problem(shape, context, 0.5, gaps=True)
    size = half.bytes()
    best(f"{name} qkv 50 %", size["qkv"], half.sets, tile_choices(), lambda i, c: half.project(i, True, c), until)
    best(f"{name} out 50 %", size["out"], half.sets, projects, lambda i, c: half.out(i, True, False, c), until)
    positions = (32, 64, 128)
    step = lambda i, c: half.attend(i, True, False, c)  # noqa: E731
    best(f"{name} attention 50 %", size["attention"], half.sets, positions, step, until)


def sweep_dense(name: str, until: float) -> None:
    """fc2, few long rows, and the LM head, one long matrix."""
    shape = ALL_SHAPES[name]
    d = shape.d_model
    mats = [torch.empty(d, shape.d_ffn, dtype=torch.float16, device="cuda").normal_(0, 0.02) for _ in range(4)]
    y, base, to = torch.randn(1, shape.d_ffn, device="cuda"), torch.zeros(1, d, device="cuda"), torch.empty(1, d).cuda()
    wide = (c for c in itertools.product((4, 8, 16), (512, 1024, 2048), (4, 8)) if 512 <= c[0] * c[1] / c[2] <= 4096)

    def fc2(i: int, choice: Any) -> None:
        dense_wide.dense_wide(y, mats[i], mats[i][0, :d], base, to, True, choice)

    best(f"{name} fc2 dense", mats[0].nbytes, len(mats), wide, fc2, until)
    heads = [torch.empty(50272, d, dtype=torch.float16, device="cuda").normal_(0, 0.02) for _ in range(3)]
    x, out = torch.randn(1, d, device="cuda"), torch.empty(1, 50272, device="cuda")
    ln = LayerNormWeights(torch.ones(d, dtype=torch.float16, device="cuda"), torch.zeros(d, device="cuda").half())

    def lm_head(i: int, choice: Any) -> None:
        dense_gemv.dense_rows(x, ln, heads[i], None, "none", out, True, choice)

    best(f"{name} LM head", heads[0].nbytes, len(heads), row_choices(d), lm_head, until)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ALL_SHAPES), choices=list(ALL_SHAPES))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing new starts")
    args = parser.parse_args()
    until = time.time() + args.time_limit
    for name in args.models:
        sweep_attention(name, args.context, until)
        torch.cuda.empty_cache()
        sweep_dense(name, until)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
