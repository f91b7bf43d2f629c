"""Lossless decoding on a GPU: tokens a second beside our one-row dense engine and rivals, and how many tokens differ.

    python -m benchmarks.lossless_gpu forced --shape 30b     random weights of a true shape, acceptance is forced
    python -m benchmarks.lossless_gpu speed                  opt-mini and its bundle, or --model and --bundle
    python -m benchmarks.lossless_gpu equal                  how many of many tokens differ from draft_length=0

All ways share one set of fp16 weights and one engine. --weights int4 has a model that is in 4 bits itself. Ways:

    draft_length=0     the dense model by the verification kernels, one token a pass
    sparse             drafts by the model's own weights, neurons selected
    sparse, 4 bits     by weights of 4 bits, neurons selected. dense, 4 bits: all neurons
    half the layers    by the first half of them. prompt lookup: what stood behind the last three tokens before
    ..., and copies    either, whatever pays more, as lossless decoding does where no length is asked for

Forced: a cycle drafts and verifies as ever. Then a table says how many tokens count as accepted, and the sampler's
choices are replaced on the device, which costs some launches more. What tokens are does not matter for the time. Every
way has the same acceptance then. Rows go to benchmarks/results/lossless_gpu.csv as they come.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.decode_problem import ACTIVE, RANKS, SHAPES, random_predictors, random_weights, set_thresholds, start
from benchmarks.harness import step_times
from benchmarks.lossless_rows import DECODINGS, TEXTS, added, columns_of, read_prompts
from benchmarks.lossless_ways import COPYING, FIXED, Measured, Ways
from benchmarks.rows import append_row, command_line, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.lossless import Acceptance
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.step import DecodeStep
from dejavu_train.families import ModelDims
from dejavu_train.models.config_values import INT4, quant_method, read_values
from dejavu_train.models.opt import load_opt

TINY = ModelDims(128, 512, 4, 4, 1000, 512)
WAYS = ("draft_length=0", "sparse", "sparse, 4 bits", "dense, 4 bits", "prompt lookup", "half the layers")
OF_FLOATS = ("sparse, 4 bits", "dense, 4 bits")
COLUMNS = (
    "date commit gpu torch triton model weights what way decoding text length forced prompts tokens seconds "
    "tokens_per_second ratio acceptance mean_length saved differ note sources"
).split()


def options_of(args: argparse.Namespace, context: int, release: bool = False) -> EngineOptions:
    ops = "triton" if args.device == "cuda" else "reference"
    return EngineOptions(context=context, ops=ops, device=args.device, release=release)


def conditions(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What stands in every row."""
    versions = {"gpu": device_name(args.device), "torch": torch.__version__}
    if args.device == "cuda":
        import triton

        versions["triton"] = triton.__version__
    stored = "int4" if args.what != "forced" and quant_method(read_values(args.model)) == INT4 else "float16"
    weights = args.weights if args.what == "forced" else stored
    return made_now("kernels", "dejavu_train/engine") | versions | {"model": model, "weights": weights}


def write_row(args: argparse.Namespace, row: dict[str, Any]) -> None:
    append_row(args.out, five_digits(row), COLUMNS)
    hidden = ("date", "commit", "sources", "gpu", "torch", "triton", "prompts")
    print("  ".join(f"{name} {value}" for name, value in five_digits(row).items() if name not in hidden), flush=True)


