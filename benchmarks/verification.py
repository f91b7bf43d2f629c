"""What a pass over eight slots costs on a GPU, in dense steps of one row, and whether slots depend on each other.

    python -m benchmarks.verification --shapes 6.7b 30b 66b --weights float16 int4
    python -m benchmarks.verification --shapes 6.7b --products                    each product alone, own and cuBLAS
    python -m benchmarks.verification --shapes 6.7b --try "block=256 stages=3"    other launch settings of stage slots
    python -m benchmarks.verification --tiny                                      every part in seconds, any device

Random weights. A cycle without a draft is timed: tokens and embeddings, the pass, the choice and what is kept. Ways:
own = kernels of `dejavu_train.kernels.verify`, cublas = its products by cuBLAS with eight rows, all else alike. Layout:
dense = down as stored, sparse = down as rows of neurons, as a draft's weights have it. Where memory does not hold all
layers, two numbers of them give the time of one, and the row says so. Equality: logits of slots that are alone, in
other places, beside noise and NaN, against eight live ones, from a graph. Two forms of input: one sequence, eight
sequences. Rows go to benchmarks/results/verification.csv as they come.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from benchmarks.decode import bytes_needed
from benchmarks.decode_problem import SHAPES, start
from benchmarks.harness import step_times
from benchmarks.random_weights import weights_of_shape
from benchmarks.rows import append_row, command_line, device_name, five_digits, made_now
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.ops import StepOps
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.slot_pass import SlotPass
from dejavu_train.engine.verification import EnginePair
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims
from dejavu_train.kernels.common.checks import runs_on
from dejavu_train.kernels.common.kv_cache import HeadStep
from dejavu_train.kernels.common.settings import Values, settings_file, tried
from dejavu_train.kernels.dense.dense_batch import dense_add, sink_products
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights
from dejavu_train.kernels.stages.sink import QkvSink
from dejavu_train.kernels.verify.attend_slots import SLOTS
from dejavu_train.kernels.verify.slot_walk import SlotSettings

TINY = ModelDims(64, 256, 3, 4, 300, 128)
PROMPT = 128
COLUMNS = (
    "date commit gpu torch triton model weights what way layout live layers step_ms pass_ms price us tb_s equal "
    "settings note sources"
).split()
FORMATS = {"float16": False, "int4": True}


class CublasOps(StepOps):
    """Products of numbers by cuBLAS, and a kernel behind each for what becomes of them."""

    @staticmethod
    def slot_qkv(x: Tensor, weights: Linear, step: HeadStep, _scratch: Any, pdl: bool = False) -> None:
        (numbers,) = weights.weight.parts()
        products = F.linear(x, numbers.flatten(0, -2))
        sink_products(products, QkvSink.of(step, weights.bias), pdl)

    @staticmethod
    def slot_linear(
        x: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor, residual: Tensor | None, _scratch: Any,
        turned: bool = False, unit: float = 1.0, pdl: bool = False,
    ) -> None:  # fmt: skip
        if residual is None or bias is None:
            out.copy_(F.linear(x, *weight.parts()))
        else:
            dense_add(x, weight, bias, residual, out, turned, pdl, unit)

    @staticmethod
    def slot_hidden(x: Tensor, weights: MlpWeights, y: Tensor, _scratch: Any, pdl: bool = False) -> None:
        (numbers,) = weights.up.weight.parts()
        torch.addmm(weights.up.bias, x, numbers.T, out=y)
        y.relu_()


def weights_of(shape: ModelDims, packed: bool, device: torch.device) -> DecodeWeights:
    """Random ones. Of a GPU in fp16."""
    dtype = torch.float16 if runs_on(device) else torch.float32
    return weights_of_shape(shape, dtype, device, packed=packed)


def milliseconds(run: Callable[[], Any], n: int, device: torch.device) -> float:
    """Median of consecutive runs."""
    if device.type == "cuda":
        return statistics.median(step_times(run, n, warm=3))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def graph_of(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A replay of what was run once before, where there is a GPU."""
    if device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def engine_of(weights: DecodeWeights, args: argparse.Namespace) -> DecodeEngine:
    """A dense engine of one row behind its prompt, over these weights."""
    ops = "triton" if runs_on(args.device) else "reference"
    prompt = min(PROMPT, weights.shape.max_positions // 2)
    options = EngineOptions(context=prompt + 2 * args.steps + 16, device=args.device, ops=ops, screen=args.screen)
    engine = DecodeEngine(weights, None, options)
    with torch.no_grad():
        start(engine, prompt, 2 * args.steps + 8)
    return engine


class Cycle:
    """A cycle without a draft that verifies `live` slots, and leaves the position as it was."""

    def __init__(self, engine: DecodeEngine, weights: DecodeWeights, ops: StepOps | None = None) -> None:
        self.pair = EnginePair(engine.core, weights, engine.begin)
        self.at = int(engine.state.position[0])
        if ops is not None:
            self.pair.dense.ops = ops

    @torch.no_grad()
    def run(self, live: int) -> None:
        state, pair = self.pair.step.state, self.pair
        state.position.fill_(self.at)
        state.done.zero_()
        state.fault.zero_()
        pair.first.fill_(self.at - live + 1)
        pair._keep(pair._choices("greedy"))

    def timed(self, live: int, n: int) -> float:
        """Milliseconds, from a graph where there is a GPU."""
        step = self.pair.step
        return milliseconds(lambda: step.replay((self, live), partial(self.run, live)), n, step.device)


def forms_of(weights: DecodeWeights, engine: DecodeEngine, layers: int) -> Iterator[SlotPass]:
    """Passes of the first layers over one sequence, and over eight that are alike."""
    few = dataclasses.replace(weights, layers=weights.layers[:layers])
    for sequences in (1, SLOTS):
        caches = [
            dataclasses.replace(
                cache, k=cache.k.repeat(sequences, 1, 1, 1), v=cache.v.repeat(sequences, 1, 1, 1), watermark=None
            )
            for cache in engine.core.caches[:layers]
        ]
        yield SlotPass(few, caches, engine.core.ops, engine.core.work.pdl)


@torch.no_grad()
def count_differences(weights: DecodeWeights, engine: DecodeEngine, args: argparse.Namespace) -> tuple[int, int]:
    """(slots whose logits differ from those among eight live ones, slots compared)."""
    device, vocabulary = engine.device, weights.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocabulary, (SLOTS,), generator=generator, dtype=torch.int32).to(device)
    at = int(engine.state.position[0]) + torch.arange(SLOTS, dtype=torch.int32, device=device)
    expected: Tensor | None = None
    known: list[tuple[Tensor, Tensor]] = []
    differ = compared = 0
    for made in forms_of(weights, engine, min(args.check_layers, len(weights.layers))):
        held, caches = (tokens.clone(), at.clone()), made.caches
        if expected is None:  # of one sequence, which the eight are copies of
            made.run(*held)
            expected, known = made.logits.clone(), [(cache.k.clone(), cache.v.clone()) for cache in caches]
        run = graph_of(partial(made.run, *held), device)
        for live, shift in ((8, 0), (1, 0), (1, 3), (2, 5), (3, 1), (4, 4), (5, 0), (6, 2), (7, 7), (8, 6)):
            slots = (torch.arange(live, device=device) + shift) % SLOTS
            held[0].copy_(torch.randint(3, vocabulary, (SLOTS,), generator=generator, dtype=torch.int32))
            held[1].copy_(at[-1] + 1 + torch.arange(SLOTS, device=device))
            held[0][slots], held[1][slots] = tokens[:live], at[:live]
            last = held[1].tolist() if len(caches[0].k) > 1 else [int(at[live - 1])]
            for cache, kept in zip(caches, known, strict=True):
                for numbers, whole in zip((cache.k, cache.v), kept, strict=True):
                    numbers.copy_(whole.expand_as(numbers))
                    for sequence, position in enumerate(last):
                        numbers[sequence, :, position + 1 :] = float("nan")
            run()
            differ += int((made.logits[slots] != expected[:live]).any(1).sum())
            compared += live
    return differ, compared


