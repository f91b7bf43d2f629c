"""Two to eight tokens times a layer's 4-bit rows, product by product and all in turn, in one version or in two.

    python -m benchmarks.int4_tokens --csv rows.csv [--widths 9216] [--tokens 8] [--ops fc1]         this version
    python -m benchmarks.int4_tokens --csv rows.csv --settings programs=2,warps=4,tiles=4,ahead=5    in other settings
    git archive --prefix .before/ COMMIT dejavu_train kernels benchmarks | tar -x
    python -m benchmarks.int4_tokens --csv rows.csv --before .before                                 beside another one

Each op is a chain of itself with dependent launches, every step on weights of its own, past the L2. "qkv", "out", "fc1"
and "fc2" read all rows, "listed" those of fc1 that the tokens select together, "layer" is qkv, out, fc1 and fc2.
Microseconds. Codes are random, groups of 128, of "out" a head of 128. Half of fc2's inputs are zero. Of two versions
each shape is measured in turns, ROUNDS times, in processes of their own. First all compile at once.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from benchmarks.harness import SETS, measure
from benchmarks.rows import append_row, command_line, gpu_versions, made_now, needs_gpu
from dejavu_train.kernels.attention.out_projection import project_heads
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.common.settings import tried
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.mlp.int4_fc2 import int4_fc2
from dejavu_train.kernels.mlp.pack import pack
from dejavu_train.kernels.stages.hidden import hidden_tokens
from dejavu_train.kernels.stages.rows import launch_tokens
from dejavu_train.kernels.stages.sink import QkvSink

OPS = ("qkv", "out", "fc1", "listed", "fc2", "layer")
HEAD_DIM, GROUP, ROUNDS = 128, 128, 2
DEVICE = "cuda"
UNION = {2: 0.08, 4: 0.116, 8: 0.175}  # of the neurons, as in decode.csv


def random_rows(*shape: int) -> Int4Rows:
    """Of random codes."""
    *outer, width = shape
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (*outer, width // 8), dtype=torch.int32, device=DEVICE)
    return Int4Rows(words, torch.full((*outer, width // GROUP), 0.01, dtype=torch.float16, device=DEVICE))


def steps(d: int, tokens: int, sets: int = SETS) -> dict[str, Callable[[int], object]]:
    """What each op does with the weights of a number below `sets`."""
    n, h = 4 * d, d // HEAD_DIM
    x, hidden = torch.randn(tokens, d, device=DEVICE).half(), torch.randn(tokens, n, device=DEVICE).relu().half()
    bias, out_bias = (torch.zeros(size, dtype=torch.float16, device=DEVICE) for size in (n, d))
    residual, out = torch.zeros(2, tokens, d, device=DEVICE)
    q, partials = torch.empty(tokens, h, HEAD_DIM, device=DEVICE), partial_sums(d, DEVICE)
    k, v = (torch.zeros(tokens, h, 8, HEAD_DIM, dtype=torch.float16, device=DEVICE) for _ in range(2))
    cache, position = KvCache(k, v, x[:, :0]), torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    qkv = [Linear(random_rows(h, 3, HEAD_DIM, d), bias[: 3 * d].view(h, 3, HEAD_DIM)) for _ in range(sets)]
    heads = [random_rows(h, d, HEAD_DIM) for _ in range(sets)]
    mlps = [MlpWeights(Linear(random_rows(n, d), bias), Linear(random_rows(n, d), out_bias)) for _ in range(sets)]
    chosen = Selection.from_mask(torch.rand(tokens, n, device=DEVICE) < 1 - (1 - UNION[tokens]) ** (1 / tokens))
    listed = PackedSelection.empty(n, DEVICE)
    pack(chosen, listed)
    calls: dict[str, Callable[[int], object]] = {
        "qkv": lambda i: launch_tokens(x, qkv[i].weight, QkvSink.of(HeadStep(q, cache, position), qkv[i].bias), True),
        "out": lambda i: project_heads(x, heads[i], out_bias, residual, None, out, True),
        "fc1": lambda i: hidden_tokens(x, mlps[i], pdl=True),
        "listed": lambda i: hidden_tokens(x, mlps[i], (listed, chosen.row_bits), True),
        "fc2": lambda i: int4_fc2(hidden, mlps[i].down.weight, out_bias, residual, out, partials, True),
    }
    return calls | {"layer": lambda i: [calls[op](i) for op in ("qkv", "out", "fc1", "fc2")]}


def bytes_of(op: str, d: int, tokens: int) -> float:
    """What an op reads of its weights."""
    rows = {"qkv": 3, "out": 1, "fc1": 4, "listed": 4 * UNION[tokens], "fc2": 4, "layer": 12}[op]
    return rows * d * d * (0.5 + 2 / GROUP)


def measured(args: argparse.Namespace) -> None:
    """Rows of this version's ops."""
    for d in args.widths:
        for tokens in args.tokens:
            calls = steps(d, tokens, 1 if args.compile else SETS)
            for op in args.ops:
                if args.compile:
                    calls[op](0)
                    torch.cuda.synchronize()
                    continue
                number = count()
                us = measure(lambda call=calls[op], number=number: call(next(number) % SETS))  # type: ignore[misc]
                row = {"version": args.version, "op": op, "d": d, "tokens": tokens, "us": round(us, 2)}
                row |= {"tb_s": round(bytes_of(op, d, tokens) / us / 1e6, 3), "settings": args.settings}
                print(*row.values(), flush=True)
                append_row(args.csv, row | gpu_versions() | made_now("kernels"))


def beside(args: argparse.Namespace) -> None:
    """Both versions in turns, and a line for each op with the medians and their ratio."""
    folders = {"before": args.before.resolve(), "after": Path.cwd()}

    def start(version: str, d: int, tokens: int, *more: str) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join([str(folders[version]), os.environ.get("PYTHONPATH", "")])
        given = ["--widths", str(d), "--tokens", str(tokens), "--ops", *args.ops, "--csv", str(args.csv.resolve())]
        command = [sys.executable, "-P", str(Path(__file__).resolve()), *given, "--version", version, *more]
        return subprocess.Popen(command, cwd=folders[version], env=os.environ | {"PYTHONPATH": path})

    shapes = [(d, tokens) for d in args.widths for tokens in args.tokens]
    for process in [start(version, *shape, "--compile") for version in folders for shape in shapes]:
        process.wait()
    for shape in shapes:
        for _ in range(ROUNDS):
            for version in folders:
                start(version, *shape).wait()
    lines = [line.split(",") for line in args.csv.read_text().splitlines()[1:]]
    for d, tokens in shapes:
        for op in args.ops:
            times = {
                name: [float(line[4]) for line in lines if line[:4] == [name, op, str(d), str(tokens)]]
                for name in folders
            }
            if all(times.values()):
                old, new = (statistics.median(found) for found in times.values())
                print(f"{op:6} {d:6} {tokens} tokens: {old:7.2f} -> {new:7.2f} us, {new / old:.3f}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[4096, 7168, 9216])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 4, 2], choices=list(UNION))
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--settings", default="", help="of the stage tokens_int4")
    parser.add_argument("--before", type=Path, help="folder with another version")
    parser.add_argument("--version", default="after", help="how rows are called")
    parser.add_argument("--compile", action="store_true", help="run each op once and measure none")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    needs_gpu(parser)
    if args.before:
        beside(args)
    elif args.settings:
        with tried(
            "tokens_int4", {name: int(number) for name, number in (p.split("=") for p in args.settings.split(","))}
        ):
            measured(args)
    else:
        measured(args)


if __name__ == "__main__":
    main()
