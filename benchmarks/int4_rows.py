"""Kernels that read 4-bit weights beside fp16 ones and PyTorch's int4 kernel: microseconds in a graph, past the L2.

    python benchmarks/int4_rows.py --csv benchmarks/results/int4_rows.csv         a few minutes of one GPU
    python benchmarks/int4_rows.py --sweep --d 9216 --ops rows mlp                 launch settings, the best five each
    python benchmarks/int4_rows.py --interpret                                     every step once at tiny sizes, no GPU

One row of input, groups of 128 columns, random codes. Each op is a chain of itself with dependent launches, every step
on weights of its own. The floor is what must be read at 4.5 TB/s. "rows": LayerNorm, fc1 and ReLU; "qkv": all heads;
"heads": q/k/v of 85 or 50 % of the heads, two positions of K and V missing; "out": 100 or 50 % of the heads;
"mlp": fc1, fc2 and residual over a given list, 60 % of it live; "fc2": that of a dense step, 60 % of the neurons live,
with "x2" and "x4" of two and four tokens, for each of which others are live;
"predictor": both products, rank d / 16, with the list. PyTorch's kernel multiplies bf16 and neither normalises nor adds
a bias.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script, also run where nothing is installed

import torch
import triton

from benchmarks.harness import measure, sets_for
from benchmarks.rows import append_row, commit, five_digits
from kernels.attention.head_select import head_selection
from kernels.attention.out_projection import project_heads
from kernels.attention.out_projection_int4 import HeadRowSettings, project_head_rows
from kernels.attention.qkv import TileSettings, qkv
from kernels.common.int4 import Int4Rows
from kernels.common.layer_norm import LayerNormWeights
from kernels.dense.dense_gemv import Int4RowSettings, dense_rows
from kernels.dense.qkv_dense import qkv_dense
from kernels.mlp.int4_fc2 import Int4Fc2Settings, int4_fc2
from kernels.mlp.int4_mlp import Int4MlpSettings, int4_mlp
from kernels.mlp.select import PredictorWeights, Selection, predict_select, quantize_rows
from kernels.mlp.sparse_fc2 import PackedSelection, pack, packed_block, partial_sums
from kernels.mlp.sparse_mlp import MlpSettings, sparse_mlp

RIVALS = ("torch int4", "gemlite")  # left out, with a line, where one is not installed or refuses a shape
OPS = ("rows", "lm-head", "qkv", "heads", "out", "mlp", "fc2", "predictor")
FLOOR = 4.5e6  # bytes a microsecond
VOCABULARY = 50272
STEPS = 48  # in a graph: its start-up, 7-11 us, then adds less than 0.3 to a step
COLUMNS = ("op", "provider", "n", "d", "density", "p20_us", "p50_us", "p80_us", "bytes", "floor_us", "share_of_floor",
           "settings", "gpu", "torch", "triton", "commit", "date")  # fmt: skip
Step = Callable[[int, Any], None]


class Case:
    """One op of one width from one provider: `make(sets)` gives a step of set i under some settings."""

    def __init__(self, op: str, provider: str, n: int, density: float, size: int, whole: int, make: Callable) -> None:
        self.op, self.provider, self.n, self.density, self.size, self.whole = op, provider, n, density, size, whole
        self.make = make


def packed(n: int, d: int, device: str, group: int = 128) -> Int4Rows:
    words = torch.randint(-(2**31), 2**31 - 1, (n, d // 8), dtype=torch.int32, device=device)
    return Int4Rows(words, torch.full((n, d // group), d**-0.5 / 5, dtype=torch.float16, device=device))


def cases(d: int, ops: list[str], device: str, tiny: bool) -> Iterator[Case]:
    """Every op of a width, fp16, 4 bits and rivals."""
    head_dim = 16 if tiny else 128
    n_heads, ffn, vocabulary = d // head_dim, 2 * d if tiny else 4 * d, 100 if tiny else VOCABULARY
    group = 32 if tiny else 128
    quarter = 0.5 + 2 / group  # bytes a weight
    one, zero = (torch.full((d,), value, dtype=torch.float16, device=device) for value in (1.0, 0.0))
    ln = LayerNormWeights(one, zero)
    x = torch.randn(1, d, device=device)
    residual, out = torch.randn(1, d, device=device), torch.empty(1, d, device=device)

    def fp16(n: int, columns: int) -> torch.Tensor:
        return torch.empty(n, columns, dtype=torch.float16, device=device).normal_(0, 0.02)

    def rows(n: int, activation: str, make: Callable[[], Any], sets: int) -> Step:
        weights, y = [make() for _ in range(sets)], torch.empty(1, n, device=device)
        return lambda i, settings: dense_rows(x, ln, weights[i], None, activation, y, True, settings)

    for op, n, activation in (("rows", ffn, "relu"), ("lm-head", vocabulary, "none")):
        if op in ops:
            yield Case(op, "fp16", n, 1.0, 2 * n * d, 2 * n * d, partial(rows, n, activation, partial(fp16, n, d)))
            size = int(n * d * quarter)
            yield Case(op, "int4", n, 1.0, size, size,
                       partial(rows, n, activation, partial(packed, n, d, device, group)))  # fmt: skip
            if not tiny:
                yield Case(op, "torch int4", n, 1.0, size, size, partial(torch_int4, n, d))
                if op == "rows":
                    yield Case(op, "gemlite", n, 1.0, size, size, partial(gemlite_int4, n, d))

    def all_heads(make: Callable[[], Any], sets: int) -> Step:
        weights = [make().view(n_heads, 3, head_dim, d) for _ in range(sets)]
        bias = torch.zeros(n_heads, 3, head_dim, dtype=torch.float16, device=device)
        q = torch.empty(1, n_heads, head_dim, device=device)
        k, v = (torch.empty(1, n_heads, 8, head_dim, dtype=torch.float16, device=device) for _ in range(2))
        at = torch.zeros(1, dtype=torch.int32, device=device)
        return lambda i, settings: qkv_dense(x, ln, weights[i], bias, at, q, k, v, True, settings)

    if "qkv" in ops:
        n = 3 * d
        yield Case("qkv", "fp16", n, 1.0, 2 * n * d, 2 * n * d, partial(all_heads, partial(fp16, n, d)))
        size = int(n * d * quarter)
        yield Case("qkv", "int4", n, 1.0, size, size, partial(all_heads, partial(packed, n, d, device, group)))
        if not tiny:
            yield Case("qkv", "torch int4", n, 1.0, size, size, partial(torch_int4, n, d))

    def some_heads(share: float, make: Callable[[], Any], sets: int) -> Step:
        weights = [make().view(n_heads, 3, head_dim, d) for _ in range(sets)]
        bias = torch.zeros(n_heads, 3, head_dim, dtype=torch.float16, device=device)
        q = torch.empty(1, n_heads, head_dim, device=device)
        k, v = (torch.empty(1, n_heads, 8, head_dim, dtype=torch.float16, device=device) for _ in range(2))
        kept = torch.randn(1, 8, d, device=device).half()
        position = torch.full((1,), 5, dtype=torch.int32, device=device)
        marks = torch.full((1, n_heads), 4, dtype=torch.int32, device=device)
        selection = head_selection(n_heads, device)
        selection.set_mask(torch.arange(n_heads, device=device)[None] * share % 1 < share)
        return lambda i, s: qkv(kept, weights[i], bias, selection, position, marks, None, q, k, v, pdl=True,
                                settings=s)  # fmt: skip

    if "heads" in ops:
        n = 3 * d
        for share in (0.85, 0.5):
            size = int(2 * n * d * share)
            yield Case("heads", "fp16", n, share, size, 2 * n * d, partial(some_heads, share, partial(fp16, n, d)))
            size = int(n * d * quarter * share)
            yield Case("heads", "int4", n, share, size, int(n * d * quarter),
                       partial(some_heads, share, partial(packed, n, d, device, group)))  # fmt: skip

    def project(half: bool, int4: bool, sets: int) -> Step:
        selection = head_selection(n_heads, device)
        selection.set_mask(torch.arange(n_heads, device=device)[None] % 2 == 0)
        chosen = selection if half else None
        if int4:
            weights = [packed(n_heads * d, head_dim, device, head_dim).view(n_heads, d, head_dim) for _ in range(sets)]
            mixed = x.half()
            return lambda i, s: project_head_rows(mixed, weights[i], zero, residual, chosen, out, True, s)
        numbers = [fp16(d, d) for _ in range(sets)]
        return lambda i, s: project_heads(x, numbers[i], zero, residual, chosen, out, True, s)

    if "out" in ops:
        for half in (False, True):
            share = 0.5 if half else 1.0
            yield Case("out", "fp16", d, share, int(2 * d * d * share), 2 * d * d, partial(project, half, False))
            size = int(d * d * (0.5 + 2 / head_dim))
            yield Case("out", "int4", d, share, int(size * share), size, partial(project, half, True))
        if not tiny:
            yield Case("out", "torch int4", d, 1.0, size, size, partial(torch_int4, d, d))

    def mlp(density: float, make: Callable[[], Any], sets: int) -> Step:
        weights = [(make(), make()) for _ in range(sets)]
        generator = torch.Generator(device).manual_seed(0)
        bias = torch.where(torch.rand(ffn, generator=generator, device=device) < 0.6, 50.0, -50.0).half()
        lists = []
        for _ in range(sets):
            mask = torch.rand(1, ffn, generator=generator, device=device) < density
            lists.append(PackedSelection.empty(ffn, device))
            pack(Selection.from_mask(mask, packed_block(d)), lists[-1])
        partials, source = partial_sums(d, device), x.half()
        run = int4_mlp if isinstance(weights[0][0], Int4Rows) else sparse_mlp
        return lambda i, s: run(source, None, weights[i][0], bias, weights[i][1], zero, residual, lists[i], out,
                                partials, "x", True, s)  # fmt: skip

    if "mlp" in ops:
        for density in (0.1, 0.2, 1.0):
            size, whole = int(1.6 * density * 2 * ffn * d), 4 * ffn * d
            yield Case("mlp", "fp16", ffn, density, size, whole, partial(mlp, density, partial(fp16, ffn, d)))
            size, whole = int(1.6 * density * quarter * ffn * d), int(2 * quarter * ffn * d)
            yield Case("mlp", "int4", ffn, density, size, whole,
                       partial(mlp, density, partial(packed, ffn, d, device, group)))  # fmt: skip

    def fc2(tokens: int, sets: int) -> Step:
        weights = [packed(ffn, d, device, group) for _ in range(sets)]
        generator = torch.Generator(device).manual_seed(0)
        h = torch.rand(tokens, ffn, generator=generator, device=device)
        h, partials = torch.where(h < 0.6, h, 0.0), partial_sums(d, device)
        h = h if tokens == 1 else h.half()
        before, after = residual.repeat(tokens, 1), out.repeat(tokens, 1)
        return lambda i, s: int4_fc2(h, weights[i], zero, before, after, partials, True, s)

    if "fc2" in ops:
        size = int(quarter * ffn * d)
        for op, tokens in (("fc2", 1), ("fc2 x2", 2), ("fc2 x4", 4)):
            if group >= 32 * tokens:
                yield Case(op, "int4", ffn, 1.0, int((1 - 0.4**tokens) * size), size, partial(fc2, tokens))

    rank = max(16, d // 16)

    def predictor(kind: str, sets: int) -> Step:
        made = []
        for _ in range(sets):
            down, up = fp16(rank, d), fp16(ffn, rank)
            scales: list[torch.Tensor | None] = [None, None]
            if kind == "int8":
                (down, scales[0]), (up, scales[1]) = (quantize_rows(each, torch.int8) for each in (down, up))
            elif kind == "nibbles":
                down, up = (torch.randint(0, 256, (len(each), each.shape[1] // 2), dtype=torch.uint8, device=device)
                            for each in (down, up))  # fmt: skip
                scales = [torch.full((len(each),), 0.01, device=device) for each in (down, up)]
            weights = PredictorWeights(down, up, torch.zeros(ffn, device=device), *scales)
            made.append(weights.with_norm(ln))
        selection = Selection.empty(ffn, device, packed_block(d))
        hidden, limit = torch.empty(1, rank, device=device), torch.ones(1, device=device)
        normalised = torch.empty(1, d, dtype=torch.float16, device=device)
        return lambda i, _: predict_select(x, made[i], limit, selection, ln, hidden=hidden, normalised_out=normalised,
                                           pdl=True)  # fmt: skip

    if "predictor" in ops:
        for kind, width in (("fp16", 2.0), ("int8", 1.0), ("nibbles", 0.5)):
            size = int(width * rank * (d + ffn))
            yield Case("predictor", kind, ffn, 1.0, size, size, partial(predictor, kind))


def torch_int4(n: int, d: int, sets: int) -> Step:
    """PyTorch's own kernel, as gpt-fast calls it."""
    x = torch.randn(1, d, device="cuda").bfloat16()
    made = []
    for _ in range(sets):
        codes = torch.randint(0, 256, (n, d // 2), dtype=torch.uint8, device="cuda")
        made.append((torch._convert_weight_to_int4pack(codes, 8), torch.ones(d // 128, n, 2, device="cuda").bfloat16()))
    return lambda i, _: torch._weight_int4pack_mm(x, made[i][0], 128, made[i][1])


def gemlite_int4(n: int, d: int, sets: int) -> Step:
    """gemlite's Triton kernels, where installed."""
    from gemlite.core import DType, GemLiteLinearTriton

    x, made = torch.randn(1, d, device="cuda").half(), []
    for _ in range(sets):
        layer = GemLiteLinearTriton(4, group_size=128, in_features=d, out_features=n, input_dtype=DType.FP16,
                                    output_dtype=DType.FP16)  # fmt: skip
        codes = torch.randint(0, 16, (n, d), dtype=torch.uint8, device="cuda")
        scales = torch.full((n * d // 128, 1), 0.01, device="cuda").half()
        layer.pack(codes, scales, torch.full_like(scales, 8), bias=None)
        made.append(layer)
    return lambda i, _: made[i](x)


def candidates(op: str, provider: str, d: int) -> Iterator[Any]:
    """Launch settings to try; of fp16 kernels one only: issue 17's probe, the MLP with half the partial sums."""
    if provider == "fp16":
        if op == "mlp":
            for block, rows, warps in ((4096, 4, 16), (4096, 2, 16), (2048, 2, 8)):
                yield MlpSettings(132, block, rows, warps)
    elif op in ("rows", "lm-head", "qkv"):
        for programs, warps in ((6, 4), (4, 4), (3, 4), (2, 4), (3, 8), (2, 8), (1, 8), (1, 16)):
            for ahead in (2, 3, 5, 10):
                if d <= 7168 or programs * warps <= 16:
                    yield Int4RowSettings(programs, warps, ahead)
    elif op == "heads":
        for warps in (1, 2, 4, 8):
            for steps in (4, 8):  # pairs of two units, of which heads that lack many positions have half
                if warps * steps <= 16:  # shared memory
                    yield TileSettings(16, 2, 32 * warps, steps, warps, 8)
    elif op == "mlp":
        for programs, warps, ahead in ((132, 8, 1), (132, 8, 2), (264, 4, 3), (264, 4, 5)):
            for registers in (168, 255):
                yield Int4MlpSettings(programs, warps, ahead, registers)
    elif op.startswith("fc2"):
        for shape in ((4, 2, 528, 128), (8, 2, 264, 128), (4, 2, 396, 168), (4, 3, 396, 168)):
            for fetched in (0, 32, 64):
                yield Int4Fc2Settings(*shape, fetched)
    elif op == "out":
        for warps in (4, 8, 16):
            for span in (2, 4, 8):
                yield HeadRowSettings(warps, span)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="benchmarks/results/int4_rows.csv", help="rows are appended here")
    parser.add_argument("--d", type=int, nargs="*", default=[4096, 7168, 9216, 12288])
    parser.add_argument("--ops", nargs="*", default=list(OPS), choices=OPS)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--sweep", action="store_true", help="launch settings of the 4-bit kernels instead; no rows")
    parser.add_argument("--interpret", action="store_true", help="run every step once on the CPU, without timing")
    args = parser.parse_args(argv)
    if not args.interpret and not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA GPU; --interpret runs its steps once without one")
    until = time.monotonic() + args.seconds
    device = "cpu" if args.interpret else "cuda"
    for d in [64] if args.interpret else args.d:
        for case in cases(d, args.ops, device, args.interpret):
            if time.monotonic() > until:
                return 0
            known = case.provider == "int4" or (case.op, case.provider) == ("mlp", "fp16")
            if args.sweep and (not known or case.density == 0.2):
                continue
            sets = 1 if args.interpret else sets_for(case.size, case.whole)
            try:
                step = case.make(sets)
                if case.provider in RIVALS:
                    step(0, None)
            except Exception as error:
                if case.provider not in RIVALS:
                    raise
                print(f"{case.op} {case.provider}: left out, {type(error).__name__}: {error}", flush=True)
                continue
            if args.interpret:
                step(0, None)
                print(f"{case.op} {case.provider} {case.n}x{d}: ran", flush=True)
                continue
            rounds = -(-STEPS // sets)
            if args.sweep:
                sweep(case, d, step, sets, rounds, until)
                continue
            times = measure(lambda i, step=step: step(i, None), sets, 11, rounds=rounds)
            floor = case.size / FLOOR
            row = dict(zip(("p20_us", "p50_us", "p80_us"), times, strict=True))
            row |= {"op": case.op, "provider": case.provider, "n": case.n, "d": d, "density": case.density,
                    "bytes": case.size, "floor_us": floor, "share_of_floor": floor / times[1], "settings": "default",
                    "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                    "commit": commit(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
            append_row(args.csv, five_digits(row), COLUMNS)
            print(f"{case.op:9} {case.provider:10} {case.n}x{d} {case.density:4} {times[1]:8.2f} us, floor {floor:.2f}"
                  f" ({floor / times[1]:.0%})", flush=True)  # fmt: skip
            del step
            torch.cuda.empty_cache()
    return 0


def sweep(case: Case, d: int, step: Step, sets: int, rounds: int, until: float) -> None:
    """Print the best settings of a case."""
    found = []
    for settings in candidates(case.op, case.provider, d):
        if time.monotonic() > until:
            break
        try:
            times = measure(lambda i, settings=settings: step(i, settings), sets, 7, rounds=rounds)
        except Exception as error:  # too many registers for a launch, for instance: a candidate less
            print(f"sweep {case.op} {d} {settings}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        found.append((times[1], str(settings)))
    for microseconds, settings in sorted(found)[:5]:
        share = case.size / FLOOR / microseconds
        print(f"sweep {case.op} {case.provider} {d} {case.density}: {microseconds:.2f} us {share:.0%} {settings}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