def products_of(made: SlotPass) -> dict[str, tuple[Callable[[int], None], int]]:
    """Each product of a layer by its number, and its bytes."""
    layers, ops, scratch, pdl = made.weights.layers, made.ops, made.products, made.pdl
    position = torch.arange(SLOTS, dtype=torch.int32, device=made.x.device)
    steps = [HeadStep(made.q, cache, position) for cache in made.caches]
    first, head = layers[0], made.weights.lm_head
    turned = first.down_transposed or first.packed

    def linear(part: str, x: Tensor, turned: bool) -> Callable[[int], None]:
        def run(i: int) -> None:
            its: Linear = getattr(layers[i], part)
            ops.slot_linear(x, its.weight, its.bias, made.x[1], made.x[0], scratch, turned, pdl=pdl)

        return run

    return {
        "qkv": (
            lambda i: ops.slot_qkv(made.normed, layers[i].qkv, steps[i], scratch, pdl=pdl),
            first.qkv.weight.nbytes,
        ),
        "out": (linear("out", made.mixed.flatten(1), False), first.out.weight.nbytes),
        "up": (
            lambda i: ops.slot_hidden(made.normed, layers[i].mlp, made.hidden, scratch, pdl=pdl),
            first.up.weight.nbytes,
        ),
        "down": (linear("down", made.hidden, turned), first.down.weight.nbytes),
        "head": (
            lambda i: ops.slot_linear(made.normed, head, None, made.logits, None, scratch, pdl=pdl),
            head.nbytes,
        ),
    }


