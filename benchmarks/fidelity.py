"""Shows on a GPU that the fast way computes what the references do, with a real model and bundle, in fp32.

1. Token by token through the engine, 16 rows at once and one by one: the same sets as `mask` (near-ties counted apart)
   and its perplexity. What fp32 itself is worth at a token is measured: the pass of `mask` in fp64 with the same sets.
2. Greedy tokens of the engine equal those of `gather` (but where two logits differ by less than 1e-4). `gather` reads
   the engine's tokens one by one, so a near-tie does not end the comparison.
3. Graph replay equals eager over 512 tokens, across prompts, row orders and a reset, bit for bit (fp16).

    python -m benchmarks.fidelity --model checkpoints/opt-mini --bundle FOLDER
"""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu_train.bundle import Bundle
from dejavu_train.decode import DecodeEngine
from dejavu_train.mask import masking
from dejavu_train.opt_model import load_opt, load_tokenizer
from dejavu_train.selections import Given, Predicted
from dejavu_train.sparse_model import SparseOPTForCausalLM

NEAR = 1e-3  # distance of a logit to its threshold below which rounding in another order may decide
NOISE = 4  # times what `mask` in fp32 is off its fp64 at the same token: the same, where the model amplifies rounding
TIE = 1e-4  # distance of two logits of the vocabulary below which either token may be chosen


def rows_of(text: str, tokenizer: Any, n_rows: int, length: int) -> list[list[int]]:
    """n_rows windows of `length` tokens, each led by </s>."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    step = length - 1
    if len(ids) < n_rows * step:
        raise SystemExit(f"error: the text has {len(ids)} tokens, {n_rows * step} are needed; give a longer --text")
    return [[2, *ids[i * step : (i + 1) * step]] for i in range(n_rows)]


def bits(words: Tensor, n_rows: int) -> Tensor:
    """(n) int32 with a bit a row -> (B, n) bool."""
    shifts = torch.arange(n_rows, device=words.device)
    return ((words[None].long() >> shifts[:, None]) & 1).bool()


class Watching(Predicted):
    """Selections of the bundle; keeps by (layer, target), as (B, T, n): `chosen`; `margin`, how far each logit lies
    from its threshold, or a cascade's score from its bar where that is nearer; `values`, the logits."""

    def __init__(self, bundle: Bundle, model: Any) -> None:
        super().__init__(bundle, model.device, model)
        self.chosen: dict[tuple[int, str], Tensor] = {}
        self.margin: dict[tuple[int, str], Tensor] = {}
        self.values: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Any) -> Tensor | None:
        keep, entry = super().__call__(layer, target, sites), self.bundle.entries.get((layer, target))
        if keep is not None and entry is not None:
            logits = self.predictors[layer, target](sites[entry.site, entry.site_layer].float())
            margin = (logits - (entry.threshold or 0.0)).abs()
            if target == "mlp" and layer in self._tests:
                test = self._tests[layer]
                margin = torch.minimum(margin, (test.scores(sites["mlp_in", layer]) - test.bar).abs())
            self.chosen[layer, target], self.margin[layer, target] = keep, margin
            self.values[layer, target] = logits
        return keep


class Exact(Given):
    """The sets that `watched` chose, for a model in fp64; keeps by (layer, target) how far the largest of the watched
    logits is off at a token: (B, T, 1)."""

    def __init__(self, watched: Watching) -> None:
        super().__init__(watched.chosen)
        self.watched, self.sites = watched, frozenset(watched.sites)
        self.predictors = {key: copy.deepcopy(made).double() for key, made in watched.predictors.items()}
        self.off: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Any) -> Tensor | None:
        keep, entry = super().__call__(layer, target, sites), self.watched.bundle.entries.get((layer, target))
        if keep is not None and entry is not None:
            logits = self.predictors[layer, target](sites[entry.site, entry.site_layer])
            self.off[layer, target] = (logits - self.watched.values[layer, target]).abs().amax(-1, keepdim=True)
        return keep

    def fc1(self, layer: int) -> Any:
        return self.watched.fc1(layer)


