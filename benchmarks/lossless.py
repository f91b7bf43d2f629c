"""Lossless decoding: tokens a second and acceptance, beside rivals, and how many tokens differ.

    python -m benchmarks.lossless speed                     opt-mini on a CPU; with --device cuda on a GPU
    python -m benchmarks.lossless equal                     how many of many tokens differ from draft_length=0
    python -m benchmarks.lossless search --bundles B        which density of a bundle is fastest, on validation text
    python -m benchmarks.lossless forced --device cuda --shape 30b      random weights of a true shape

All ways write the same prompts in turns. Prompts are beginnings of held-out documents. Ways:

    draft_length=0     the dense model by the verification kernels, one token a pass
    sparse             drafts by the model's own weights, neurons selected
    sparse, 8 bits     by weights of 8 bits on a CPU and 4 on a GPU, neurons selected. dense, 8 bits: all neurons
    prompt lookup      what stood behind the last three tokens before
    ..., and copies    either, whatever pays more, as lossless decoding does where no length is asked for

Forced: a cycle drafts and verifies as ever. Then a coin says how many tokens count as accepted. What tokens are does
not matter for the time.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.cpu_decode import cpu_name
from benchmarks.decode_problem import ACTIVE, RANKS, SHAPES, random_predictors, random_weights, set_thresholds, start
from benchmarks.harness import step_times
from benchmarks.lossless_ways import FIXED, CpuWays, GpuWays, wait
from benchmarks.rows import CPU_STEP, STEP, append_row, command_line, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import TextSource, load_documents, load_sets
from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.engine.cpu.engine import usable_cores
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.inputs import Row, Sampling
from dejavu_train.engine.lossless import Acceptance
from dejavu_train.engine.options import EngineOptions
from dejavu_train.families import ModelDims
from dejavu_train.models.config_values import INT4, quant_method, read_values
from dejavu_train.models.load import load_model, load_tokenizer

TINY = ModelDims(128, 512, 4, 4, 1000, 512)
TEXTS = ("installed-docs", "installed-readmes", "installed-code", "installed-licences")
DECODINGS = {"greedy": Sampling(), "0.7": Sampling(0.7), "1.0": Sampling(1.0)}
COLUMNS = (
    "date commit cpu gpu threads clock torch model weights what way decoding text length forced prompts tokens seconds "
    "tokens_per_second ratio acceptance mean_length saved differ note sources"
).split()


def ways_of(device: str) -> list[str]:
    coded = "4 bits" if device == "cuda" else "8 bits"
    return ["draft_length=0", "sparse", *(f"{kind}, {coded}" for kind in ("sparse", "dense")), "prompt lookup"]


def read_prompts(
    model: str, length: int, count: int, texts: Sequence[str] = TEXTS, part: str = "test"
) -> Iterator[tuple[str, list[int]]]:
    """(text, ids) of the beginnings of held-out documents, of all texts in turn. A text file is held out as a whole."""
    tokenizer = load_tokenizer(model)
    documents = {}
    for name in texts:
        source = TextSource(name)
        held = load_documents(source)[0] if Path(name).is_file() else load_sets(source, model)[0][part]
        documents[Path(name).stem if Path(name).is_file() else name] = iter(held)
    found = 0
    while found < count and documents:
        for name in list(documents):
            document = next(documents[name], None)
            if document is None:
                del documents[name]
                continue
            ids = [2, *tokenizer(document.text[: 20 * length], add_special_tokens=False)["input_ids"]][:length]
            if len(ids) == length and found < count:
                found += 1
                yield name, ids


def added(parts: Sequence[Acceptance]) -> Acceptance:
    """Sums of what was counted."""
    names = Acceptance.__dataclass_fields__
    return Acceptance(**{name: sum(getattr(part, name) for part in parts) for name in names})


def columns_of(found: Acceptance, base: Acceptance) -> dict[str, Any]:
    """The measured columns of a way, beside the dense engine's."""
    report = found.report()
    names = ("tokens", "tokens_per_second", "acceptance", "mean_length", "saved")
    row: dict[str, Any] = {name: report[name] for name in names} | {"seconds": found.seconds}
    return row | {"ratio": report["tokens_per_second"] / base.report()["tokens_per_second"]}