def product_rows(made: SlotPass, device: torch.device) -> Iterator[dict[str, Any]]:
    """Microseconds of each product, the layers' one after another in a graph."""
    number = len(made.weights.layers)
    for name, (run, size) in products_of(made).items():

        def every(run: Callable[[int], None] = run) -> None:
            for i in range(number):
                run(i)

        every()
        replay = graph_of(every, device)
        us = 1e3 * milliseconds(replay, 20, device) / number
        yield {"what": name, "us": us, "tb_s": size / us / 1e6}


def settings_of(text: str) -> Values:
    """Words key=value.

    >>> settings_of("block=256 stages=3")
    {'block': 256, 'stages': 3}
    """
    return {name: int(value) for name, value in (word.split("=") for word in text.split())}


class Shape:
    """One shape and format: its rows."""

    def __init__(self, name: str, kind: str, args: argparse.Namespace) -> None:
        self.name, self.kind, self.args = name, kind, args
        self.shape = TINY if name == "tiny" else SHAPES[name]
        self.packed, self.device = FORMATS[kind], args.device
        self.metadata = made_now("kernels", "dejavu_train/engine", "benchmarks/verification.py") | {
            "gpu": device_name(args.device), "torch": torch.__version__, "triton": triton.__version__, "model": name,
            "weights": kind, "settings": str(settings_file(args.device)),
        }  # fmt: skip
        self.free = torch.cuda.mem_get_info()[0] if args.device.type == "cuda" else 0

    def sizes(self, layout: str) -> tuple[int, ...]:
        """All layers, or two numbers of them where memory does not hold all. Other layouts are copies."""
        n, few = self.shape.n_layers, tuple(self.args.layers)
        if n <= max(few) or (self.device.type != "cuda" and layout == "dense"):
            return (n,)
        needed = bytes_needed(self.shape, 1, PROMPT + 2 * self.args.steps + 16, self.packed)
        whole = self.args.whole and layout == "dense" and needed < 0.85 * self.free
        return (n,) if whole else few

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and print what matters of it."""
        row = five_digits(self.metadata | row)
        append_row(self.args.out, row, COLUMNS)
        shown = "model weights what way layout live layers step_ms pass_ms price us tb_s equal settings note".split()
        print(" | ".join(f"{name} {row[name]}" for name in shown if row.get(name, "") != ""), flush=True)

    def ways(self) -> Iterator[tuple[str, StepOps | None, Values | None]]:
        """(way and what is tried, operations, launch settings), None = the engine's own."""
        yield "own", None, None
        if self.packed or not runs_on(self.device):
            return
        yield "cublas", CublasOps(), None
        base = dataclasses.asdict(
            SlotSettings.find(self.kind, self.device, bytes=2, d=self.shape.d_model, turned=False)
        )
        for text in self.args.tried:
            yield f"own {text}", None, base | settings_of(text)

    def measure(self) -> None:
        """All rows."""
        layouts = {layout: self.sizes(layout) for layout in (("dense",) if self.packed else ("dense", "sparse"))}
        most = max(max(sizes) for sizes in layouts.values())
        weights = weights_of(dataclasses.replace(self.shape, n_layers=most), self.packed, self.device)
        step = Timed(self.shape.n_layers)
        for layout, sizes in layouts.items():
            found: dict[tuple[str, int], Timed] = {}
            rows: dict[str, dict[str, Any]] = {}
            for size in sizes:
                shape = dataclasses.replace(self.shape, n_layers=size)
                few = dataclasses.replace(weights, layers=weights.layers[:size], shape=shape)
                engine = engine_of(few, self.args)
                if layout == "dense":
                    step.add(size, milliseconds(engine.step, self.args.steps, self.device))
                else:
                    few = dataclasses.replace(few, layers=[layer.arranged(True) for layer in few.layers])
                last = size == max(sizes)
                for tag, ops, values in self.ways():
                    rows[tag] = {"way": tag.split()[0], "layout": layout}
                    if values is not None:
                        rows[tag]["settings"] = tag
                    with nullcontext() if values is None else tried("slots", values):
                        cycle = Cycle(engine, few, ops)
                        for live in (1, SLOTS):
                            timed = found.setdefault((tag, live), Timed(self.shape.n_layers))
                            timed.add(size, cycle.timed(live, self.args.steps))
                        for row in product_rows(cycle.pair.dense, self.device) if self.args.products and last else ():
                            self.write(row | rows[tag] | {"layers": size})
                    engine.core._graphs.clear()
                if last:
                    differ, compared = count_differences(few, engine, self.args)
                    equal = {"what": "equality", "way": "own", "equal": f"{compared - differ} of {compared}"}
                    self.write(equal | {"layout": layout, "layers": min(size, self.args.check_layers)})
                del engine, few
                gc.collect()
            for (tag, live), timed in found.items():
                row = {"what": "pass", **rows[tag], "live": live, "layers": self.shape.n_layers}
                times = {"step_ms": step.whole, "pass_ms": timed.whole, "price": timed.whole / step.whole}
                self.write(row | times | {"note": timed.note})


