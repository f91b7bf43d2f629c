"""Two to eight tokens times 4-bit rows (`kernels.dense.int4_batch`) beside cuBLAS and PyTorch's int4 kernel.

    python -m benchmarks.int4_batch --csv benchmarks/results/int4_batch.csv     one GPU
    python -m benchmarks.int4_batch --sweep --tokens 8 --csv sweep.csv          launch settings

Each op is a chain of itself with dependent launches, every step on weights of its own, past the L2: "qkv", "fc1" and
"out" read all rows, "listed" the rows of fc1 that the tokens select together. Random codes, groups of 128 columns, of
"out" a head of 128. PyTorch's kernel multiplies bf16 and adds no bias. Bytes are those of the rows that are read.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.decode_int4_rival import RivalRows
from benchmarks.harness import BenchRow, Rows, measure, sets_for
from benchmarks.int4_rows import packed
from kernels.dense.int4_batch import TokenSettings, int4_by_head, int4_linear, int4_listed, token_settings
from kernels.mlp.select import Selection
from kernels.mlp.sparse_fc2 import PackedSelection, pack

HEAD_DIM = 128
UNION = {2: 0.08, 4: 0.116, 8: 0.175}  # of the neurons, as in decode.csv
SWEEP = {
    2: ("2/4/16/5", "3/4/16/3", "4/4/4/2", "3/4/4/3"),
    4: ("2/4/9/5", "3/4/5/3", "3/4/3/3", "4/4/3/2"),
    8: ("2/4/5/5", "2/4/3/3", "3/4/3/3", "2/4/4/4"),
}  # programs, warps, pairs, ahead


Make = Callable[[int, TokenSettings | None], Callable[[int], None]]


def steps(op: str, d: int, tokens: int, provider: str) -> tuple[int, float, int, Make]:
    """(rows, share of them, bytes of a step, what makes a step of so many sets under some settings)"""
    n = {"qkv": 3 * d, "fc1": 4 * d, "listed": 4 * d, "out": d}[op]
    share = UNION[tokens] if op == "listed" else 1.0
    x = torch.randn(tokens, d, device="cuda").half()
    bias = torch.zeros(n, device="cuda").half()

    def ours(sets: int, settings: TokenSettings | None) -> Callable[[int], None]:
        if op == "out":
            h = d // HEAD_DIM
            heads = [packed(h * d, HEAD_DIM, "cuda").view(h, d, HEAD_DIM) for _ in range(sets)]
            residual, out = torch.zeros(2, tokens, d, device="cuda")
            return lambda i: int4_by_head(x, heads[i], bias, residual, out, True, settings)
        weights = [packed(n, d, "cuda") for _ in range(sets)]
        if op != "listed":
            activation = "relu" if op == "fc1" else "none"
            return lambda i: discard(int4_linear(x, weights[i], bias, activation, True, settings))
        lists = []
        for _ in range(sets):
            mask = torch.rand(tokens, n, device="cuda") < 1 - (1 - share) ** (1 / tokens)
            selection, rows = Selection.from_mask(mask), PackedSelection.empty(n, "cuda")
            pack(selection, rows)
            lists.append((rows.ids, rows.count, selection.row_bits))
        return lambda i: discard(int4_listed(x, weights[i], bias, *lists[i], True, settings))

    def cublas(sets: int, settings: TokenSettings | None) -> Callable[[int], None]:
        weights = [torch.empty(n, d, device="cuda", dtype=torch.float16).normal_(0, 0.02) for _ in range(sets)]
        return lambda i: discard(F.linear(x, weights[i], bias))

    def torch_int4(sets: int, settings: TokenSettings | None) -> Callable[[int], None]:
        weights, wide = [RivalRows.random(n, d) for _ in range(sets)], x.bfloat16()
        return lambda i: discard(weights[i].times(wide))

    make = {"int4": ours, "fp16": cublas, "torch int4": torch_int4}[provider]
    size = int(n * d * share * (2 if provider == "fp16" else 0.5 + 2 / 128))
    return n, share, size, make


def discard(_: Tensor) -> None:
    """A step returns nothing."""


def measure_op(op: str, d: int, tokens: int, provider: str, rows: Rows, settings: TokenSettings | None) -> None:
    n, share, size, make = steps(op, d, tokens, provider)
    sets = sets_for(size, int(n * d * (2 if provider == "fp16" else 0.55)), 8 * 2**30)
    chosen = settings or token_settings(d, tokens, {"out": "heads", "listed": "list"}.get(op, "rows"))
    conditions = "/".join(map(str, vars(chosen).values())) if provider == "int4" else ""
    try:
        times = measure(make(sets, settings), sets, rounds=-(-24 // sets))
    except Exception as error:  # settings that do not fit, a rival that refuses
        print(f"{op} {provider} {d} {tokens} {conditions}: {str(error).splitlines()[0]}", flush=True)
        return
    rows.add(BenchRow(op, provider, n, d, share, 1.0, tokens, 0, "int4" if provider != "fp16" else "float16", *times,
                      size, size / times[1] / 1e3, conditions))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[4096, 7168, 9216, 12288])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2, 4, 8], choices=list(UNION))
    parser.add_argument("--ops", nargs="+", default=["qkv", "fc1", "out", "listed"])
    parser.add_argument("--providers", nargs="+", default=["int4", "torch int4", "fp16"])
    parser.add_argument("--sweep", nargs="*", metavar="SETTINGS", help="programs/warps/pairs/ahead, of ours")
    parser.add_argument("--csv", default="benchmarks/results/int4_batch.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows = Rows(options.csv)
    for d in options.widths:
        for tokens in options.tokens:
            for op in options.ops:
                if options.sweep is not None:
                    for name in options.sweep or SWEEP[tokens]:
                        measure_op(op, d, tokens, "int4", rows, TokenSettings(*map(int, name.split("/"))))
                    continue
                for provider in options.providers:
                    if op != "listed" or provider == "int4":
                        measure_op(op, d, tokens, provider, rows, None)


if __name__ == "__main__":
    main()
