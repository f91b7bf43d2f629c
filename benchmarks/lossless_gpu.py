"""Lossless decoding on a GPU: tokens a second beside our one-row dense engine and rivals, and how many tokens differ.

    python -m benchmarks.lossless_gpu forced --shape 30b     random weights of a true shape, acceptance is forced
    python -m benchmarks.lossless_gpu speed                  opt-mini and its bundle, or --model and --bundle
    python -m benchmarks.lossless_gpu equal                  how many of many tokens differ from draft_length=0
    python -m benchmarks.lossless_gpu picture                speed against acceptance, from the rows of forced and speed

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
import csv
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode_problem import RANKS, SHAPES, random_predictors, random_weights, set_thresholds, start
from benchmarks.harness import step_times
from benchmarks.lossless_rows import DECODINGS, TEXTS, added, columns_of, read_prompts
from benchmarks.rows import append_row, command_line, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.draft_weights import draft_weights
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.lossless import Acceptance, Pace, Verified
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import plan_step, with_screen
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.verification import EnginePair
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims
from dejavu_train.models.config_values import INT4, quant_method, read_values
from dejavu_train.models.opt import load_opt

TINY = ModelDims(128, 512, 4, 4, 1000, 512)
COINS = 4096
WAYS = ("draft_length=0", "sparse", "sparse, 4 bits", "dense, 4 bits", "prompt lookup", "half the layers")
COPYING = "sparse, 4 bits, and copies"  # of speed alone: what is copied has no forced acceptance
OF_FLOATS = ("sparse, 4 bits", "dense, 4 bits")
FIXED = {"draft_length=0": 0, "prompt lookup": MOST_DRAFTED}  # lengths of drafts that are not chosen
COLUMNS = (
    "date commit gpu torch triton model weights what way decoding text length forced prompts tokens seconds "
    "tokens_per_second ratio acceptance mean_length saved differ note sources"
).split()


class Measured(EnginePair):
    """A pair whose acceptance may be forced, and whose drafts may be copied from the text itself.

    Attributes:
        share: None, or the probability that a drafted token is accepted.
        size: None, or how many tokens must have stood before, of prompt lookup.
    """

    share: float | None = None
    size: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self.step.device
        self.coins, self.turn = (
            torch.zeros(n, dtype=torch.int64, device=device) for n in (COINS, 1)
        )  # accepted tokens of each cycle
        self.pace, self.copied = Pace(MOST_DRAFTED), None

    def force(self, share: float) -> None:
        """Accept each drafted token with this probability."""
        self.share, coin = share, random.Random(0)
        lengths = []
        for _ in range(COINS):
            n = 0
            while n < MOST_DRAFTED and coin.random() < share:
                n += 1
            lengths.append(n)
        self.coins.copy_(torch.tensor(lengths))

    def cycle(self, drafted: int, mode: str) -> Verified:
        """See `Pair.cycle`. A draft that is copied is put there by the host. Pairs of one step have graphs apart."""
        run = partial(self._run, drafted, mode)
        if self.size is not None:
            self._give(drafted)
            run, drafted = partial(self._verify, mode), 0
        self.step.replay((self, self.share is None, drafted, mode), run)
        return self._verified(self.report.tolist())

    def _give(self, drafted: int) -> None:
        state, position = self.step.state, int(self.step.state.position)
        text = state.tokens[0, : position + 1].tolist()
        given = text[:drafted] if self.share is not None else self._followed(text)[:drafted]
        self.first.copy_(state.position)
        if given:
            state.tokens[0, position + 1 : position + 1 + len(given)] = torch.tensor(given, dtype=torch.int32)
            state.position.add_(len(given))

    def _followed(self, text: list[int]) -> list[int]:
        size = self.size or 0
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[-size:]:
                return text[at + size :]
        return []

    @torch.no_grad()
    def _verify(self, mode: str) -> None:
        self._keep(self._choices(mode))

    def _choices(self, mode: str) -> Tensor:
        choices = super()._choices(mode)
        if self.share is None:
            return choices
        tokens = self.step.state.tokens[0]
        drafted = tokens[(self.first + 1 + self.numbers).clamp_max(len(tokens) - 1)]
        accepted = self.coins[self.turn % COINS]
        self.turn += 1
        return torch.where(self.numbers < accepted, drafted, (drafted + 1) % self.weights.shape.vocab_size)


class Ways:
    """Pairs over one engine by name, and the dense engine's tokens. A pair is made when it is first asked for.

    Args:
        engine: of one row, with the predictors.
    """

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine = engine
        self._made: dict[str, Measured] = {}

    def __getitem__(self, way: str) -> Measured:
        if way not in self._made:
            self._made[way] = self._make(way)
        return self._made[way]

    def _make(self, way: str) -> Measured:
        engine = self.engine
        if way in ("draft_length=0", "sparse"):
            return self.pair(engine.core)
        if way == "prompt lookup":
            lookup = self.pair(engine.core)
            lookup.size = 3
            return lookup
        if way == "half the layers":
            return self.pair(self._half())
        coded = draft_weights(engine.weights, "int4")
        pair = self.pair(self.step(coded, engine.predictors if way.startswith("sparse") else {}))
        pair.copied = Pace(MOST_DRAFTED) if way == COPYING else None
        return pair

    def forget(self, way: str) -> None:
        """Give its memory back."""
        pair = self._made.pop(way)
        graphs = pair.step._graphs
        for key in [key for key in graphs if key[0] is pair]:
            del graphs[key]
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def pair(self, step: DecodeStep) -> Measured:
        return Measured(step, self.engine.weights, self.engine.begin)

    def step(self, weights: DecodeWeights, predictors: dict[Any, Any]) -> DecodeStep:
        """Of other weights or predictors over the engine's state."""
        engine, options = self.engine, dataclasses.replace(self.engine.options, context=self.engine.context)
        facts = {key: each.facts(1) for key, each in predictors.items()}
        plan = plan_step(weights.shape, facts, weights.formats, options, engine.plan.engine)
        plan = with_screen(plan, engine.core.screen is not None and weights.lm_head is engine.weights.lm_head, None)
        return DecodeStep(weights, predictors, plan, options, engine.device, None, engine.core)

    def _half(self) -> DecodeStep:
        """The first half of the layers, then the final LayerNorm and the LM head."""
        weights, n = self.engine.weights, self.engine.shape.n_layers // 2
        shape = dataclasses.replace(weights.shape, n_layers=n)
        layers = [layer.arranged(False) for layer in weights.layers[:n]]
        step = self.step(dataclasses.replace(weights, shape=shape, layers=layers, drafts={}), {})
        step.caches = self.engine.core.caches  # verification writes those of all layers
        return step

    def write(
        self, way: str, prompt: list[int], new: int, sampling: Sampling, length: int | None = None
    ) -> tuple[list[int], Acceptance]:
        """The text of one way, and what was accepted. The time of the prompt is not counted."""
        ends, length = [len(prompt)], FIXED.get(way, length)
        found = self[way].generate(
            prompt, len(prompt) + new, sampling, 0, (), length, lambda _, stop: ends.append(stop)
        )
        return self.engine.state.tokens[0, len(prompt) : ends[-1]].tolist(), found

    def write_densely(self, engine: DecodeEngine, prompt: list[int], new: int, sampling: Sampling) -> Acceptance:
        """Of an engine without drafts, step by step, without looks between them."""
        n = len(prompt)
        engine.begin([prompt], [n + new], [n], [n], sampling)
        _wait(engine)
        began = time.perf_counter()
        for _ in range(new - 1):
            engine.step(sampling.mode)
        _wait(engine)
        return Acceptance(new - 1, new - 1, seconds=time.perf_counter() - began)