class Timed:
    """Milliseconds with all of so many layers, from those with all, or with two numbers of them."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.found: dict[int, float] = {}

    def add(self, size: int, took: float) -> None:
        self.found[size] = took

    @property
    def whole(self) -> float:
        if self.layers in self.found:
            return self.found[self.layers]
        low, high = sorted(self.found)
        return self.found[low] + (self.layers - low) * (self.found[high] - self.found[low]) / (high - low)

    @property
    def note(self) -> str:
        return "" if self.layers in self.found else f"by {' and '.join(map(str, sorted(self.found)))} layers"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["6.7b", "30b", "66b"], choices=list(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["float16", "int4"], choices=list(FORMATS))
    parser.add_argument("--steps", type=int, default=24, help="cycles of which the median counts")
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 10], help="where not all are there")
    parser.add_argument("--whole", action="store_true", help="all layers, where memory holds them")
    parser.add_argument("--check-layers", type=int, default=4, help="of the check of equality")
    parser.add_argument("--products", action="store_true", help="each product alone as well")
    parser.add_argument("--try", dest="tried", nargs="*", default=[], metavar="SETTINGS", help="words key=value")
    parser.add_argument("--screen", action="store_true", help="the choice through a screen of the LM head")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verification.csv"))
    args = parser.parse_args()
    args.device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    if args.device.type == "cpu" and not args.tiny:
        parser.error("this benchmark needs a CUDA device; add --tiny to try the script")
    with torch.no_grad():
        for name in ["tiny"] if args.tiny else args.shapes:
            for kind in args.weights:
                Shape(name, kind, args).measure()
                gc.collect()
                if args.device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
