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
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from benchmarks.rows import SCORE, append_row, command_line, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.evaluation.perplexity import BOOTSTRAPS, EvalBatch, EvalCorpus, eval_batches, hold_out
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.int4_sizes import part_sizes
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device
from dejavu_train.sparse.masked import masking

WINDOW = 512
TEXTS = "docs,readmes,licences,general,books,wikitext,code"
DENSITIES = ("0.08/1", "0.1/1", "0.2/1", "0.1/0.85", "0.2/0.85")


@dataclasses.dataclass
class Scored:
    """Sums over a text: nats and divergences per document. read: what a token reads of a block on average, in bytes."""

    nats: np.ndarray
    kl: np.ndarray
    selected: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    hit: dict[int, float] = dataclasses.field(default_factory=dict)
    units: float = 0.0


@torch.no_grad()
def log_probabilities(model: Any, batch: EvalBatch) -> Tensor:
    """(real positions, V) fp32."""
    hidden = model.model.decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
    return F.log_softmax(model.lm_head(hidden[batch.real]).float(), dim=-1)


@torch.no_grad()
def score(
    model: Any, bundle: Bundle | None, batches: Sequence[EvalBatch], dense: Sequence[Tensor], documents: int
) -> Scored:
    """Every batch through the model, its weights as they are and, with a bundle, only what that selects."""
    total = Scored(np.zeros(documents), np.zeros(documents))
    selector = None if bundle is None else PredictorSelector(bundle, model.device)
    selected: dict[tuple[int, str], Tensor] = {}  # counts on the model's device, which is not waited for
    hit: dict[int, Tensor] = {}
    for batch, reference in zip(batches, dense, strict=True):

        def observe(layer: int, target: str, keep: Tensor | None, values: Tensor, real: Tensor = batch.real) -> None:
            if keep is not None:
                selected[layer, target] = selected.get((layer, target), 0) + keep[real].sum()
            if target == "mlp":
                active = values[real] > 0
                hit[layer] = hit.get(layer, 0) + (active if keep is None else active & keep[real]).sum()

        if selector is None:
            logs = log_probabilities(model, batch)
        else:
            with masking(model, selector, observe=observe, means=selector.bundle.head_means()):
                logs = log_probabilities(model, batch)
        targets = batch.targets[batch.real]
        nats = -logs.gather(1, targets[:, None])[:, 0].double()
        kl = (reference.exp() * (reference - logs)).sum(-1).double()
        document = np.repeat(batch.document, batch.real.sum(1).cpu().numpy())
        np.add.at(total.nats, document, nats.cpu().numpy())
        np.add.at(total.kl, document, kl.cpu().numpy())
        total.units += len(targets)
    total.selected = {key: float(count) for key, count in selected.items()}
    total.hit = {layer: float(count) for layer, count in hit.items()}
    return total


def block_bytes(shape: ModelDims, bundle: Bundle | None, scored: Scored, four_bits: bool) -> tuple[float, float, float]:
    """Shares: of the bytes of fp16 blocks what was read, and of neurons and heads what was selected."""
    sizes = part_sizes(shape)
    d, n = shape.d_model, shape.d_ffn
    plain = {part: 2 * (d * n if part in ("up", "down") else d * d) for part in sizes}
    cost = {part: size.nbytes if four_bits else plain[part] for part, size in sizes.items()}
    read, neurons, heads = 0.0, 0.0, 0.0
    for layer in range(shape.n_layers):
        kept = scored.selected.get((layer, "heads"))
        heads_share = 1.0 if kept is None else kept / scored.units / shape.n_heads
        kept = scored.selected.get((layer, "mlp"))
        mlp_share = 1.0 if kept is None else kept / scored.units / n
        hit = 1.0 if kept is None else scored.hit[layer] / scored.units / n
        read += sum(cost[part] for part in sizes if part not in ("up", "down")) * heads_share
        read += cost["up"] * mlp_share + cost["down"] * hit
        neurons, heads = neurons + mlp_share, heads + heads_share
    if bundle is not None:
        read += sum(predictor_bytes(spec) for spec in bundle.specs.values() if not spec.dense)
    return read / (shape.n_layers * sum(plain.values())), neurons / shape.n_layers, heads / shape.n_layers


def paired(difference: np.ndarray, tokens: Sequence[int]) -> tuple[float, float | None]:
    """A difference of nats per document as its mean over tokens, and its bootstrap error over documents."""
    counts = np.asarray(tokens, dtype=np.float64)
    if len(counts) < 2:
        return float(difference.sum() / counts.sum()), None
    picks = np.random.default_rng(0).integers(len(counts), size=(BOOTSTRAPS, len(counts)))
    resampled = difference[picks].sum(axis=1) / counts[picks].sum(axis=1)
    return float(difference.sum() / counts.sum()), float(resampled.std(ddof=1))


def row_of(
    options: argparse.Namespace, shape: ModelDims, text: str, corpus: EvalCorpus, weights: str,
    asked: tuple[float, float], bundle: Bundle | None, scored: Scored, dense: Scored,
) -> dict[str, Any]:  # fmt: skip
    """What was measured of a text, by some weights and what a bundle selects, beside the dense fp16 model."""
    tokens = corpus.document_tokens
    increase, error = paired(scored.nats - dense.nats, tokens)
    read, mlp, heads = block_bytes(shape, bundle, scored, weights != "fp16")
    return {
        "model": Path(options.model).name, "what": "report", "weights": weights,
        "predictors": "none" if bundle is None else "before", "text": text, "documents": len(tokens),
        "tokens": corpus.tokens, "asked_mlp_density": asked[0], "asked_head_density": asked[1],
        "mlp_selected": mlp, "head_selected": heads, "block_bytes": read, "kl": float(scored.kl.sum() / corpus.tokens),
        "perplexity": float(np.exp(scored.nats.sum() / corpus.tokens)), "increase": increase, "error": error,
        "seed": options.seed, "versions": f"torch {torch.__version__}; transformers {transformers.__version__}",
    }  # fmt: skip


def report(options: argparse.Namespace) -> None:
    """Rows of every text: fp16 and each of the weights, dense and with what the predictors select."""
    bundle = Bundle.from_pretrained(options.bundle)
    tokenizer, device = load_tokenizer(options.model), resolve_device(options.device)
    folders = {"fp16": options.model, **options.weights}
    models = {name: load_model(folder, device=device) for name, folder in folders.items()}
    shape, about = dims_of(models["fp16"].config), made_now(*SCORE)

    def add(*measured: Any) -> None:
        row = five_digits(row_of(options, shape, *measured))
        append_row(options.csv, row | about)
        names = ("text", "weights", "asked_mlp_density", "asked_head_density", "kl", "increase", "block_bytes")
        print("  ".join(f"{name} {row[name]}" for name in names), flush=True)

    for text in options.texts.split(","):
        documents = load_documents(TextSource(source=f"{options.data}/{text}.jsonl"))[0]
        corpus = hold_out(documents, tokenizer, WINDOW, options.tokens)
        batches = list(eval_batches(corpus, options.batch_tokens, device))
        dense = [log_probabilities(models["fp16"], batch) for batch in batches]
        scored = partial(score, batches=batches, dense=dense, documents=len(corpus.document_tokens))
        alone = {name: scored(model, None) for name, model in models.items()}
        for name, found in alone.items():
            add(text, corpus, name, (1.0, 1.0), None, found, alone["fp16"])
        for asked in options.densities:
            moved = bundle.at(*asked)
            for name in [name for name in models if name in ("fp16", *options.sparse.split(","))]:
                add(text, corpus, name, asked, moved, scored(models[name], moved), alone["fp16"])


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