def _wait(engine: DecodeEngine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


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
    pair.begin(prompt, context, Sampling(), 0, ())
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


def best_speed(cycles: dict[int, float], a: float) -> float:
    """Tokens a dense step by the best length, cycles in dense steps by length.

    >>> round(best_speed({0: 1.0, 3: 1.5}, 0.9), 3)
    2.293
    """
    return max(sum(a**i for i in range(g + 1)) / cycles[g] for g in cycles)


def by_token(accepted: float, drafted: float) -> float:
    """The probability that a token is accepted, of drafts of so many tokens of which so many were, on average.

    >>> round(by_token(0.9 + 0.81, 2), 6)
    0.9
    """
    low, high, whole = 0.0, 1.0, int(drafted)
    for _ in range(50):
        a = (low + high) / 2
        expected = sum(a**i for i in range(1, whole + 1)) + (drafted - whole) * a ** (whole + 1)
        low, high = (a, high) if expected < accepted else (low, a)
    return high


def draw(args: argparse.Namespace) -> None:
    """Lines from cycles that were timed, points where whole texts were: tokens a second against acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with args.out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cycles: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        if row["what"] == "cycle":
            cycles.setdefault((row["model"], row["weights"], row["way"]), {})[int(row["length"])] = float(row["ratio"])
    shown = [key for key in cycles if key[2] == ("sparse" if key[1] == "int4" else "sparse, 4 bits")]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    shares = [0.5 + 0.005 * i for i in range(101)]
    for colour, key in enumerate(shown):
        model, weights, _ = key
        label = f"{model.upper()} {'4 bits' if weights == 'int4' else 'fp16'}"
        axes.plot(shares, [best_speed(cycles[key], a) for a in shares], color=f"C{colour}", label=label)
        forced = [row for row in rows if row["what"] == "forced" and (row["model"], row["weights"], row["way"]) == key]
        axes.plot(*_points(forced, lambda row: float(row["forced"])), "o", color=f"C{colour}")
    speed = [r for r in rows if r["what"] == "speed" and r["way"] == "sparse, 4 bits" and r["text"] == "all"]
    for model, marker in zip(dict.fromkeys(row["model"] for row in speed), "xs^vd", strict=False):
        own = [row for row in speed if row["model"] == model]
        axes.plot(*_points(own, _own_acceptance), marker, color="black", label=f"{model}, measured")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("probability that a drafted token is accepted")
    axes.set_ylabel("speed, our dense engine = 1")
    axes.legend()
    figure.tight_layout()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=120)


def _points(rows: list[dict[str, str]], across: Callable[[dict[str, str]], float]) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if row["ratio"]]
    return [across(row) for row in kept], [float(row["ratio"]) for row in kept]


def _own_acceptance(row: dict[str, str]) -> float:
    length, share = float(row["mean_length"]), float(row["acceptance"])
    return by_token(length, length / share) if share else 0.0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["forced", "speed", "equal", "picture"])
    parser.add_argument("--shape", default="6.7b", choices=("tiny", *SHAPES), help="of forced")
    parser.add_argument("--weights", default="float16", choices=("float16", "int4"), help="of forced: the model's own")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle")
    parser.add_argument("--mlp-density", type=float, help="default: the bundle's, 0.1 of forced")
    parser.add_argument("--head-density", type=float, default=1.0)
    parser.add_argument("--active-share", type=float, default=0.6, help="of a random shape's neurons")
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
    parser.add_argument("--picture", type=Path, default=Path("docs/notes/lossless.png"))
    args = parser.parse_args()
    if args.what == "forced":
        args.mlp_density = args.mlp_density or 0.1
    {"forced": measure_forced, "speed": measure_speed, "equal": count_differences, "picture": draw}[args.what](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
