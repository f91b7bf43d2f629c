"""What a guard costs and saves: perplexity and bytes of one causal pass of the decode engine, with and without it.

    python train.py --config configs/opt-mini.yaml --text.source .data/train_docs.jsonl.xz --output checkpoints/docs ...
    python -m benchmarks.guard --bundle checkpoints/docs/bundle --training docs --texts wikitext
    make tables                                          the rows as Markdown, in docs/guard.md

Windows of held-out text are scored token by token in batches of up to 32 rows; every token uses the thresholds that
stood before it, and a pass begins with the bundle's. Rows, appended to a CSV: the engine as it is (every = 0), dense
tokens with thresholds left alone, and guards with every N-th token dense, for each N and each promise.

Bytes are of one row's step, 16 bits a weight, the predictors as stored: q, k, v and output projections, MLPs, LM head,
K and V of its mean context. A dense token reads all of the MLPs beside the predictors and the planes of the second
stage. What sparse tokens read is counted at the dense ones, which note what the predictors select; the engine without
dense tokens is counted at the dense ones of the smallest N with thresholds left alone.
"""

import argparse
import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.allocation import cascade_bytes, mlp_bytes
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.data.text import TextSource, load_documents
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.evaluation.perplexity import EvalCorpus, hold_out, increase
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.models.weight_format import FLOAT16

WINDOW = 512


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a text: nats per document, and what the guard measured, over all of it and over its second half."""

    nats: np.ndarray
    whole: dict[str, Any] | None
    late: float | None


def score(engine: DecodeEngine, corpus: EvalCorpus) -> Pass:
    """All windows in order, as many at once as the engine has rows."""
    nats = np.zeros(len(corpus.document_tokens))
    batches = range(0, len(corpus.windows), engine.batch)
    guard, middle = engine.guard, None
    for number, first in enumerate(batches):
        if guard is not None and number == len(batches) // 2:
            middle = guard.sums.clone()
        part = slice(first, first + engine.batch)
        scored = engine.score(corpus.windows[part])
        np.add.at(nats, corpus.document[part], [float(nll.double().sum()) for nll in scored])
    if guard is None or middle is None:
        return Pass(nats, None, None)
    mine = [i for (_, target), i in guard.rows.items() if target == "mlp"]
    kept, mass = (guard.sums - middle)[mine][:, 4:].sum(0).tolist()
    return Pass(nats, guard.report(), kept / mass if mass else None)


def mlp_reads(bundle: Bundle, found: dict[str, Any]) -> tuple[float, float]:
    """Bytes of all MLPs with their predictors at a sparse token and at a dense one, by the shares that were counted."""
    shape, sparse, dense = bundle.shape, 0.0, 0.0
    unit = FLOAT16.unit_bytes(shape)
    whole = unit.dense(shape, "mlp")
    counted = {layer["layer"]: layer for layer in found["layers"] if layer["target"] == "mlp"}
    for i in range(shape.n_layers):
        spec = bundle.specs[i, "mlp"]
        if spec.dense:
            sparse, dense = sparse + whole, dense + whole
            continue
        share, hits, sizes = counted[i], counted[i]["hits"], (shape.d_ffn, shape.d_model, unit)
        tested = 0.0
        if spec.kind == "cascade":
            rows = cascade_bytes(share["candidates"], share["selected"], hits, 1.0, *sizes)
            tested = cascade_bytes(share["candidates"], 0.0, 0.0, 1.0, *sizes)
        else:
            rows = mlp_bytes(share["selected"], hits, 1.0, shape.d_ffn, unit)
        sparse += predictor_bytes(spec) + rows
        dense += predictor_bytes(spec) + tested + whole
    return sparse, dense


def other_reads(bundle: Bundle, corpus: EvalCorpus) -> float:
    """Bytes of everything else: attention's projections, the LM head, K and V of the mean context."""
    shape = bundle.shape
    lengths = [len(window) - 1 for window in corpus.windows]
    context = sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
    per_layer = FLOAT16.unit_bytes(shape).dense(shape, "heads") + 4 * shape.d_model * context
    return shape.n_layers * per_layer + 2 * shape.vocab_size * shape.d_model


def guards(options: argparse.Namespace) -> Iterator[Guard]:
    """What is compared: dense tokens only, then every N and every promise."""
    for every in options.every:
        yield Guard(every=every, control=False)
    for every, promise, memory in product(options.every, options.promise, options.memory):
        yield Guard(every=every, retained_mass=promise, memory=memory)