@torch.no_grad()
def compare_sets(model: Any, bundle: Bundle, rows: list[list[int]], batch: int) -> dict[str, Any]:
    """Sets and nats of the engine against mask, teacher-forced from position 0."""
    engine = DecodeEngine(model, bundle, batch=batch, context=len(rows[0]), crossover=False)
    selector, means = Watching(bundle, model), bundle.head_means(model.device)
    wide, wide_means = copy.deepcopy(model).double(), {layer: mean.double() for layer, mean in means.items()}
    # All that differ, and those that are no near-ties.
    differing, units = torch.zeros(2, dtype=torch.int64, device=model.device), 0
    in_order = sorted(engine.predictors, key=lambda key: (key[0], key[1] == "mlp"))
    union = {target: [torch.zeros((), device=model.device), 0.0, 0] for target in ("mlp", "heads")}
    nats = {"mask": 0.0, "engine": 0.0}
    farthest = 0.0
    partings: list[dict[str, Any]] = []
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
        engine.begin(part, [len(part[0])] * len(part), [0] * len(part), [0] * len(part), _greedy())
        engine.core.tail("greedy", True)
        # Of each row's first difference: its place, the farthest unit's margin, what fp32 is off there. After it the
        # row is another one: what differs later is no evidence.
        parted = torch.full((len(part), 3), -1.0, dtype=torch.float64, device=model.device)
        for t in range(len(part[0]) - 1):
            engine.step("greedy", True)
            for place, key in enumerate(in_order, t * len(in_order)):
                selection = engine.core.selections[key]
                got, expected = bits(selection.row_bits, len(part)), selector.chosen[key][:, t]
                wrong = got != expected
                margin = torch.where(wrong, selector.margin[key][:, t], 0.0).amax(1).double()
                differing += torch.stack([wrong.sum(), (wrong & (selector.margin[key][:, t] >= NEAR)).sum()])
                now = torch.stack([torch.full_like(margin, place), margin, exact.off[key][:, t, 0]], 1)
                parted = torch.where((wrong.any(1) & (parted[:, 0] < 0))[:, None], now, parted)
                units += got.numel()
                if len(part) == batch:
                    sums = union[key[1]]  # measured, expected, counted
                    sums[0] += got.any(0).float().mean()
                    sums[1] += engine.forms[key].union
                    sums[2] += 1
        for row, (place, margin, off) in enumerate(parted.tolist(), start):
            if place >= 0:
                t, key = int(place) // len(in_order), in_order[int(place) % len(in_order)]
                where = {"row": row, "position": t, "layer": key[0], "target": key[1]}
                partings.append(where | {"margin": margin, "fp32_is_off": off})
        mine = engine.state.nll[: len(part), 1:]
        nats["engine"] += mine.double().sum().item()
        farthest = max(farthest, (mine - nll).abs().max().item())
    n = sum(len(row) - 1 for row in rows)
    density = {
        target: sum(e.density for e in bundle.entries.values() if e.target == target) / bundle.shape.n_layers
        for target in bundle.targets
    }
    far = [parting for parting in partings if parting["margin"] >= NEAR]
    return {
        "tokens": n,
        "perplexity_mask": math.exp(nats["mask"] / n),
        "perplexity_engine": math.exp(nats["engine"] / n),
        "perplexity_difference_percent": 100 * (math.exp((nats["engine"] - nats["mask"]) / n) - 1),
        "units_that_differ": int(differing[0]),
        "of_them_farther_than_near_from_the_threshold": int(differing[1]),
        "rows": len(rows),
        "rows_that_part": len(partings),
        "of_them_by_more_than_a_near_tie": len(far),
        f"of_these_by_more_than_{NOISE}_times_what_fp32_is_off": sum(
            p["margin"] > NOISE * p["fp32_is_off"] for p in far
        ),
        "partings_by_more_than_a_near_tie": far,
        "near": NEAR,
        "units_compared": units,
        "largest_difference_of_a_token_nats": farthest,
        **{f"density_{target}": value for target, value in density.items()},
        **{f"union_{name}_of_{batch}_rows": float(a) / n for name, (a, _, n) in union.items() if n},
        **{f"union_{name}_expected": b / n for name, (_, b, n) in union.items() if n},
    }