def measure_forced(args: argparse.Namespace) -> None:
    """Rows of a true shape: a dense step, cycles of each way and length, and tokens a second at each acceptance."""
    shape, packed = TINY if args.shape == "tiny" else SHAPES[args.shape], args.weights == "int4"
    context = args.prompt + max(args.new, 80) + 2 * MOST_DRAFTED
    began = time.monotonic()
    weights = random_weights(shape, args.active_share, packed, False, args.device)
    dense = DecodeEngine(weights, None, options_of(args, context, release=True))
    weights.layers[:] = dense.weights.layers
    start(dense, args.prompt, 60)
    if args.device == "cuda":
        seconds = statistics.median(step_times(dense.step, 32)) / 1000
    else:
        seconds = _timed(dense.step)
    row = conditions(args, args.shape)
    write_row(args, row | {"what": "dense step", "way": "dense", "seconds": seconds, "tokens_per_second": 1 / seconds})
    del dense
    rank = RANKS.get(args.shape, 32)
    predictors = random_predictors(shape, rank, args.mlp_density, 1.0, 1, "int4", device=args.device)
    engine = DecodeEngine(weights, predictors, options_of(args, context, release=True))
    if not packed:
        bias = engine.weights.layers[0].up.bias
        coded = random_weights(shape, args.active_share, True, False, args.device)
        for layer in coded.layers:
            layer.up.bias.copy_(bias)
        engine.weights.drafts["int4"] = dataclasses.replace(
            coded,
            embedding=engine.weights.embedding,
            positions=engine.weights.positions,
            lm_head=engine.weights.lm_head,
        )
        del coded
    ways = Ways(engine)
    prompt = torch.randint(3, shape.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    for name in args.ways or WAYS:
        if packed and name in OF_FLOATS:
            continue
        if time.monotonic() - began > args.seconds:
            print("time limit: left out from here:", name, flush=True)
            return
        try:
            _measure_way(args, ways, name, prompt, row | {"way": name}, seconds)
        except torch.cuda.OutOfMemoryError:
            write_row(args, row | {"what": "forced", "way": name, "note": "does not fit"})
            continue
        ways.forget(name)


def _measure_way(
    args: argparse.Namespace, ways: Ways, name: str, prompt: list[int], row: dict[str, Any], seconds: float
) -> None:
    """Rows of one way. seconds: of a dense step."""
    pair = ways[name]
    if pair.step.predictors:
        _select(ways, pair.step, args)
    for length in [0] if name == "draft_length=0" else range(MOST_DRAFTED + 1):
        cycle = _cycle_seconds(pair, prompt, length, ways.engine.context)
        write_row(args, row | {"what": "cycle", "length": length, "seconds": cycle, "ratio": cycle / seconds})
        pair.pace.seconds[length] = cycle
        pair.pace._tried.add(length)
    for share in args.acceptance[:1] if name == "draft_length=0" else args.acceptance:
        pair.force(share)
        ways.write(name, prompt, args.new // 2, Sampling())  # the length of drafts is found
        _, accepted = ways.write(name, prompt, args.new, Sampling())
        columns = columns_of(accepted, Acceptance(1, 1, seconds=seconds))
        note = f"acceptance is forced; at the end drafts of {FIXED.get(name, pair.pace.best())}"
        found = {"what": "forced", "decoding": "greedy", "forced": share, "note": note}
        write_row(args, row | found | columns)


def _select(ways: Ways, step: DecodeStep, args: argparse.Namespace) -> None:
    """Thresholds at the density that was asked for, on what this step itself computes."""
    step.reset()
    start(ways.engine, args.prompt, 40)
    seen: Any = SimpleNamespace(core=step, predictors=step.predictors, weights=step.weights)
    with torch.no_grad():
        set_thresholds(seen, args.mlp_density, 1.0)


def _cycle_seconds(pair: Measured, prompt: list[int], length: int, context: int, cycles: int = 7) -> float:
    """Median seconds of a cycle that drafts so many tokens. All are accepted, one by one is the same."""
    pair.force(1.0)
    pair.begin(Row.of_prompt(prompt, context), ())
    times = []
    for _ in range(cycles + 2):
        began = time.perf_counter()
        pair.cycle(length, "greedy")
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _timed(run: Callable[[], Any], n: int = 8) -> float:
    times = []
    for _ in range(n):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def engines_of(args: argparse.Namespace, context: int) -> tuple[DecodeEngine, DecodeEngine]:
    """The dense engine and the sparse one of a model in fp16."""
    model = load_opt(args.model, "float16" if args.device == "cuda" else "float32", args.device)
    bundle = Bundle.from_pretrained(args.bundle)
    bundle = bundle if args.mlp_density is None else bundle.at(args.mlp_density, args.head_density)
    options = options_of(args, context)
    return DecodeEngine(model, None, options), DecodeEngine(model, bundle, options)


def measure_speed(args: argparse.Namespace) -> None:
    """Rows of all ways and decodings, all texts together and each."""
    dense, engine = engines_of(args, args.prompt + args.new)
    ways = Ways(engine)
    prompts = list(read_prompts(args.model, args.prompt, args.prompts, args.texts))
    row = conditions(args, Path(args.model).name) | {"what": "speed", "prompts": args.prompts}
    for decoding in args.decodings:
        counted: dict[tuple[str, str], list[Acceptance]] = {}
        for number, (text, prompt) in enumerate(prompts):
            sampling = dataclasses.replace(DECODINGS[decoding], seed=number)
            for name in ["dense", *(args.ways or (*WAYS, COPYING))]:
                if name == "dense":
                    found = ways.write_densely(dense, prompt, args.new, sampling)
                else:
                    found = ways.write(name, prompt, args.new, sampling)[1]
                if number >= len(args.texts):  # those before have compiled, recorded, and found lengths of drafts
                    counted.setdefault((name, text), []).append(found)
                    counted.setdefault((name, "all"), []).append(found)
        for (name, text), parts in counted.items():
            columns = columns_of(added(parts), added(counted["dense", text]))
            write_row(args, row | {"way": name, "decoding": decoding, "text": text} | columns)


def count_differences(args: argparse.Namespace) -> None:
    """Tokens of drafted texts that are not those of draft_length=0, of the one-row engine, and of transformers.

    Two ways and fixed and chosen lengths take turns. The one-row engine and transformers are given the same text. Each
    of their choices is compared, because behind a token that differs texts would differ in everything.
    """
    dense, engine = engines_of(args, args.prompt + args.new)
    ways, theirs = Ways(engine), load_opt(args.model, "float16" if args.device == "cuda" else "float32", args.device)
    totals: dict[tuple[str, str], list[int]] = {}
    began = time.monotonic()

    def count(decoding: str, name: str, differ: int, tokens: int) -> None:
        entry = totals.setdefault((decoding, name), [0, 0])
        entry[0], entry[1] = entry[0] + differ, entry[1] + tokens

    for number, (_, prompt) in enumerate(read_prompts(args.model, args.prompt, args.prompts, args.texts)):
        decoding = args.decodings[number % len(args.decodings)]
        sampling = dataclasses.replace(DECODINGS[decoding], seed=number)
        expected, _ = ways.write("draft_length=0", prompt, args.new, sampling)
        name = ("sparse", "sparse, 4 bits")[number // 3 % 2]
        text, _ = ways.write(name, prompt, args.new, sampling, length=None if number % 2 else 1 + number % 7)
        count(decoding, name, sum(a != b for a, b in zip(text, expected, strict=True)), len(expected))
        if decoding == "greedy":
            ids = torch.tensor([prompt + expected], device=args.device)
            with torch.no_grad():
                choices = theirs(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
            count(decoding, "transformers", int((choices != ids[0, len(prompt) :]).sum()), len(expected))
            choices = dense.logits([prompt + expected], 10**6)[0, len(prompt) - 1 : -1].argmax(-1)
            count(decoding, "dense engine", int((choices != ids[0, len(prompt) :]).sum()), len(expected))
        if number % 40 == 39:
            print(number + 1, totals, flush=True)
        if time.monotonic() - began > args.seconds:
            break
    for (decoding, name), (differ, tokens) in totals.items():
        row = conditions(args, Path(args.model).name) | {"what": "equal", "prompts": args.prompts}
        write_row(args, row | {"way": name, "decoding": decoding, "tokens": tokens, "differ": differ})


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["forced", "speed", "equal"])
    parser.add_argument("--shape", default="6.7b", choices=("tiny", *SHAPES), help="of forced")
    parser.add_argument("--weights", default="float16", choices=("float16", "int4"), help="of forced: the model's own")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--mlp-density", type=float, help="default: the bundle's, 0.1 of forced")
    parser.add_argument("--head-density", type=float, default=1.0)
    parser.add_argument("--active-share", type=float, default=ACTIVE, help="of a random shape's neurons")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.84, 0.9, 0.95])
    parser.add_argument("--ways", nargs="+", help="default: all")
    parser.add_argument("--decodings", nargs="+", default=["greedy", "0.7", "1.0"], choices=list(DECODINGS))
    parser.add_argument("--texts", nargs="+", default=TEXTS, help="installed texts, or files held out as a whole")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: plain torch, for a rehearsal")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lossless_gpu.csv"))
    args = parser.parse_args()
    if args.what == "forced":
        args.mlp_density = args.mlp_density or 0.1
    {"forced": measure_forced, "speed": measure_speed, "equal": count_differences}[args.what](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
