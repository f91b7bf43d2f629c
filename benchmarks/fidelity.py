"""Shows on a GPU that the fast way computes what the references do, with a real model and bundle, in fp32.

1. Token by token through the engine, 16 rows at once and one by one: the same sets as `mask` (near-ties counted apart)
   and its perplexity. What fp32 itself is worth at a token is measured: the pass of `mask` in fp64 with the same sets.
2. Greedy tokens of the engine equal those of `gather`, but where two logits nearly tie: 900 after one prompt, 50 after
each of the others. `gather` reads the engine's tokens one by one, so a near-tie ends no comparison.
3. What fp16 costs: perplexity of the engine in fp16, dense and sparse, beside the dense model and `mask` in fp32.
4. Graph replay equals eager over 512 tokens, across prompts, row orders and a reset, bit for bit (fp16, 1 and 4 rows).
5. What 3 does with 2, 4 and 8 rows at once, whose kernels are others with 4-bit weights.

    python -m benchmarks.fidelity --model checkpoints/opt-mini --bundle FOLDER

4-bit weights: the engine runs in fp16, which their kernels take, so only the later parts are for them. A tie is wider.
Other weights' predictors may be used there (--adopt): nothing is said about their quality.
"""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import command_line, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import Predicted
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions
from dejavu_train.evaluation.baselines import Given
from dejavu_train.models.opt import load_opt, load_tokenizer, weight_hash
from dejavu_train.sparse.masked import masking
from dejavu_train.sparse.model import SparseOPTForCausalLM

NEAR = 1e-3  # distance of a logit to its threshold below which rounding in another order may decide
NOISE = 4  # times what `mask` in fp32 is off its fp64 at the same token: the same, where the model amplifies rounding
HALF_TIE = 3e-2  # the same where the engine runs in fp16
TIE = 1e-4  # distance of two logits of the vocabulary below which either token may be chosen