def run(options: argparse.Namespace) -> None:
    device = resolve_device("auto")
    model, tokenizer = load_opt(options.model, options.dtype, device), load_tokenizer(options.model)
    bundle = Bundle.from_pretrained(options.bundle).at(options.density, 1.0)
    bundle.check_model(options.model)
    built = {"batch": options.rows, "context": WINDOW, "ops": options.ops}
    dense_engine = DecodeEngine(model, None, **built)
    for text in options.texts:
        documents = load_documents(TextSource(source=f"{options.data}/{text}.jsonl"))[0]
        corpus = hold_out(documents, tokenizer, WINDOW, options.tokens)
        dense, plain = score(dense_engine, corpus), score(DecodeEngine(model, bundle, **built), corpus)
        reference: float | None = None
        for guard in guards(options):
            guarded = score(DecodeEngine(model, bundle, **built, guard=guard), corpus)
            assert guarded.whole is not None and guarded.late is not None
            sparse, full = mlp_reads(bundle, guarded.whole)
            other = other_reads(bundle, corpus)
            mean = sparse + (full - sparse) / guard.every
            if reference is None:
                reference = other + sparse
                off = Guard(every=0, control=False)
                write(options, text, bundle, corpus, off, plain, dense, guarded, sparse, reference, reference)
            write(options, text, bundle, corpus, guard, guarded, dense, guarded, mean, other + mean, reference)


def write(
    options: argparse.Namespace,
    text: str,
    bundle: Bundle,
    corpus: EvalCorpus,
    guard: Guard,
    scored: Pass,
    dense: Pass,
    counted: Pass,
    mlp: float,
    total: float,
    reference: float,
) -> None:
    """Append a row and print a line. counted: the pass that counted what is selected."""
    shape, device = bundle.shape, resolve_device("auto")
    assert counted.whole is not None
    found = counted.whole["mlp"]
    value, error = increase(scored.nats, dense.nats, corpus.document_tokens)
    specs = [spec for spec in bundle.specs.values() if spec.target == "mlp" and not spec.dense]
    promised = sum(spec.retained_mass for spec in specs) / len(specs)
    row = {
        "model": Path(options.model).name,
        "training": options.training,
        "seed": options.seed,
        "text": text,
        "documents": len(corpus.document_tokens),
        "tokens": corpus.tokens,
        "asked_mlp": options.density,
        "rows": options.rows,
        "dtype": options.dtype,
        "every": guard.every,
        "control": guard.control,
        "promise": "bundle" if guard.retained_mass is None else guard.retained_mass,
        "memory": guard.memory,
        "perplexity": math.exp(scored.nats.sum() / corpus.tokens),
        "increase": value,
        "error": error,
        "bytes": total,
        "more_bytes": total / reference - 1,
        "mlp_share": mlp / (shape.n_layers * FLOAT16.unit_bytes(shape).dense(shape, "mlp")),
        "bundle_mass": promised,
        "retained_mass": found["retained_mass"],
        "late_mass": counted.late,
        "candidates": found["candidates"],
        "selected": found["selected"],
        "recall": found["recall"],
        "measured": counted.whole["tokens"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    append_row(options.output, five_digits(row), list(row))
    name = (
        "off" if not guard.every else f"every {guard.every}" + (f", {row['promise']}" if guard.control else ", still")
    )
    summary = f"{100 * value:+.2f} +- {100 * (error or 0):.2f} %, {100 * row['more_bytes']:+.1f} % bytes"
    print(f"{text} {name} {guard.memory}: {summary}, mass {row['retained_mass']:.4f}, late {row['late_mass']:.4f}"
          f" of {promised:.4f}, candidates {found['candidates']:.3f}", flush=True)  # fmt: skip


def _list(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--training", default="docs", help="what the bundle was trained on; a name for the rows")
    parser.add_argument("--seed", type=int, default=0, help="of the bundle's training; for the rows")
    parser.add_argument("--data", default=".data", help="where `benchmarks/texts.py prepare` wrote the texts")
    parser.add_argument("--texts", type=_list(str), default=["wikitext"])
    parser.add_argument("--tokens", type=int, default=100_000, help="of every text; a shorter one is taken whole")
    parser.add_argument("--density", type=float, default=0.2, help="of the MLPs' candidates; all heads")
    parser.add_argument("--every", type=_list(int), default=[8, 16, 32, 64])
    promise = lambda part: None if part == "bundle" else float(part)  # noqa: E731
    parser.add_argument("--promise", type=_list(promise), default=[None], help="bundle, or shares: bundle,0.98")
    parser.add_argument("--memory", type=_list(int), default=[Guard().memory])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ops", default="triton", help="reference: plain torch on any device, for debugging")
    parser.add_argument("--output", default="docs/texts/guard.csv")
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
