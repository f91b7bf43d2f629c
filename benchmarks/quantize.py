"""Scores 4-bit weights: round to nearest and GPTQ, alone and with the sparse model, against whole-block bytes.

    python -m benchmarks.quantize report --weights rtn=FOLDER gptq=FOLDER

Rows go to docs/results/frontier/int4.csv. Texts are those that `benchmarks/texts.py prepare` writes. `kl` is the mean
divergence of the next-token distributions from those of the fp16 weights, in nats. `increase` is that of log
perplexity, in nats, its `error` a paired bootstrap over documents. Bytes are what a token reads of a decoder block,
scales and predictors included, over the bytes of its matrices in fp16. Of the
attention the selected heads count, of fc1 the selected neurons, of fc2 those that are active besides. Sparse rows have
no second stage.
"""

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.rows import SCORE, append_row, command_line, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalSetting, evaluate, hold_out
from dejavu_train.extras.evidence.quality import score
from dejavu_train.extras.evidence.variants import Variant
from dejavu_train.families import ModelDims, Target, UnitKey, dims_of
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.int4_sizes import part_sizes
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device
from dejavu_train.predictors.metrics import SelectionSums
from dejavu_train.sparse.masked import masking

WINDOW = 512
TEXTS = "docs,readmes,licences,general,books,wikitext,code"
DENSITIES = ("0.08/1", "0.1/1", "0.2/1", "0.1/0.85", "0.2/0.85")
ALL = (1.0, 1.0)
Sums = Mapping[UnitKey, SelectionSums]


def block_bytes(shape: ModelDims, bundle: Bundle | None, sums: Sums, four_bits: bool) -> tuple[float, float, float]:
    """Shares: of the bytes of fp16 blocks what was read, and of neurons and heads what was selected.

    sums: of what was selected. A layer and target without sums runs whole.
    """
    sizes = part_sizes(shape)
    d, n = shape.d_model, shape.d_ffn
    plain = {part: 2 * (d * n if part in ("up", "down") else d * d) for part in sizes}
    cost = {part: size.nbytes if four_bits else plain[part] for part, size in sizes.items()}
    read, neurons, heads = 0.0, 0.0, 0.0
    for layer in range(shape.n_layers):
        mlp, of_heads = (sums.get(UnitKey(layer, target)) for target in (Target.MLP, Target.HEADS))
        heads_share = 1.0 if of_heads is None else of_heads.density
        mlp_share, hit = (1.0, 1.0) if mlp is None else (mlp.density, mlp.density * mlp.precision)
        read += sum(cost[part] for part in sizes if part not in ("up", "down")) * heads_share
        read += cost["up"] * mlp_share + cost["down"] * hit
        neurons, heads = neurons + mlp_share, heads + heads_share
    if bundle is not None:
        read += sum(predictor_bytes(spec) for spec in bundle.specs.values() if not spec.dense)
    return read / (shape.n_layers * sum(plain.values())), neurons / shape.n_layers, heads / shape.n_layers


def scored(
    dense: Any, model: Any, bundle: Bundle, corpus: EvalCorpus, asked: tuple[float, float], batch_tokens: int
) -> tuple[dict[str, Any], Sums]:
    """How far a model lies from the dense one in fp16, and what the bundle selects of it at these densities."""
    context, sums = contextlib.nullcontext, {}
    if asked != ALL:
        (found,) = evaluate(model, bundle, corpus, [EvalSetting("predicted", *asked)], batch_tokens)
        selector = PredictorSelector(bundle.at(*asked), model.device, model)
        context, sums = partial(masking, model, selector, means=bundle.head_means(model.device)), found.sums
    return score(Variant(dense), Variant(model, context), corpus, batch_tokens), sums


def report(options: argparse.Namespace) -> None:
    """Rows of every text: fp16 and each of the weights, dense and with what the predictors select."""
    bundle = Bundle.from_pretrained(options.bundle)
    tokenizer, device = load_tokenizer(options.model), resolve_device(options.device)
    folders = {"fp16": options.model, **options.weights}
    models = {name: load_model(folder, device=device) for name, folder in folders.items()}
    shape = dims_of(models["fp16"].config)
    shared = made_now(*SCORE) | {
        "model": Path(options.model).name, "what": "report", "seed": options.seed,
        "versions": f"torch {torch.__version__}; transformers {transformers.__version__}",
    }  # fmt: skip
    for text in options.texts.split(","):
        documents = load_documents(TextSource(source=f"{options.data}/{text}.jsonl"))[0]
        corpus = hold_out(documents, tokenizer, WINDOW, options.tokens)
        sparse = [name for name in models if name in ("fp16", *options.sparse.split(","))]
        pairs = [(name, ALL) for name in models] + [(name, each) for each in options.densities for name in sparse]
        for name, asked in pairs:
            found, sums = scored(models["fp16"], models[name], bundle, corpus, asked, options.batch_tokens)
            moved, error = None if asked == ALL else bundle.at(*asked), found["increase_error"]
            read, mlp, heads = block_bytes(shape, moved, sums, name != "fp16")
            row = five_digits({
                "weights": name, "predictors": "none" if moved is None else "before", "text": text,
                "documents": len(corpus.document_tokens), "tokens": corpus.tokens,
                "asked_mlp_density": asked[0], "asked_head_density": asked[1], "mlp_selected": mlp,
                "head_selected": heads, "block_bytes": read, "kl": found["kl_mean"],
                "perplexity": found["perplexity"], "increase": math.log1p(found["increase"]),
                "error": None if error is None else error / (1 + found["increase"]),
            })  # fmt: skip
            append_row(options.csv, row | shared)
            names = ("text", "weights", "asked_mlp_density", "asked_head_density", "kl", "increase", "block_bytes")
            print("  ".join(f"{name} {row[name]}" for name in names), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("command", choices=("report",))
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--bundle", default="checkpoints/opt-mini/bundle", help="predictors of the fp16 model")
    parser.add_argument("--weights", nargs="*", default=[], help="NAME=FOLDER of 4-bit weights: rtn, gptq")
    parser.add_argument("--sparse", default="gptq", help="which of the weights are also scored sparsely")
    parser.add_argument("--densities", nargs="*", default=DENSITIES, help="NEURONS/HEADS")
    parser.add_argument("--data", default=".data", help="what `benchmarks/texts.py prepare` wrote")
    parser.add_argument("--texts", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=10_000, help="of every text")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="products in TF32 on a GPU, for a large model")
    parser.add_argument("--csv", default="docs/results/frontier/int4.csv")
    options = parser.parse_args(argv)
    options.densities = [tuple(map(float, pair.split("/"))) for pair in options.densities]
    options.weights = dict(pair.split("=", 1) for pair in options.weights)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    report(options)


if __name__ == "__main__":
    raise SystemExit(exit_on_user_error(main))
