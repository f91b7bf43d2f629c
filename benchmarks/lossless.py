"""Lossless decoding on a CPU: tokens a second and acceptance, beside rivals, and how many tokens differ.

All ways write the same prompts in turns. Prompts are beginnings of held-out documents of installed texts.

    python -m benchmarks.lossless speed                 opt-mini with the demo's bundle: measured acceptance, and rivals
    python -m benchmarks.lossless forced --shape 1.3b   random weights of a true shape: acceptance is forced
    python -m benchmarks.lossless equal                 how many of many tokens differ from draft_length=0, and others
    python -m benchmarks.lossless search                which density and which of --bundles is fastest, validation text
    python -m benchmarks.lossless choices               the share of their choices that survive, validation text
    python -m benchmarks.lossless cost [--shape 1.3b]   what verification of one to eight tokens costs, in dense steps

With --cpu-time one thread's time on the processor is counted, on a machine that others use as well.
Forced: a cycle drafts and verifies as ever, then as many tokens count as accepted as a coin says. What they are does
not matter for the time. Rows go to benchmarks/results/lossless.csv.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_decode import cpu_name, random_predictors, random_weights
from benchmarks.decode_problem import SHAPES
from benchmarks.lossless_rows import DECODINGS, TEXTS, added, columns_of, read_prompts
from benchmarks.rows import append_row, command_line, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.cpu import CpuEngine, Sampling, arrays
from dejavu_train.engine.cpu.engine import usable_cores
from dejavu_train.engine.cpu.lossless import SLOTS, CpuPair
from dejavu_train.engine.cpu.selectors import make_selectors
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.lossless import Acceptance, Pair, Verified
from dejavu_train.models.opt import load_opt
from dejavu_train.sparse.model import SparseOPTForCausalLM

COLUMNS = (
    "date commit cpu threads clock model what way decoding text length forced prompts tokens seconds "
    "tokens_per_second ratio acceptance mean_length saved differ note sources"
).split()


class Lookup(CpuPair):
    """Drafts what stood behind the last ``size`` tokens where they stood before, for nothing."""

    size = 3

    def cycle(self, drafted: int, mode: str) -> Verified:
        """Verify what followed the last occurrence, or nothing."""
        state = self.draft_state
        text = state.tokens[0, : int(state.position[0]) + 1].tolist()
        for at in range(len(text) - self.size - 1, -1, -1):
            if text[at : at + self.size] == text[-self.size :]:
                return self.verify(text[at + self.size :][:drafted], mode)
        return self.verify([], mode)


class Forced(CpuPair):
    """Accepts each drafted token with probability ``share``, whatever the dense model says."""

    share = 1.0
    coin = random.Random(0)

    def cycle(self, drafted: int, mode: str) -> Verified:
        """A cycle whose outcome a coin decides."""
        state = self.draft_state
        first = int(state.position[0])
        found = super().cycle(drafted, mode)
        accepted = 0
        while accepted < found.drafted and self.coin.random() < self.share:
            accepted += 1
        state.position[0], state.watermark[:] = first + accepted + 1, first + accepted + 1
        over = int(state.position[0]) + 1 >= int(state.limit[0])
        state.row_state[0] = arrays.DONE if over else arrays.SPARSE
        return Verified(found.drafted, accepted, int(state.position[0]) + 1, over)


def half_of(weights: CpuWeights) -> CpuWeights:
    """The first half of the layers, then the final LayerNorm and the LM head, over the same rows of weights."""
    model, n = weights.model, weights.shape.n_layers // 2
    fields = {name: getattr(model, name) for name in arrays.Model.__annotations__}
    fields["first"] = model.first[:n].copy()
    fields["norms"] = torch.from_numpy(model.norms)[[*range(2 * n), -2, -1]].numpy()
    return CpuWeights(weights.shape, arrays.Model(**fields), weights.out_bias)


class Ways:
    """Ways to write one text with the same engines: name -> tokens, and what was accepted.

    ``rounded``: the draft's weights are in 8 bits.
    """

    def __init__(self, dense: CpuEngine, sparse: CpuEngine, pair_class: type[CpuPair] = CpuPair) -> None:
        self.dense, self.shape = dense, dense.shape
        self.weights, threads = sparse.weights, sparse.threads
        self.pairs: dict[str, tuple[CpuPair, int | None]] = {}

        def pair(kind: type[CpuPair], draft: CpuWeights, selectors: arrays.Selectors) -> CpuPair:
            return kind(self.weights, draft, selectors, sparse.state, sparse.scratch, threads)

        own = pair(pair_class, self.weights, sparse.selectors)
        self.pairs["draft_length=0"] = own, 0
        self.pairs["sparse"] = own, None
        self.pairs["sparse, 8 bits"] = pair(pair_class, self.weights.rounded, sparse.selectors), None
        for alone, _ in self.pairs.values():
            alone.copied = None
        self.sparse, self._pair = sparse, pair

    def add_rivals(self) -> None:
        """Drafts of other kinds."""
        half, none = half_of(self.weights), make_selectors(self.weights, [])
        self.pairs["dense, 8 bits"] = self._pair(CpuPair, self.weights.rounded, none), None
        self.pairs["half the layers"] = self._pair(CpuPair, half, make_selectors(half, [])), None
        for name in ("dense, 8 bits", "half the layers"):
            self.pairs[name][0].copied = None
        self.pairs["sparse, 8 bits, and copies"] = (
            self._pair(CpuPair, self.weights.rounded, self.sparse.selectors),
            None,
        )
        lookup = self._pair(Lookup, self.weights, self.sparse.selectors)
        self.pairs["prompt lookup"] = lookup, 7

    def write(
        self, way: str, prompt: list[int], new: int, sampling: Sampling, length: int | None = None
    ) -> tuple[list[int], Acceptance]:
        """The text of one way. The time of the prompt is not counted."""
        if way == "dense":
            return self._write_densely(prompt, new, sampling)
        pair, fixed = self.pairs[way]
        text = []

        def show(start: int, stop: int, tokens: Sequence[int]) -> None:
            text.extend(pair.draft_state.tokens[0, start:stop].tolist())  # a forced cycle names no tokens

        row = Row.of_prompt(prompt, len(prompt) + new, sampling)
        return text, pair.generate(row, (), fixed if length is None else length, show)

    def _write_densely(self, prompt: list[int], new: int, sampling: Sampling) -> tuple[list[int], Acceptance]:
        engine, n = self.dense, len(prompt)
        engine.begin([Row.of_prompt(prompt, n + new, sampling)])
        left, began = new - 1, Pair.clock()
        while left > 0:
            left -= engine.steps(left, sampling.mode)
        seconds = Pair.clock() - began
        return engine.state.tokens[0, n : n + new].tolist(), Acceptance(new - 1, new - 1, seconds=seconds)


def conditions(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What stands in every row."""
    return {
        **made_now("dejavu_train/engine/cpu", "dejavu_train/engine/lossless.py"),
        "cpu": cpu_name(),
        "threads": args.threads,
        "model": model,
        "prompts": args.prompts,
        "clock": "cpu" if args.cpu_time else "wall",
    }