def conditions(args: argparse.Namespace, what: str) -> dict[str, Any]:
    """Conditions that stand in every row."""
    row: dict[str, Any] = {"what": what, "prompts": args.prompts, "torch": torch.__version__}
    if args.device == "cuda" or what == "forced":
        row |= made_now(*STEP) | {"gpu": device_name(args.device)}
    else:
        row |= made_now(*CPU_STEP) | {"cpu": cpu_name(), "threads": args.threads, "clock": "wall"}
    if what == "forced":
        return row | {"model": args.shape, "weights": args.weights}
    stored = (
        "int4" if quant_method(read_values(args.model)) == INT4 else "float16" if args.device == "cuda" else "float32"
    )
    return row | {"model": Path(args.model).name, "weights": stored}


def write_row(args: argparse.Namespace, row: dict[str, Any]) -> None:
    append_row(args.out, five_digits(row), COLUMNS)
    shown = "what way decoding text length forced tokens_per_second ratio acceptance differ tokens note".split()
    print("  ".join(f"{name} {value}" for name, value in five_digits(row).items() if name in shown), flush=True)


def engines_of(args: argparse.Namespace) -> CpuWays | GpuWays:
    """The ways of a model and its bundle."""
    bundle, context = Bundle.from_pretrained(args.bundle), args.prompt + args.new
    mlp = args.mlp_density or (None if args.device == "cuda" else 0.2)
    bundle = bundle if mlp is None else bundle.at(mlp, args.head_density)
    if args.device == "cpu":
        weights = CpuWeights.from_model(load_model(args.model))
        options: dict[str, Any] = {"context": context, "threads": args.threads}
        return CpuWays(CpuEngine(weights, **options), CpuEngine(weights, bundle, **options))
    model, chosen = load_model(args.model, "float16", args.device), EngineOptions(context=context, device=args.device)
    return GpuWays(DecodeEngine(model, None, chosen), DecodeEngine(model, bundle, chosen))


def measure_speed(args: argparse.Namespace) -> None:
    """Rows of all ways and decodings, all texts together and each."""
    ways, row = engines_of(args), conditions(args, "speed")
    every = ways_of(args.device)
    names = args.ways or [*every, f"{every[2]}, and copies"]
    prompts = list(read_prompts(args.model, args.prompt, args.prompts, args.texts))
    for decoding in args.decodings:
        counted: dict[tuple[str, str], list[Acceptance]] = {}
        for number, (text, prompt) in enumerate(prompts):
            sampling = dataclasses.replace(DECODINGS[decoding], seed=number)
            for name in ["dense", *names]:
                asked = prompt, args.new, sampling
                _, found = ways.write_densely(*asked) if name == "dense" else ways.write(name, *asked)
                if number >= len(args.texts):  # those before have compiled, recorded, and found lengths of drafts
                    counted.setdefault((name, text), []).append(found)
                    counted.setdefault((name, "all"), []).append(found)
        for (name, text), parts in counted.items():
            columns = columns_of(added(parts), added(counted["dense", text]))
            write_row(args, row | {"way": name, "decoding": decoding, "text": text} | columns)