def rows_of(text: str, tokenizer: Any, n_rows: int, length: int) -> list[list[int]]:
    """n_rows windows of `length` tokens, each led by </s>."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    step = length - 1
    if len(ids) < n_rows * step:
        raise SystemExit(f"error: the text has {len(ids)} tokens, {n_rows * step} are needed; give a longer --text")
    return [[2, *ids[i * step : (i + 1) * step]] for i in range(n_rows)]


def bits(words: Tensor, n_rows: int) -> Tensor:
    """(L, n) int32 with a bit a row -> (L, B, n) bool."""
    shifts = torch.arange(n_rows, device=words.device)
    return ((words[:, None].long() >> shifts[:, None]) & 1).bool()


class Watching(Predicted):
    """Selections of the bundle. Keeps by (layer, target), as (B, T, n): `chosen`. `margin`, how far each logit lies
    from its threshold. `values`, the logits.
    """

    def __init__(self, bundle: Bundle, model: Any) -> None:
        super().__init__(bundle, model.device, model)
        self.chosen: dict[tuple[int, str], Tensor] = {}
        self.margin: dict[tuple[int, str], Tensor] = {}
        self.values: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Any) -> Tensor | None:
        keep, spec = super().__call__(layer, target, sites), self.bundle.specs.get((layer, target))
        if keep is not None and spec is not None:
            logits = self.predictors[layer, target](sites[spec.reads].float())
            self.chosen[layer, target] = keep
            self.margin[layer, target] = (logits - (spec.threshold or 0.0)).abs()
            self.values[layer, target] = logits
        return keep


class Exact(Given):
    """The sets that `watched` chose, for a model in fp64. Keeps by (layer, target) how far the largest of the watched
    logits is off at a token: (B, T, 1)."""

    def __init__(self, watched: Watching) -> None:
        super().__init__(watched.chosen)
        self.watched, self.sites = watched, frozenset(watched.sites)
        self.predictors = {key: copy.deepcopy(predictor).double() for key, predictor in watched.predictors.items()}
        self.off: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Any) -> Tensor | None:
        keep, spec = super().__call__(layer, target, sites), self.watched.bundle.specs.get((layer, target))
        if keep is not None and spec is not None:
            logits = self.predictors[layer, target](sites[spec.reads])
            self.off[layer, target] = (logits - self.watched.values[layer, target]).abs().amax(-1, keepdim=True)
        return keep


class Partings:
    """Compares the engine's sets with those watched, step by step, without waiting for the device.

    After its first difference a row is another one, and what differs later is no evidence. So each row keeps that
    place, the farthest margin of the units that differ there, and what fp32 is off there.
    """

    def __init__(self, engine: DecodeEngine, selector: Watching, exact: Exact, n_rows: int) -> None:
        self.engine, self.n_rows, self.full = engine, n_rows, n_rows == engine.batch
        self.in_order = sorted(engine.predictors, key=lambda key: (key[0], key[1] == "mlp"))
        self.groups = {
            target: [key for key in self.in_order if key[1] == target]
            for target in sorted({k[1] for k in self.in_order})
        }
        device = engine.device

        def together(kept: dict[tuple[int, str], Tensor]) -> dict[str, Tensor]:
            return {target: torch.stack([kept[key] for key in keys]) for target, keys in self.groups.items()}

        self.chosen, self.margin, self.off = together(selector.chosen), together(selector.margin), together(exact.off)
        self.order = {
            target: torch.tensor([self.in_order.index(key) for key in keys], dtype=torch.float64, device=device)
            for target, keys in self.groups.items()
        }
        self.first = torch.tensor([math.inf, 0.0, 0.0], dtype=torch.float64, device=device).repeat(n_rows, 1)
        self.differing = torch.zeros(2, dtype=torch.int64, device=device)  # all, those that are no near-ties
        self.union = {target: torch.zeros((), device=device) for target in self.groups}
        self.units = self.steps = 0

    def look(self, t: int) -> None:
        """After the step that ended at position t."""
        self.steps += 1
        for target, keys in self.groups.items():
            got = bits(torch.stack([self.engine.core.selections[key].row_bits for key in keys]), self.n_rows)
            wrong = got != self.chosen[target][:, :, t]
            margin = torch.where(wrong, self.margin[target][:, :, t], 0.0)
            self.differing += torch.stack([wrong.sum(), (margin >= NEAR).sum()])
            self.units += got.numel()
            self.union[target] += got.any(1).float().mean()
            places = self.order[target][:, None] + t * len(self.in_order)
            place, layer = torch.where(wrong.any(-1), places, math.inf).min(0)  # (B,)
            here = torch.stack([margin.amax(-1), self.off[target][:, :, t, 0]]).gather(1, layer.repeat(2, 1, 1))
            now = torch.cat([place[:, None], here[:, 0].T], 1)
            self.first = torch.where((place < self.first[:, 0])[:, None], now, self.first)

    def found(self, start: int) -> list[dict[str, Any]]:
        """Where each row parted. `start` is the number of the first row."""
        result: list[dict[str, Any]] = []
        for row, (place, margin, off) in enumerate(self.first.tolist(), start):
            if place < math.inf:
                t, (layer, target) = int(place) // len(self.in_order), self.in_order[int(place) % len(self.in_order)]
                where = {"row": row, "position": t, "layer": layer, "target": target}
                result.append(where | {"margin": margin, "fp32_is_off": off})
        return result


@torch.no_grad()
def compare_sets(model: Any, bundle: Bundle, rows: list[list[int]], batch: int, look_ahead: str) -> dict[str, Any]:
    """Sets and nats of the engine against mask, teacher-forced from position 0."""
    engine = DecodeEngine(
        model, bundle, EngineOptions(batch=batch, context=len(rows[0]), crossover=False, look_ahead=look_ahead)
    )
    selector, means = Watching(bundle, model), bundle.head_means(model.device)
    wide, wide_means = copy.deepcopy(model).double(), {layer: mean.double() for layer, mean in means.items()}
    parts: list[Partings] = []
    partings: list[dict[str, Any]] = []
    nats, farthest = {"mask": 0.0, "engine": 0.0}, 0.0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        ids = torch.tensor(part, device=model.device)
        with masking(model, selector, means=means):
            logits = model(ids).logits
        exact = Exact(selector)
        with masking(wide, exact, means=wide_means):
            wide(ids)
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        nats["mask"] += nll.double().sum().item()
        engine.begin([Row(row, len(row), number=b) for b, row in enumerate(part)], score=True)
        watch = Partings(engine, selector, exact, len(part))
        for t in range(len(part[0]) - 1):
            engine.step("greedy", True)
            watch.look(t)
        partings += watch.found(start)
        parts.append(watch)
        watch.chosen, watch.margin, watch.off = {}, {}, {}
        engine_nll = engine.state.nll[: len(part), 1 : len(part[0])]
        nats["engine"] += engine_nll.double().sum().item()
        farthest = max(farthest, (engine_nll - nll).abs().max().item())
    n = sum(len(row) - 1 for row in rows)
    far = [parting for parting in partings if parting["margin"] >= NEAR]
    whole = [watch for watch in parts if watch.full]
    unions = {target: sum(float(w.union[target]) / w.steps for w in whole) / len(whole) for target in parts[0].groups}
    expected = {
        target: sum(engine.plan.half(*key).union for key in keys) / len(keys)
        for target, keys in parts[0].groups.items()
    }
    return {
        "tokens": n,
        "perplexity_mask": math.exp(nats["mask"] / n),
        "perplexity_engine": math.exp(nats["engine"] / n),
        "perplexity_difference_percent": 100 * (math.exp((nats["engine"] - nats["mask"]) / n) - 1),
        "units_that_differ": sum(int(watch.differing[0]) for watch in parts),
        "of_them_farther_than_near_from_the_threshold": sum(int(watch.differing[1]) for watch in parts),
        "rows": len(rows),
        "rows_that_part": len(partings),
        "of_them_by_more_than_a_near_tie": len(far),
        f"of_these_by_more_than_{NOISE}_times_what_fp32_is_off": sum(
            p["margin"] > NOISE * p["fp32_is_off"] for p in far
        ),
        "partings_by_more_than_a_near_tie": far,
        "near": NEAR,
        "units_compared": sum(watch.units for watch in parts),
        "largest_difference_of_a_token_nats": farthest,
        **{f"union_{target}_of_{batch}_rows": value for target, value in unions.items()},
        **{f"union_{target}_expected": value for target, value in expected.items()},
    }


@torch.no_grad()
def compare_half(model: Any, bundle: Bundle, rows: list[list[int]], batch: int, look_ahead: str) -> dict[str, Any]:
    """Perplexities of the engine in fp16 and of the fp32 model that it stands for, dense and by the bundle."""
    result: dict[str, Any] = {"tokens": sum(len(row) - 1 for row in rows)}
    for name, used in (("dense", None), ("sparse", bundle)):
        engine = DecodeEngine(
            model,
            used,
            EngineOptions(
                batch=batch, context=len(rows[0]), dtype=torch.float16, crossover=False, look_ahead=look_ahead
            ),
        )
        half = single = 0.0
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            engine.begin([Row(row, len(row), number=b) for b, row in enumerate(part)], score=True)
            for _ in range(len(part[0]) - 1):
                engine.step("greedy", True)
            half += engine.state.nll[: len(part), 1 : len(part[0])].double().sum().item()
            ids = torch.tensor(part, device=model.device)
            with masking(model, Given({}) if used is None else Predicted(used, model.device, model),
                         means=None if used is None else used.head_means(model.device)):  # fmt: skip
                logits = model(ids).logits[:, :-1].transpose(1, 2)
            single += torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="sum").double().item()
        n = result["tokens"]
        result[f"perplexity_{name}_fp16_engine"] = math.exp(half / n)
        result[f"perplexity_{name}_fp32"] = math.exp(single / n)
        result[f"{name}_difference_percent"] = 100 * math.expm1((half - single) / n)
    return result


@torch.no_grad()
def compare_tokens(
    model: Any, bundle: Bundle, prompts: list[list[int]], n: int, device: str, look_ahead: str = "fused"
) -> dict[str, Any]:
    """n greedy tokens of the engine for each prompt against what gather on `device` chooses after each of them."""
    engine = DecodeEngine(model, bundle, EngineOptions(crossover=False, look_ahead=look_ahead))
    tie = HALF_TIE if engine.weights.packed else TIE
    generated = [engine.generate([prompt], n, stop_tokens=())[0] for prompt in prompts]
    model = copy.deepcopy(model).to(device)
    lost, differ = [], []  # by token: what the engine's lacks to gather's best logit, whether it is another one
    for prompt, engine_tokens in zip(prompts, generated, strict=True):
        gather = SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=len(prompt))
        cache = gather.new_cache()
        for given, token in zip([prompt, *([token] for token in engine_tokens)], engine_tokens, strict=False):
            logits = gather(torch.tensor([given], device=model.device), past_key_values=cache).logits[0, -1]
            lost.append(logits.max() - logits[token])
            differ.append(logits.argmax() != token)
    wrong = torch.stack(differ)
    return {
        "prompts": len(prompts),
        "tokens": len(wrong),
        "different_tokens": len({token for engine_tokens in generated for token in engine_tokens}),
        "that_differ": int(wrong.sum()),
        "of_them_by_more_than_a_tie": int((torch.stack(lost)[wrong] >= tie).sum()),
        "largest_loss_of_a_logit": torch.stack(lost).max().item(),
        "tie": tie,
    }


@torch.no_grad()
def compare_replay(model: Any, bundle: Bundle, rows: list[list[int]], n: int, look_ahead: str) -> dict[str, Any]:
    """Captured steps against eager ones, with and without programmatic dependent launch, of one row and of four."""
    equal = True
    for batch in (1, 4):
        engines = [
            DecodeEngine(
                model,
                bundle,
                EngineOptions(
                    batch=batch, dtype=torch.float16, graph=graph, pdl=pdl, look_ahead=look_ahead, crossover=False
                ),
            )
            for graph, pdl in ((True, True), (False, True), (True, False))
        ]  # fmt: skip
        for prompts in ([row[:30] for row in rows[:4]], [row[:9] for row in rows[3::-1]], [rows[0][:5], rows[1][:70]]):
            tokens = [engine.generate(prompts[:batch], n, stop_tokens=()) for engine in engines]
            equal &= tokens[0] == tokens[1] == tokens[2]
            equal &= all(torch.equal(engines[0].core.x[-1], engine.core.x[-1]) for engine in engines[1:])
        ordered = engines[0].generate([row[:30] for row in rows[:batch]], 64, stop_tokens=())
        turned = engines[0].generate([row[:30] for row in rows[:batch][::-1]], 64, stop_tokens=())
        equal &= ordered == turned[::-1]
    return {"tokens": n, "rows": [1, 4], "replay_equals_eager": equal}


def adopted(bundle: Bundle, model: str) -> Bundle:
    """The bundle for weights that it was not made for."""
    return dataclasses.replace(bundle, model=model, weight_hash=weight_hash(model))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--text", nargs="*", help="text files; default: the Python files of this repository")
    parser.add_argument("--mlp-density", type=float)
    parser.add_argument("--head-density", type=float)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    parts = ["sets", "single", "half", "greedy", "prompts", "replay", "rows"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    ways = ["stream", "inline", "fused"]
    parser.add_argument("--look-ahead", default="fused", choices=ways, help="of a bundle with earlier sites")
    parser.add_argument("--adopt", action="store_true", help="a bundle of other weights")
    parser.add_argument("--batch", type=int, default=16, help="rows at once (sets, half); up to 8 with 4-bit weights")
    parser.add_argument("--gather-device", default="cuda", help="cpu: where other programs share the GPU (greedy)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load_opt(args.model, "float32", "cuda")
    bundle = Bundle.from_pretrained(args.bundle).one_stage()  # as the engine reads it
    if args.adopt:
        bundle = adopted(bundle, args.model)
    if args.mlp_density or args.head_density:
        bundle = bundle.at(args.mlp_density, args.head_density)
    root = Path(__file__).resolve().parent.parent
    files = [Path(name) for name in args.text] if args.text else sorted(root.glob("*/*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    rows = rows_of(text, load_tokenizer(args.model), args.rows, args.length)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "model": args.model, "bundle": str(args.bundle)}
    result |= made_now("kernels", "dejavu_train/engine") | {"look_ahead": args.look_ahead}
    result |= {f"density_{target}": bundle.mean_density(target) for target in bundle.targets}
    for name, run in (
        ("sets", lambda: compare_sets(model, bundle, rows, args.batch, args.look_ahead)),
        ("single", lambda: compare_sets(model, bundle, rows, 1, args.look_ahead)),
        ("half", lambda: compare_half(model, bundle, rows, args.batch, args.look_ahead)),
        ("greedy", lambda: compare_tokens(model, bundle, [rows[0][:100]], 900, args.gather_device, args.look_ahead)),
        (
            "prompts",
            lambda: compare_tokens(
                model, bundle, [row[:100] for row in rows[:18]], 50, args.gather_device, args.look_ahead
            ),
        ),
        ("replay", lambda: compare_replay(model, bundle, rows, 512, args.look_ahead)),
        ("rows", lambda: {n: compare_half(model, bundle, rows, n, args.look_ahead) for n in (2, 4, 8)}),
    ):
        if name not in args.parts:
            continue
        try:
            result[name] = run()
        except Exception as error:  # the other checks still count
            result[name] = f"failed: {type(error).__name__}: {error}"
        print(json.dumps({name: result[name]}), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