def engines(args: argparse.Namespace, context: int) -> tuple[CpuEngine, CpuEngine]:
    """The dense engine and the sparse one, of opt-mini or a random shape. They share their weights."""
    options: dict[str, Any] = {"context": context, "threads": args.threads}
    if args.shape:
        weights = random_weights(SHAPES[args.shape], "float32", None, args.live_share)
        bundle: Any = random_predictors(weights.shape, 128, args.mlp_density, args.head_density, "int8")
    else:
        weights = CpuWeights.from_model(load_opt(args.model))
        bundle = Bundle.from_pretrained(args.bundle).at(args.mlp_density, args.head_density)
    return CpuEngine(weights, **options), CpuEngine(weights, bundle, **options)


def measure_speed(args: argparse.Namespace) -> None:
    """Rows of all ways and decodings, all texts together and each."""
    ways = Ways(*engines(args, args.prompt + args.new))
    ways.add_rivals()
    names = ["dense", *ways.pairs]
    prompts = list(read_prompts(args.model, args.prompt, args.prompts))
    for decoding in args.decodings:
        counted: dict[tuple[str, str], list[Acceptance]] = {}
        for number, (text, prompt) in enumerate(prompts):
            sampling = Sampling(DECODINGS[decoding].temperature, seed=number)
            for name in names:
                _, found = ways.write(name, prompt, args.new, sampling)
                if number >= len(TEXTS):  # those before have warmed up, and found lengths of drafts
                    counted.setdefault((name, text), []).append(found)
                    counted.setdefault((name, "all"), []).append(found)
        for (name, text), parts in counted.items():
            row = conditions(args, Path(args.model).name) | {
                "what": "speed",
                "way": name,
                "decoding": decoding,
                "text": text,
            }
            write_row(args, row | columns_of(added(parts), added(counted["dense", text])))