def count_differences(args: argparse.Namespace) -> None:
    """Tokens of drafted texts that are not those of draft_length=0, of the one-row engine, and of transformers.

    Two ways and fixed and chosen lengths take turns. transformers is given the same text. Each of its choices is
    compared, because behind a token that differs texts would differ in everything.
    """
    ways, row = engines_of(args), conditions(args, "equal")
    theirs = load_model(args.model, "float16" if args.device == "cuda" else "float32", args.device)
    totals: dict[tuple[str, str], list[int]] = {}
    began = time.monotonic()

    def count(decoding: str, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
        entry = totals.setdefault((decoding, name), [0, 0])
        entry[0] += sum(a != b for a, b in zip(found, expected, strict=True))
        entry[1] += len(expected)

    for number, (_, prompt) in enumerate(read_prompts(args.model, args.prompt, args.prompts, args.texts)):
        decoding = args.decodings[number % len(args.decodings)]
        sampling = dataclasses.replace(DECODINGS[decoding], seed=number)
        expected, _ = ways.write("draft_length=0", prompt, args.new, sampling)
        name = ways_of(args.device)[1 + number // 3 % 2]
        text, _ = ways.write(name, prompt, args.new, sampling, length=None if number % 2 else 1 + number % 7)
        count(decoding, name, text, expected)
        if decoding == "greedy":
            count(decoding, "dense engine", ways.write_densely(prompt, args.new, sampling)[0], expected)
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + expected], device=args.device)).logits[0, len(prompt) - 1 : -1]
            count(decoding, "transformers", logits.argmax(-1).tolist(), expected)
        if time.monotonic() - began > args.seconds:
            break
    for (decoding, name), (differ, tokens) in totals.items():
        write_row(args, row | {"way": name, "decoding": decoding, "tokens": tokens, "differ": differ})


def search(args: argparse.Namespace) -> None:
    """Rows of every bundle and density on validation text, weights of the draft in 8 bits, and the fastest of them."""
    weights, context = CpuWeights.from_model(load_model(args.model)), args.prompt + args.new
    prompts = list(read_prompts(args.model, args.prompt, args.prompts, part="val"))
    options: dict[str, Any] = {"threads": args.threads, "context": context}
    dense = CpuEngine(weights, **options)
    found: dict[tuple[str, str], float] = {}
    for folder in args.bundles or [args.bundle]:
        bundle = Bundle.from_pretrained(folder)
        for mlp, heads in [(mlp, heads) for mlp in args.mlp_densities for heads in args.head_densities]:
            ways = CpuWays(dense, CpuEngine(weights, bundle.at(mlp, heads), **options))
            note = f"{mlp:g} of the neurons, {heads:g} of the heads, {folder}"
            for decoding in args.decodings:
                drafted, densely = [], []
                for number, (_, prompt) in enumerate(prompts):
                    asked = prompt, args.new, dataclasses.replace(DECODINGS[decoding], seed=number)
                    drafted.append(ways.write("sparse, 8 bits", *asked)[1])
                    densely.append(ways.write_densely(*asked)[1])
                columns = columns_of(added(drafted[1:]), added(densely[1:]))  # lengths of drafts are found by then
                row = conditions(args, "search") | {"way": "sparse, 8 bits", "decoding": decoding, "note": note}
                write_row(args, row | columns)
                found[note, decoding] = columns["ratio"]
    for decoding in args.decodings:
        best = max((key for key in found if key[1] == decoding), key=lambda key: found[key])
        print(f"fastest, {decoding}: {best[0]}, {found[best]:.3f} of the dense engine's tokens a second")


