"""Where the last word of LAMBADA's passages loses: heads layer by layer, words that the passage holds, remedies.

    python -m benchmarks.lambada --file FOLDER/tasks/lambada_openai_test.jsonl --first 100 --passages 100

Perplexity through `mask`, every token sparse unless a row says otherwise, beside the dense model on the same passages
(paired bootstrap). Of the last word: `copied` are passages whose last word stands in the passage before, `new` the
others. Of single tokens: those before the last word, and of these the ones that with the token before them are a pair
that the passage had already (what a model can copy), and the others. Appends to benchmarks/results/lambada.csv.
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
from dejavu_train.bundle.spec import tensor_name
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.evaluation.studied import StudiedOPT
from dejavu_train.models.hooks import record
from dejavu_train.models.opt import load_opt, load_tokenizer

ORACLE = "heads, the largest of each token, as many as predicted"
MEANS = "heads, those that are skipped replaced by their means over other passages"
MEANS_OF = (1000, 200)  # the first of them, and how many
TOKENS = ("tokens before the last word", "of these, pairs that stood before", "of these, other pairs")


@dataclasses.dataclass(frozen=True)
class Passage:
    """Token ids from </s> on, the first position of the last word, and whether that word stands before.

    ``repeats`` (len(ids) - 1,): of every token behind </s>, whether it stood behind the same one before.
    """

    ids: list[int]
    start: int
    copied: bool
    repeats: np.ndarray


def read_passages(path: str, tokenizer: Any, first: int, n: int) -> list[Passage]:
    """Passages ``first`` to ``first + n`` of lm-eval's ``lambada_openai``; the last word is what follows a space."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[first : first + n]:
        context, word = json.loads(line)["text"].rsplit(" ", 1)
        before = [2, *tokenizer(context, add_special_tokens=False)["input_ids"]]
        last = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        copied = word.lower() in context.lower().split()
        found.append(Passage(before + last, len(before), copied, repeated_pairs(before + last)))
    return found


def repeated_pairs(ids: Sequence[int]) -> np.ndarray:
    """(len(ids) - 1,): whether a token and the one before it stood side by side earlier.

    >>> repeated_pairs([2, 7, 8, 5, 7, 8]).tolist()
    [False, False, False, False, True]
    """
    pairs = list(zip(ids, ids[1:], strict=False))
    return np.array([pair in pairs[:i] for i, pair in enumerate(pairs)])


@torch.no_grad()
def token_nats(model: Any, passages: Sequence[Passage], from_prompt: bool = False) -> list[np.ndarray]:
    """Of each passage (len(ids) - 1,): nats of every token behind </s>."""
    found = []
    for passage in passages:
        if from_prompt:
            model.sparse_from = passage.start
        logits = model(torch.tensor([passage.ids[:-1]])).logits[0].double().log_softmax(-1)
        found.append(-logits.gather(1, torch.tensor(passage.ids[1:])[:, None])[:, 0].numpy())
    return found


def chosen_tokens(passages: Sequence[Passage]) -> dict[str, list[np.ndarray]]:
    """By kind, of each passage which of its tokens are scored."""
    last = [np.arange(1, len(p.ids)) >= p.start for p in passages]
    words = {"all": lambda p: True, "copied": lambda p: p.copied, "new": lambda p: not p.copied}
    kinds = {kind: [mine & told(p) for mine, p in zip(last, passages, strict=True)] for kind, told in words.items()}
    before = [~mine for mine in last]
    repeats = [mine & p.repeats for mine, p in zip(before, passages, strict=True)]
    others = [mine & ~p.repeats for mine, p in zip(before, passages, strict=True)]
    return kinds | dict(zip(TOKENS, (before, repeats, others), strict=True))


def dense_heads(bundle: Bundle, layers: Sequence[int]) -> Bundle:
    """The bundle with all heads of ``layers``; the others keep their thresholds."""
    return bundle.with_densities({(layer, "heads"): 1.0 for layer in layers})


@torch.no_grad()
def with_means(bundle: Bundle, model: Any, passages: Sequence[Passage]) -> Bundle:
    """The bundle with the means of the heads' outputs over ``passages``, which stand in for skipped heads."""
    sums: dict[int, torch.Tensor] = {}

    def add(layer: int, got: dict[str, torch.Tensor]) -> None:
        sums[layer] = sums.get(layer, 0) + got["head_out"][0].double().sum(0)

    with record(model, {"head_out"}, on_layer=add):
        for passage in passages:
            model.model.decoder(input_ids=torch.tensor([passage.ids]), use_cache=False)
    tokens = sum(len(passage.ids) for passage in passages)
    names = {tensor_name(layer, "heads", "mean"): total / tokens for layer, total in sums.items()}
    tensors = dict(bundle.tensors)
    tensors |= {name: mean.reshape(tensors[name].shape).to(tensors[name]) for name, mean in names.items()}
    return dataclasses.replace(bundle, tensors=tensors)


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
    made[ORACLE] = made[MEANS] = (heads, False)
    return made


def append_losses(
    args: argparse.Namespace,
    name: str,
    used: Bundle,
    nats: Sequence[np.ndarray],
    dense: Sequence[np.ndarray],
    kinds: dict[str, list[np.ndarray]],
) -> None:
    """Rows of a variant to ``args.output``: by kind of token the perplexity of ``nats`` beside that of ``dense``."""
    for kind, tokens in kinds.items():
        mine = [i for i, chosen in enumerate(tokens) if chosen.any()]
        sums = [np.array([part[i][tokens[i]].sum() for i in mine]) for part in (nats, dense)]
        units = [int(tokens[i].sum()) if kind in TOKENS else 1 for i in mine]
        change, error = increase(*sums, units)
        row = {"first": args.first, "variant": name, "last words": kind, "passages": len(mine)}
        row |= {"mlp_density": used.mean_density("mlp"), "head_density": used.mean_density("heads")}
        of = [math.exp(part.sum() / sum(units)) for part in sums]
        row |= dict(zip(("perplexity", "dense"), of, strict=True))
        row |= {"increase": change, "error": error, "torch": torch.__version__, "commit": commit()}
        row |= {"date": datetime.date.today().isoformat()}
        append_row(args.output, five_digits(row), list(row))
        told = f"{100 * change:+.1f} ± {100 * (error or 0):.1f} %"
        print(f"{name}, {kind}: {row['perplexity']:.1f}, {told}", flush=True)


def options(description: str | None) -> argparse.ArgumentParser:
    """What this script and ``lambada_heads`` take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="lambada_openai_test.jsonl")
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/demo/bundle")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--passages", type=int, default=100)
    parser.add_argument("--output", default="benchmarks/results/lambada.csv")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of variants; none: all")
    args = parser.parse_args(argv)
    model, bundle = load_opt(args.model), Bundle.from_pretrained(args.bundle)
    bundle.check_model(args.model)
    tokenizer = load_tokenizer(args.model)
    passages = read_passages(args.file, tokenizer, args.first, args.passages)
    dense, kinds = token_nats(model, passages), chosen_tokens(passages)
    for name, (used, from_prompt) in variants(bundle).items():
        if args.only and name not in args.only:
            continue
        if name == MEANS:
            used = with_means(used, model, read_passages(args.file, tokenizer, *MEANS_OF))
        studied = StudiedOPT.study(model, used, "oracle" if name == ORACLE else "predicted")
        nats = token_nats(studied, passages, from_prompt)
        append_losses(args, name, used, nats, dense, kinds)


if __name__ == "__main__":
    main()
