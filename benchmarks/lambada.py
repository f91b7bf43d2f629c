"""Where the last word of LAMBADA's passages loses: heads layer by layer, words that the passage holds, remedies.

    python -m benchmarks.lambada --file FOLDER/tasks/lambada_openai_test.jsonl --first 100 --passages 100

Perplexity of the last word through `mask`, every token sparse unless a row says otherwise, beside the dense model on
the same passages (paired bootstrap). `copied` are passages whose last word stands in the passage before, `new` the
others. Appends to benchmarks/results/lambada.csv.
"""

import argparse
import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.models.opt import load_opt, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM


@dataclasses.dataclass(frozen=True)
class Passage:
    """Token ids from </s> on, the first position of the last word, and whether that word stands before."""

    ids: list[int]
    start: int
    copied: bool


def read_passages(path: str, tokenizer: Any, first: int, n: int) -> list[Passage]:
    """Passages ``first`` to ``first + n`` of lm-eval's ``lambada_openai``; the last word is what follows a space."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[first : first + n]:
        context, word = json.loads(line)["text"].rsplit(" ", 1)
        before = [2, *tokenizer(context, add_special_tokens=False)["input_ids"]]
        last = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        found.append(Passage(before + last, len(before), word.lower() in context.lower().split()))
    return found


@torch.no_grad()
def last_word_nats(model: Any, passages: Sequence[Passage], from_prompt: bool = False) -> np.ndarray:
    """(passages,): of each last word."""
    nats = []
    for passage in passages:
        if from_prompt:
            model.sparse_from = passage.start
        logits = model(torch.tensor([passage.ids[:-1]])).logits[0, passage.start - 1 :].double().log_softmax(-1)
        wanted = torch.tensor(passage.ids[passage.start :])
        nats.append(-float(logits.gather(1, wanted[:, None]).sum()))
    return np.array(nats)


def dense_heads(bundle: Bundle, layers: Sequence[int]) -> Bundle:
    """The bundle with all heads of ``layers``; the others keep their thresholds."""
    return bundle.with_densities({(layer, "heads"): 1.0 for layer in layers})


def variants(bundle: Bundle) -> dict[str, tuple[Bundle, bool]]:
    """By name, the bundle and whether passages are dense up to the last word."""
    both, heads, mlps = bundle.at(0.2, 0.85), bundle.at(1.0, 0.85), bundle.at(0.2, 1.0)
    made = {"both": (both, False), "heads": (heads, False), "mlps": (mlps, False)}
    sparse = [layer for (layer, target), spec in both.specs.items() if target == "heads" and not spec.dense]
    for layer in sparse:
        made[f"heads of layer {layer} alone"] = (dense_heads(heads, [i for i in sparse if i != layer]), False)
    for layer in sparse:
        made[f"both, dense heads in layer {layer}"] = (dense_heads(both, [layer]), False)
    last = sparse[-1], "heads"
    kept = dataclasses.replace(bundle.specs[last], keep_dense=True)
    elsewhere = dataclasses.replace(bundle, specs=bundle.specs | {last: kept}).at(0.2, 0.85)
    made[f"both, dense heads in layer {last[0]}, the others fewer"] = (elsewhere, False)
    for density in (0.9, 0.95):
        made[f"both, {density:.0%} of the heads"] = (bundle.at(0.2, density), False)
    made["both, passage dense (sparse_from prompt)"] = (both, True)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="lambada_openai_test.jsonl")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/demo/bundle")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--passages", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=[], help="names of variants; none: all")
    parser.add_argument("--output", default="benchmarks/results/lambada.csv")
    args = parser.parse_args(argv)
    model, bundle = load_opt(args.model), Bundle.from_pretrained(args.bundle)
    bundle.check_model(args.model)
    passages = read_passages(args.file, load_tokenizer(args.model), args.first, args.passages)
    dense = last_word_nats(model, passages)
    copied = np.array([passage.copied for passage in passages])
    date, at = datetime.date.today().isoformat(), commit()
    for name, (used, from_prompt) in variants(bundle).items():
        if args.only and name not in args.only:
            continue
        nats = last_word_nats(SparseOPTForCausalLM.from_model(model, used, "mask"), passages, from_prompt)
        for kind, mine in (("all", copied | ~copied), ("copied", copied), ("new", ~copied)):
            change, error = increase(nats[mine], dense[mine], [1] * int(mine.sum()))
            row = {"first": args.first, "variant": name, "last words": kind, "passages": int(mine.sum())}
            row |= {"mlp_density": used.mean_density("mlp"), "head_density": used.mean_density("heads")}
            row |= {"perplexity": math.exp(nats[mine].mean()), "dense": math.exp(dense[mine].mean())}
            row |= {"increase": change, "error": error, "torch": torch.__version__, "commit": at, "date": date}
            append_row(args.output, five_digits(row), list(row))
            told = f"{100 * change:+.1f} ± {100 * (error or 0):.1f} %"
            print(f"{name}, {kind}: {row['perplexity']:.1f}, {told}", flush=True)


if __name__ == "__main__":
    main()