def measure_forced(args: argparse.Namespace) -> None:
    """Rows of a true shape: cycles of each way and length in dense steps, and tokens a second at each acceptance."""
    shape, packed = TINY if args.shape == "tiny" else SHAPES[args.shape], args.weights == "int4"
    gpu = args.device == "cuda"
    options = EngineOptions(
        context=args.prompt + max(args.new, 80) + 2 * MOST_DRAFTED, ops="triton" if gpu else "reference",
        device=args.device, release=True,
    )  # fmt: skip
    weights = random_weights(shape, ACTIVE, packed, False, args.device)
    dense = DecodeEngine(weights, None, options)
    weights.layers[:] = dense.weights.layers
    start(dense, args.prompt, 60)
    seconds = statistics.median(step_times(dense.step, 32)) / 1000 if gpu else seconds_of(dense.step)
    del dense
    mlp_density = args.mlp_density or 0.1
    rank = RANKS.get(args.shape, 32)
    predictors = random_predictors(shape, rank, mlp_density, 1.0, 1, "int4", device=args.device)
    engine = DecodeEngine(weights, predictors, options)
    if not packed:
        own, coded = engine.weights, random_weights(shape, ACTIVE, True, False, args.device)
        beside = {"embedding": own.embedding, "positions": own.positions, "lm_head": own.lm_head}
        own.drafts["int4"] = dataclasses.replace(coded, **beside)
    ways, row = GpuWays(None, engine), conditions(args, "forced")
    prompt = torch.randint(3, shape.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    for name in args.ways or ways_of("cuda"):
        if packed and name.endswith("4 bits"):
            continue
        pair = ways[name]
        if pair.step.predictors:  # thresholds at the asked density, on what this step itself computes
            pair.step.reset()
            start(engine, args.prompt, 40)
            seen: Any = SimpleNamespace(core=pair.step, predictors=predictors, weights=pair.step.weights)
            with torch.no_grad():
                set_thresholds(seen, mlp_density, 1.0)
        _measure_way(args, ways, name, prompt, row | {"way": name}, seconds)
        ways.forget(name)


def _measure_way(
    args: argparse.Namespace, ways: GpuWays, name: str, prompt: list[int], row: dict[str, Any], seconds: float
) -> None:
    """Rows of one way. seconds: of a dense step."""
    pair = ways[name]
    for length in [0] if name == "draft_length=0" else range(MOST_DRAFTED + 1):
        pair.force(1.0)
        pair.begin(Row.of_prompt(prompt, ways.engine.context), ())
        cycle = seconds_of(lambda p=pair, g=length: p.cycle(g, "greedy"))  # type: ignore[misc]
        wait(ways.engine)
        write_row(args, row | {"what": "cycle", "length": length, "seconds": cycle, "ratio": cycle / seconds})
        pair.pace.seconds[length] = cycle
        pair.pace._tried.add(length)
    for share in args.acceptance[:1] if name == "draft_length=0" else args.acceptance:
        pair.force(share)
        ways.write(name, prompt, args.new // 2, Sampling())  # the length of drafts is found
        _, accepted = ways.write(name, prompt, args.new, Sampling())
        note = f"acceptance is forced; at the end drafts of {FIXED.get(name, pair.pace.best())}"
        columns = columns_of(accepted, Acceptance(1, 1, seconds=seconds))
        write_row(args, row | {"decoding": "greedy", "forced": share, "note": note} | columns)


def seconds_of(run: Callable[[], Any], n: int = 7) -> float:
    """Median of calls that end when the device has done its work, but for the first two."""
    times = []
    for _ in range(n + 2):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> int:
    parser = command_line(__doc__)
    parts = {"speed": measure_speed, "equal": count_differences, "search": search, "forced": measure_forced}
    parser.add_argument("what", choices=list(parts))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--mlp-density", type=float, help="default: 0.2 on a CPU, the bundle's on a GPU, 0.1 of forced")
    parser.add_argument("--head-density", type=float, default=1.0)
    parser.add_argument("--bundles", nargs="+", help="of search, of the same model")
    parser.add_argument("--mlp-densities", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.5], help="of search")
    parser.add_argument("--head-densities", type=float, nargs="+", default=[0.75, 1.0], help="of search")
    parser.add_argument("--shape", default="6.7b", choices=("tiny", *SHAPES), help="of forced")
    parser.add_argument("--weights", default="float16", choices=("float16", "int4"), help="of forced: the model's own")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.84, 0.9, 0.95])
    parser.add_argument("--ways", nargs="+", help="default: all")
    parser.add_argument("--decodings", nargs="+", default=["greedy", "0.7", "1.0"], choices=list(DECODINGS))
    parser.add_argument("--texts", nargs="+", default=TEXTS, help="installed texts, or files held out as a whole")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1e9, help="of equal: no text is begun later")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/lossless.csv, of a GPU lossless_gpu.csv")
    args = parser.parse_args()
    gpu = args.device == "cuda" or args.what == "forced"
    args.out = args.out or Path(f"benchmarks/results/lossless{'_gpu' * gpu}.csv")
    torch.set_num_threads(args.threads)
    parts[args.what](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