def measure_forced(args: argparse.Namespace) -> None:
    """Rows of a true shape at each acceptance, and what verification of one to eight tokens costs."""
    ways = Ways(*engines(args, args.prompt + args.new), pair_class=Forced)
    prompt = torch.randint(
        3, ways.shape.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    names = ["dense", *ways.pairs]
    for share in args.acceptance:
        counted: dict[str, list[Acceptance]] = {name: [] for name in names}
        Forced.share = share
        for turn in range(args.turns + 1):
            for name in names:
                _, found = ways.write(name, prompt, args.new, Sampling())
                if turn:
                    counted[name].append(found)
        for name, parts in counted.items():
            row = conditions(args, args.shape) | {"what": "forced", "way": name, "decoding": "greedy", "forced": share}
            write_row(args, row | columns_of(added(parts), added(counted["dense"])))
    for name, (pair, _) in ways.pairs.items():
        if name == "draft_length=0":
            continue
        steps = added(counted["dense"]).report()["tokens_per_second"]
        note = " ".join(f"{g}={seconds * steps:.2f}" for g, seconds in sorted(pair.pace.seconds.items()))
        row = conditions(args, args.shape) | {
            "what": "cycles",
            "way": name,
            "note": f"dense steps of a cycle by length: {note}",
        }
        write_row(args, row)


def measure_cost(args: argparse.Namespace) -> None:
    """Rows of a dense step, of draft steps and of verification, all at one position. Medians of turns."""
    dense, sparse = engines(args, args.prompt + 2 * SLOTS)
    ways = Ways(dense, sparse)
    prompt = torch.randint(3, ways.shape.vocab_size, (args.prompt,)).tolist()
    for decoding in args.decodings:
        sampling, total = DECODINGS[decoding], args.prompt + 2 * SLOTS

        def seconds(pair: CpuPair, drafted: int, given: int, sampling: Sampling = sampling) -> float:
            state = pair.draft_state
            state.position[0], state.watermark[:], state.row_state[0] = args.prompt, args.prompt, arrays.SPARSE
            began = Pair.clock()
            _ = pair.verify(prompt[:given], sampling.mode) if given else pair.cycle(drafted, sampling.mode)
            return Pair.clock() - began

        def step(sampling: Sampling = sampling, total: int = total) -> float:
            dense.begin([Row.of_prompt(prompt, total, sampling)])
            began = Pair.clock()
            dense.step(sampling.mode)
            return Pair.clock() - began

        own, rounded = ways.pairs["sparse"][0], ways.pairs["sparse, 8 bits"][0]
        for pair in (own, rounded):
            pair.begin(Row.of_prompt(prompt, total, sampling), ())
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(args.turns):
            times.setdefault(("dense", 1), []).append(step())
            for n in range(1, SLOTS + 1):
                times.setdefault(("verification", n), []).append(seconds(own, 0, n - 1))
            for name, pair in (("sparse", own), ("sparse, 8 bits", rounded)):
                for n in (0, 4):
                    times.setdefault((name, n), []).append(seconds(pair, n, 0))
        median = {key: statistics.median(found) for key, found in times.items()}
        for name in ("sparse", "sparse, 8 bits"):  # a step of the draft: four, less their verification
            drafted = median.pop((name, 4)) - median["verification", 5]
            median.pop((name, 0))
            median[name, 1] = drafted / 4
        for (name, n), found in median.items():
            row = conditions(args, args.shape or Path(args.model).name)
            row |= {"what": "cost", "way": name, "decoding": decoding, "length": n, "seconds": found}
            write_row(args, row | {"ratio": found / median["dense", 1]})


@torch.no_grad()
def count_choices(args: argparse.Namespace) -> None:
    """Rows of every bundle and density: the share of choices that survive, position by position of validation text.

    Greedy: those that are the dense model's. At 1.0: at best, which is one less half of the sum of |p - q|.
    """
    dense = load_opt(args.model)
    rows = [ids for _, ids in read_prompts(args.model, args.window, args.prompts, part="val")]
    for name in args.bundles or [args.bundle]:
        bundle = Bundle.from_pretrained(name)
        for mlp, heads in itertools.product(args.mlp_densities, args.head_densities):
            sparse = SparseOPTForCausalLM.from_model(load_opt(args.model), bundle.at(mlp, heads), "mask")
            same, best, tokens = 0.0, 0.0, 0
            for ids in rows:
                ours, theirs = (model(torch.tensor([ids])).logits[0].softmax(-1) for model in (sparse, dense))
                same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
                best += len(ids) - float((ours - theirs).abs().sum()) / 2
                tokens += len(ids)
            row = conditions(args, Path(args.model).name) | {"what": "choices", "way": "sparse", "tokens": tokens}
            for decoding, found in (("greedy", same), ("1.0", best)):
                share = {"decoding": decoding, "note": noted(bundle, mlp, heads), "acceptance": found / tokens}
                write_row(args, row | share)


def noted(bundle: Bundle, mlp: float, heads: float) -> str:
    """A bundle at these densities in words."""
    specs = [spec for spec in bundle.specs.values() if spec.target == "mlp"]
    kinds = f"rank {specs[0].rank} in {specs[0].dtype}{', a second stage' if bundle.cascades() else ''}"
    return f"{mlp:g} of the neurons, {heads:g} of the heads, {kinds}"


def search(args: argparse.Namespace) -> None:
    """Rows of every bundle and density on validation text, weights of the draft in 8 bits, and the fastest of them."""
    weights, options = CpuWeights.from_model(load_opt(args.model)), {"context": args.prompt + args.new}
    prompts = list(read_prompts(args.model, args.prompt, args.prompts, part="val"))
    dense = CpuEngine(weights, threads=args.threads, **options)
    found: dict[tuple[str, str], float] = {}
    for name in args.bundles or [args.bundle]:
        bundle = Bundle.from_pretrained(name)
        for mlp, heads in itertools.product(args.mlp_densities, args.head_densities):
            ways = Ways(dense, CpuEngine(weights, bundle.at(mlp, heads), threads=args.threads, **options))
            note = noted(bundle, mlp, heads)
            for decoding in args.decodings:
                parts: dict[str, list[Acceptance]] = {"dense": [], "sparse, 8 bits": []}
                for number, (_, prompt) in enumerate(prompts):
                    sampling = Sampling(DECODINGS[decoding].temperature, seed=number)
                    for way, counted in parts.items():
                        accepted = ways.write(way, prompt, args.new, sampling)[1]
                        counted += [accepted] if number else []  # lengths of drafts are found by then
                columns = columns_of(added(parts["sparse, 8 bits"]), added(parts["dense"]))
                row = conditions(args, Path(args.model).name) | {"what": "search", "way": "sparse, 8 bits"}
                write_row(args, row | {"decoding": decoding, "note": note} | columns)
                found[note, decoding] = columns["ratio"]
    for decoding in args.decodings:
        best = max((key for key in found if key[1] == decoding), key=lambda key: found[key])
        print(f"fastest, {decoding}: {best[0]}, {found[best]:.3f} of the dense engine's tokens a second")


def count_differences(args: argparse.Namespace) -> None:
    """Tokens of drafted texts that are not those of draft_length=0, of the one-row engine, and of transformers.

    Drafts have the model's weights and 8 bits in turn. The one-row engine writes every fourth text.
    """
    began = time.monotonic()
    dense, sparse = engines(args, args.prompt + args.new)
    ways = Ways(dense, sparse)
    theirs = load_opt(args.model)
    totals: dict[tuple[str, str], list[int]] = {}

    def count(decoding: str, name: str, differ: int, tokens: int) -> None:
        entry = totals.setdefault((decoding, name), [0, 0])
        entry[0], entry[1] = entry[0] + differ, entry[1] + tokens

    for number, (_, prompt) in enumerate(read_prompts(args.model, args.prompt, args.prompts)):
        decoding = args.decodings[number % len(args.decodings)]
        sampling = Sampling(DECODINGS[decoding].temperature, seed=number)
        expected, _ = ways.write("draft_length=0", prompt, args.new, sampling)
        for name in ["sparse" if number // 3 % 2 else "sparse, 8 bits"] + ["dense"] * (number % 4 == 0):
            text, _ = ways.write(name, prompt, args.new, sampling, length=None if number % 2 else 1 + number % 7)
            count(decoding, name, sum(a != b for a, b in zip(text, expected, strict=True)), len(expected))
        if decoding == "greedy":
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
            count(decoding, "transformers", int((logits.argmax(-1) != torch.tensor(expected)).sum()), len(expected))
        if number % 20 == 19:
            print(number + 1, totals, flush=True)
        if time.monotonic() - began > args.seconds:
            break
    for (decoding, name), (differ, tokens) in totals.items():
        row = conditions(args, Path(args.model).name)
        write_row(args, row | {"what": "equal", "way": name, "decoding": decoding, "tokens": tokens, "differ": differ})


def write_row(args: argparse.Namespace, row: dict[str, Any]) -> None:
    append_row(args.out, five_digits(row), COLUMNS)
    hidden = ("date", "commit", "sources", "cpu", "threads", "clock", "prompts")
    print("  ".join(f"{name} {value}" for name, value in five_digits(row).items() if name not in hidden), flush=True)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["speed", "forced", "equal", "search", "choices", "cost"])
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/demo/bundle")
    parser.add_argument("--shape", choices=("1.3b",), help="random weights of this shape, for forced")
    parser.add_argument("--mlp-density", type=float, help="default: 0.2 of a bundle, 0.1 of a random shape")
    parser.add_argument("--head-density", type=float, default=1.0)
    parser.add_argument("--bundles", nargs="+", help="of search, of the same model")
    parser.add_argument("--mlp-densities", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.5], help="of search")
    parser.add_argument("--head-densities", type=float, nargs="+", default=[0.75, 1.0], help="of search")
    parser.add_argument("--live-share", type=float, default=0.06, help="of a random shape's neurons")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.84, 0.9, 0.95])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "0.7", "1.0"], choices=list(DECODINGS))
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--window", type=int, default=256, help="of choices: tokens of a text")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1e9, help="of equal: no text is begun later")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=3, help="of forced and cost")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lossless.csv"))
    args = parser.parse_args()
    args.mlp_density = args.mlp_density or (0.1 if args.shape else 0.2)
    if args.cpu_time:
        args.threads, Pair.clock = 1, staticmethod(time.process_time)
    torch.set_num_threads(args.threads)
    parts = {
        "speed": measure_speed, "forced": measure_forced, "equal": count_differences, "search": search,
        "choices": count_choices,
        "cost": measure_cost,
    }  # fmt: skip
    parts[args.what](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
