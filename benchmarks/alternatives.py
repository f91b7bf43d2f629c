"""Times alternatives of two launch settings on a GPU: of attention, and of the greedy choice of the next token.

    python -m benchmarks.alternatives                       a minute and a half: a line a cell, the fastest first
    python -m benchmarks.alternatives --shapes AFM-4.5B     one shape
    python -m benchmarks.alternatives --out FILE.csv        every time as a row

A cell is a shape, rows, and the position that each is at. Its present settings stand behind the fastest. The L2 is
emptied before each call, as weights empty it in a step. Each call is launched plainly, so an empty stage's time is in
it. Kernels are compiled beforehand by several processes. Those that a GPU refuses are left out.
"""

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.compiled_attend import SHAPES, WORDS, advance_call, attend_call
from benchmarks.rows import append_row, command_line, device_name, made_now, needs_gpu
from benchmarks.tune import ROOMS, Placed, gpu_time
from dejavu_train.kernels.common import settings
from dejavu_train.kernels.common.settings import Values

POSITIONS = ((1024, 128), (1024, 1000), (2048, 2040))  # capacity, position
ROWS = (1, 8)
CALLS = 12  # in a graph
COLUMNS = ("gpu", "stage", "cell", "values", "us", "torch", "commit", "date", "sources")
Cell = tuple[str, str, Callable[[], Callable[[], Any]], list[Values]]  # stage, name, how its call is made, candidates


def attend_choices(share: int) -> list[Values]:
    """What a program may have: of shapes whose heads share K/V one query, two, half of them and all."""
    queries = sorted({1, 2, (share + 1) // 2, share} if share > 1 else {1})
    return [
        {"positions": positions, "warps": warps, "queries": each}
        for positions, warps, each in itertools.product((32, 64), (1, 2, 4), queries)
        if (positions, warps) in ((32, 1), (32, 2), (64, 2), (64, 4))
    ]


def cells(shapes: list[str]) -> Iterator[Cell]:
    """Of these shapes, and of every vocabulary."""
    for name in shapes:
        for rows, (capacity, position) in itertools.product(ROWS, POSITIONS):
            call = partial(attend_call, name, rows, capacity, position, False)
            yield "attend", f"{name}, rows {rows}, {position} of {capacity}", call, attend_choices(SHAPES[name][1])
    for name, rows in itertools.product(WORDS, ROWS):
        choices = [{"warps": warps, "parts": parts} for warps, parts in ((32, 1), (2, 128), (4, 128), (4, 64), (8, 64))]
        yield "advance", f"{WORDS[name]} words, rows {rows}", partial(advance_call, name, rows, False), choices


def compile_some(shapes: list[str], number: int, of: int) -> None:
    """Every of-th candidate, launched once: what it compiles stays on disk. For a process of its own."""
    one_row = (cell for cell in cells(shapes) if "rows 1," in f"{cell[1]},")
    every = [(stage, call, values) for stage, _, call, choices in one_row for values in choices]
    for stage, call, values in every[number::of]:
        timed(stage, call, values, lambda run: run())


def timed(stage: str, call: Callable[[], Callable[[], Any]], values: Values | None, timer: Callable[[Any], Any]) -> Any:
    """What the timer says of a call with these settings, None = those of the file. None where they are refused."""
    with Placed(torch.device("cuda")):
        run = call()
    try:
        if values is None:
            return timer(run)
        with settings.tried(stage, values):
            return timer(run)
    except (ValueError, OutOfResources, CompilationError):
        return None


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--out", type=Path, metavar="CSV")
    args = parser.parse_args()
    needs_gpu(parser)
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_some, args.shapes, i, args.processes) for i in range(args.processes)]
        for job in jobs:
            job.result()
    shared = {"gpu": device_name("cuda"), "torch": torch.__version__, **made_now(*ROOMS)}
    for stage, name, call, choices in cells(args.shapes):
        found = []
        for values in (None, *choices):
            us = timed(stage, call, values, lambda run: gpu_time([run] * CALLS) / CALLS)
            if us is None:
                continue
            text = "as in the file" if values is None else json.dumps(values)
            found.append((us, text))
            if args.out:
                row = {"stage": stage, "cell": name, "values": text, "us": f"{us:.2f}"}
                append_row(args.out, shared | row, COLUMNS)
        own = found[0][0]
        best = sorted(found)[:3]
        print(f"{name}: {own:.2f} as in the file; {'; '.join(f'{us:.2f} {text}' for us, text in best)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
