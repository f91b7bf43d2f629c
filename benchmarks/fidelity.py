"""Shows on a GPU that the fast way computes what the references do, with a real model and bundle, in fp32.

1. Token by token through the engine, 16 rows at once and one by one: the same sets as `mask` (near-ties counted apart)
   and its perplexity.
2. Greedy tokens of the engine equal those of `gather` (but where the two best logits differ by less than 1e-4).
3. Graph replay equals eager over 512 tokens, across prompts, row orders and a reset, bit for bit (fp16).

    python -m benchmarks.fidelity --model checkpoints/opt-mini --bundle FOLDER
"""

import argparse
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
from dejavu_train.selections import Predicted
from dejavu_train.sparse_model import SparseOPTForCausalLM

NEAR = 1e-3  # distance of a logit to its threshold below which rounding in another order may decide


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
    """Selections of the bundle; keeps, as (B, T, n) bool by (layer, target), what was chosen and what was a near-tie: a
    logit within NEAR of its threshold, or a cascade's score within NEAR of its bar."""

    def __init__(self, bundle: Bundle, model: Any) -> None:
        super().__init__(bundle, model.device, model)
        self.chosen: dict[tuple[int, str], Tensor] = {}
        self.near: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, target: str, sites: Any) -> Tensor | None:
        keep, entry = super().__call__(layer, target, sites), self.bundle.entries.get((layer, target))
        if keep is not None and entry is not None:
            logits = self.predictors[layer, target](sites[entry.site, entry.site_layer].float())
            near = (logits - (entry.threshold or 0.0)).abs() < NEAR
            if target == "mlp" and layer in self._tests:
                test = self._tests[layer]
                near |= (test.scores(sites["mlp_in", layer]) - test.bar).abs() < NEAR
            self.chosen[layer, target], self.near[layer, target] = keep, near
        return keep


@torch.no_grad()
def compare_sets(model: Any, bundle: Bundle, rows: list[list[int]], batch: int) -> dict[str, float]:
    """Sets and nats of the engine against mask, teacher-forced from position 0."""
    engine = DecodeEngine(model, bundle, batch=batch, context=len(rows[0]), crossover=False)
    selector, means = Watching(bundle, model), bundle.head_means(model.device)
    # All, those that are no near-ties, rows that part from mask's, and rows that part from it by more than a near-tie.
    # After its first difference a row is another one: what differs later is no evidence.
    differing, units = torch.zeros(4, dtype=torch.int64, device=model.device), 0
    in_order = sorted(engine.predictors, key=lambda key: (key[0], key[1] == "mlp"))
    union = {target: [torch.zeros((), device=model.device), 0.0, 0] for target in ("mlp", "heads")}
    nats = {"mask": 0.0, "engine": 0.0}
    farthest = 0.0
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        ids = torch.tensor(part, device=model.device)
        with masking(model, selector, means=means):
            logits = model(ids).logits
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        nats["mask"] += nll.double().sum().item()
        engine.begin(part, [len(part[0])] * len(part), [0] * len(part), [0] * len(part), _greedy())
        engine.core.tail("greedy", True)
        parted = torch.zeros(len(part), dtype=torch.bool, device=model.device)
        for t in range(len(part[0]) - 1):
            engine.step("greedy", True)
            for key in in_order:
                selection = engine.core.selections[key]
                got, expected = bits(selection.row_bits, len(part)), selector.chosen[key][:, t]
                wrong = got != expected
                far = wrong & ~selector.near[key][:, t]
                first = wrong.any(1) & ~parted
                differing += torch.stack([wrong.sum(), far.sum(), first.sum(), (first & far.any(1)).sum()])
                parted |= first
                units += got.numel()
                if len(part) == batch:
                    sums = union[key[1]]  # measured, expected, counted
                    sums[0] += got.any(0).float().mean()
                    sums[1] += engine.forms[key].union
                    sums[2] += 1
        mine = engine.state.nll[: len(part), 1:]
        nats["engine"] += mine.double().sum().item()
        farthest = max(farthest, (mine - nll).abs().max().item())
    n = sum(len(row) - 1 for row in rows)
    density = {
        target: sum(e.density for e in bundle.entries.values() if e.target == target) / bundle.shape.n_layers
        for target in bundle.targets
    }
    return {
        "tokens": n,
        "perplexity_mask": math.exp(nats["mask"] / n),
        "perplexity_engine": math.exp(nats["engine"] / n),
        "perplexity_difference_percent": 100 * (math.exp((nats["engine"] - nats["mask"]) / n) - 1),
        "units_that_differ": int(differing[0]),
        "of_them_farther_than_near_from_the_threshold": int(differing[1]),
        "rows": len(rows),
        "rows_that_part": int(differing[2]),
        "of_them_by_more_than_a_near_tie": int(differing[3]),
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
def compare_tokens(model: Any, bundle: Bundle, prompt: list[int], n: int) -> dict[str, Any]:
    """Greedy tokens of the engine against gather's."""
    engine = DecodeEngine(model, bundle, crossover=False)
    mine = engine.generate([prompt], n, stop_tokens=())[0]
    gather = SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=len(prompt))
    ids = torch.tensor([prompt], device=model.device)
    out = gather.generate(
        ids, max_new_tokens=n, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    theirs = out.sequences[0, len(prompt) :].tolist()
    first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    margin = None
    if first is not None:
        best = out.logits[first][0].topk(2).values
        margin = (best[0] - best[1]).item()
    return {"tokens": n, "first_difference": first, "gather_margin_there": margin}


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
        ("greedy", lambda: compare_tokens(model, bundle, rows[0][:100], 900)),
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
