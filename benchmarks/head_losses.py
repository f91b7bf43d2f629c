"""What heads' predictors fitted to the loss of a skip change: two bundles on the same passages and texts, paired.

    python -m benchmarks.head_losses --before OLD/bundle --after NEW/bundle --text docs=docs.jsonl \\
        --passages FOLDER/tasks/lambada_openai_test.jsonl

OLD is `train.py ... --calibrate.head_loss_tokens 0`, NEW the same predictors calibrated without that flag. Through
`mask`, every token sparse. `before, 86 %` is OLD asked for more heads, so that no gain comes from reading more. Appends
to benchmarks/results/head_losses.csv, one row a text, kind of token and variant, with the densities that were measured;
the increase is over dense, `change` over OLD (both with a paired bootstrap error over documents).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lambada import TOKENS, Passage, chosen_tokens, read_passages, repeated_pairs, token_nats
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.samples import SampleManifest, decode_rows, split_rows
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.evaluation.studied import StudiedOPT
from dejavu_train.models.opt import load_opt, load_tokenizer

WINDOW = 512  # tokens of a document


def read_documents(path: str, tokenizer: Any, tokens: int, window: int) -> list[Passage]:
    """The first ``window`` tokens of documents spread over a JSONL, ``tokens`` in all; no last words."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    lines = [line for line in lines if line]
    found: list[Passage] = []
    count = max(1, tokens // window)
    for line in lines[:: max(1, len(lines) // count)][:count]:
        ids = [2, *tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"][: window - 1]]
        found.append(Passage(ids, len(ids), False, repeated_pairs(ids)))
    return found


def kinds_of(text: str, passages: Sequence[Passage]) -> dict[str, list[np.ndarray]]:
    """Which tokens are scored: of LAMBADA also last words, of other texts all tokens and repeated pairs."""
    kinds = chosen_tokens(passages)
    if text == "lambada passages":
        return kinds
    names = ("tokens", "pairs that stood before", "other pairs")
    return dict(zip(names, (kinds[kind] for kind in TOKENS), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", required=True)
    parser.add_argument("--passages", help="lambada_openai_test.jsonl")
    parser.add_argument("--first", type=int, default=300)
    parser.add_argument("--count", type=int, default=1000, help="passages")
    parser.add_argument("--text", nargs="*", action="extend", default=[], help="NAME=FILE.jsonl")
    parser.add_argument("--own", action="store_true", help="the model's own samples, those of the set val")
    parser.add_argument("--tokens", type=int, default=10_000, help="of a text")
    parser.add_argument("--mlp_density", type=float, nargs="*", default=[0.2, 1.0])
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--output", default="benchmarks/results/head_losses.csv")
    args = parser.parse_args(argv)
    model, tokenizer = load_opt(args.model), load_tokenizer(args.model)
    texts = {}
    if args.passages:
        texts["lambada passages"] = read_passages(args.passages, tokenizer, args.first, args.count)
    for named in args.text:
        name, _, path = named.partition("=")
        texts[name] = read_documents(path, tokenizer, args.tokens, WINDOW)
    if args.own:
        length = SampleManifest.load(Path(args.model)).settings["length"]
        samples = split_rows(decode_rows((Path(args.model) / "samples.xz").read_bytes(), length))["val"]
        rows = [[2, *map(int, document.ids[: length - 1])] for document in samples]
        texts["own samples"] = [Passage(ids, len(ids), False, repeated_pairs(ids)) for ids in rows]
    bundles = {name: Bundle.from_pretrained(getattr(args, name)) for name in ("before", "after")}
    asked = (("before", "before", 0.85), ("before, 86 %", "before", 0.86), ("after", "after", 0.85))
    for text, passages in texts.items():
        dense, kinds = token_nats(model, passages), kinds_of(text, passages)
        for mlp_density in args.mlp_density:
            first: list[np.ndarray] | None = None
            for name, bundle, density in asked:
                studied = StudiedOPT.study(model, bundles[bundle].at(mlp_density, density))
                nats = token_nats(studied, passages)
                first = first or nats
                shares = {"mlp": studied.density("mlp"), "heads": studied.density("heads")}
                for kind, tokens in kinds.items():
                    mine = [i for i, chosen in enumerate(tokens) if chosen.any()]
                    sums = [np.array([part[i][tokens[i]].sum() for i in mine]) for part in (nats, dense, first)]
                    words = text == "lambada passages" and kind not in TOKENS
                    units = [1 if words else int(tokens[i].sum()) for i in mine]
                    row: dict[str, Any] = {"text": text, "kind": kind, "n": sum(units), "documents": len(mine)}
                    row |= {"mlp_density": mlp_density, "variant": name, "neurons": shares["mlp"]}
                    row |= {"heads": shares["heads"], "dense": float(np.exp(sums[1].sum() / sum(units)))}
                    row |= dict(zip(("increase", "error"), increase(sums[0], sums[1], units), strict=True))
                    row |= dict(zip(("change", "change_error"), increase(sums[0], sums[2], units), strict=True))
                    row |= {"torch": torch.__version__, "commit": commit()}
                    append_row(args.output, five_digits(row), list(row))
                    print(
                        f"{text}, {kind}, neurons {mlp_density:g}, {name}: heads {shares['heads']:.4f},"
                        f" {100 * row['increase']:+.2f} ± {100 * (row['error'] or 0):.2f} %,"
                        f" to before {100 * row['change']:+.2f} ± {100 * (row['change_error'] or 0):.2f} %",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