def _greedy() -> Any:
    from dejavu_train.decode import Sampling

    return Sampling()


@torch.no_grad()
def compare_tokens(model: Any, bundle: Bundle, prompt: list[int], n: int, device: str) -> dict[str, Any]:
    """Greedy tokens of the engine against what gather on `device`, given the engine's tokens one by one, chooses."""
    mine = DecodeEngine(model, bundle, crossover=False).generate([prompt], n, stop_tokens=())[0]
    model = copy.deepcopy(model).to(device)
    gather = SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=len(prompt))
    cache, logits = gather.new_cache(), []
    for given in [prompt, *([token] for token in mine[:-1])]:
        ids = torch.tensor([given], device=model.device)
        logits.append(gather(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1])
    best, choices = torch.stack(logits).max(-1)
    tokens = torch.tensor(mine, device=model.device)
    lost = best - torch.stack(logits).gather(1, tokens[:, None])[:, 0]  # what the engine's token lacks to the best
    different = (choices != tokens).nonzero().flatten().tolist()
    return {
        "tokens": n,
        "different_tokens": len(tokens.unique()),
        "that_differ": len(different),
        "of_them_by_more_than_a_tie": int((lost >= TIE).sum()),
        "first_difference": different[0] if different else None,
        "gather_margin_there": lost[different[0]].item() if different else None,
        "tie": TIE,
    }


@torch.no_grad()
def compare_replay(model: Any, bundle: Bundle, rows: list[list[int]], n: int) -> dict[str, bool]:
    """Captured steps against eager ones, with and without programmatic dependent launch."""
    equal = True
    for dtype in (torch.float16,):
        engines = [
            DecodeEngine(model, bundle, batch=4, dtype=dtype, graph=graph, pdl=pdl, crossover=False)
            for graph, pdl in ((True, True), (False, True), (True, False))
        ]
        for prompts in ([row[:30] for row in rows[:4]], [row[:9] for row in rows[3::-1]], [rows[0][:5], rows[1][:70]]):
            made = [engine.generate(prompts, n, stop_tokens=()) for engine in engines]
            equal &= made[0] == made[1] == made[2]
            equal &= all(torch.equal(engines[0].core.logits, engine.core.logits) for engine in engines[1:])
        ordered = engines[0].generate([row[:30] for row in rows[:4]], 64, stop_tokens=())
        turned = engines[0].generate([row[:30] for row in rows[3::-1]], 64, stop_tokens=())
        equal &= ordered == turned[::-1]
    return {"tokens": n, "replay_equals_eager": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--text", nargs="*", help="text files; default: the Python files of this repository")
    parser.add_argument("--mlp-density", type=float)
    parser.add_argument("--head-density", type=float)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    parts = ["sets", "single", "greedy", "replay"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--gather-device", default="cuda", help="cpu: where other programs share the GPU (greedy)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load_opt(args.model, "float32", "cuda")
    bundle = Bundle.from_pretrained(args.bundle)
    if args.mlp_density or args.head_density:
        bundle = bundle.at(args.mlp_density, args.head_density)
    root = Path(__file__).resolve().parent.parent
    files = [Path(name) for name in args.text] if args.text else sorted(root.glob("*/*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    rows = rows_of(text, load_tokenizer(args.model), args.rows, args.length)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "model": args.model, "bundle": str(args.bundle)}
    for name, run in (
        ("sets", lambda: compare_sets(model, bundle, rows, 16)),
        ("single", lambda: compare_sets(model, bundle, rows, 1)),
        ("greedy", lambda: compare_tokens(model, bundle, rows[0][:100], 900, args.gather_device)),
        ("replay", lambda: compare_replay(model, bundle, rows, 512)),
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
