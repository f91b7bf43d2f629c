"""Do predictors hold on texts that they were not trained on? Training text x test text, a run of train.py per row.

    python -m benchmarks.texts prepare --data FOLDER     the test texts and the training texts, as files (.data/)
    python -m benchmarks.texts run --training self       trains one bundle and scores it on every test text
    make tables                                          the rows as Markdown, in docs/results/texts.md

`prepare` reads the four installed sources and the files of FOLDER (books_heldout.jsonl, general_heldout.jsonl,
wikitext2/valid.raw.txt, tasks/lambada_openai_test.jsonl, where to get them: docs/results/texts.md).
`run` goes the whole way that a user's `train.py` goes. Then it scores 100,000 tokens of every text, or all of a shorter
one, through `mask`. It appends a row for each text and selection to docs/results/texts/<model>.csv. Interrupted, the
same command goes on behind the last text that was scored.
"""

import argparse
import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.rows import SCORE, append_row, command_line, device_name, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import mlp_share
from dejavu_train.data.text import INSTALLED_DOCS, Document, TextSource, load_documents, load_sets
from dejavu_train.evaluation.perplexity import EvalSetting, evaluate, hold_out, increase
from dejavu_train.evaluation.texts import load_text
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.predictors.metrics import total
from dejavu_train.run.command import parse_config
from dejavu_train.run.pipeline import run as train

logger = logging.getLogger(__name__)

TEXTS = {  # name -> where prepare finds it: an installed source, or a file of --data
    "docs": INSTALLED_DOCS,
    "readmes": "installed-readmes",
    "licences": "installed-licences",
    "code": "installed-code",
    "books": "books_heldout.jsonl",
    "general": "general_heldout.jsonl",
    "wikitext": "wikitext2/valid.raw.txt",
    "lambada": "tasks/lambada_openai_test.jsonl",
}
TRAINING = ("self", "docs")
PLAIN = ("--calibrate.cascade=null", "--heads.enabled=false", "--calibrate.head_density=1.0")  # MLP only, one stage
RECIPES: dict[str, list[str]] = {
    "default": [],
    # fc1's SVD weighed with the inputs' second moment, nothing trained: what whitened low-rank methods do
    "whitened-svd": ["--mlp.steps=0", *PLAIN],
    "svd": ["--mlp.init=svd", "--mlp.steps=0", *PLAIN],
    # Deja Vu's: random start, its loss, Adam at 1e-3, fp16; rank 1000 of 12288, so 32 of 384
    "original": [
        "--mlp.init=random", "--mlp.loss=paper", "--mlp.learning_rate=0.001", "--mlp.weight_decay=0.01",
        "--mlp.rank=32", "--calibrate.dtype=float16", *PLAIN,
    ],
}  # fmt: skip
BYTES = (0.083, 0.106)  # what the default recipe reads of the MLPs' bytes at 10 % and 20 % of candidates
TOKENS = 100_000
WINDOW = 512


def prepare(data: Path, folder: Path, model: str, tokens: int, cache: str) -> None:
    """Write every test text as the documents that are scored, and the training texts."""
    tokenizer = load_tokenizer(model)
    for name, place in TEXTS.items():
        source = TextSource(source=place if place.startswith("installed") else str(data / place), cache=cache)
        text = load_text(name, source, "test", model, {}, tokenizer, WINDOW, tokens)
        held = text.held
        rows: dict[int, list[int]] = {}
        for window, document in zip(held.windows, held.document, strict=True):
            rows.setdefault(document, []).extend(window[1:])
        texts = [tokenizer.decode(ids) for ids in rows.values()]
        _write_documents(folder / f"{name}.jsonl", texts)
        print(f"{name}: {held.tokens} tokens of {len(texts)} documents{', all there is' if text.whole else ''}")
    documents = load_sets(TextSource(source=INSTALLED_DOCS, cache=cache), model)[0]["train"]
    _write_documents(folder / "train_docs.jsonl", [document.text for document in documents])


def _write_documents(path: Path, texts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)), "utf-8")


def at_bytes(bundle: Bundle, share: float) -> float:
    """The MLP density at which the bundle reads ``share`` of the MLPs' bytes, by its calibration."""
    low, high = 0.001, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mlp_share(bundle.at(middle), FLOAT16) < share else (low, middle)
    return low


def rows_of(bundle: Bundle, recipe: str, yardsticks: bool, densities: str) -> list[EvalSetting]:
    """What is scored: the default recipe at its densities, the others where they read as many bytes.

    Args:
        densities: pairs of neurons and heads such as ``0.1/1,0.2/0.85`` that are scored in their place.
    """
    if densities:
        pairs = [tuple(map(float, pair.split("/"))) for pair in densities.split(",")]
        return [EvalSetting("dense"), *(EvalSetting("predicted", *pair) for pair in pairs)]
    if recipe != "default":
        return [EvalSetting("dense"), *(EvalSetting("predicted", at_bytes(bundle, share)) for share in BYTES)]
    rows = [
        EvalSetting("dense"),
        EvalSetting("predicted", 0.1),
        EvalSetting("predicted", 0.2),
        EvalSetting("predicted", 0.2, 0.85),
    ]
    return rows + [EvalSetting(name, density) for name in ("oracle", "static") for density in (0.1, 0.2) if yardsticks]


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Train one bundle as `train.py` does, score it on every text, append the rows, delete the run."""
    name = f"{options.training}-{options.recipe}-{options.seed}{'-' * bool(options.label)}{options.label}"
    work = Path(options.work) / name
    text = []
    if options.training != "self":
        text = [f"--text={next(Path(options.data).glob(f'train_{options.training}.jsonl*'))}"]
    if options.training == "self" and options.seed:
        text.append(f"--text.sample.seed={options.seed}")
    given = [f"--config={options.config}", f"--model={options.model}", f"--output={work}", f"--seed={options.seed}"]
    given += [*text, f"--text.cache={options.cache}", "--trainer.logger=false", *RECIPES[options.recipe], *flags]
    config = parse_config(given)
    began = time.perf_counter()
    train(config)
    print(f"{work.name}: trained in {time.perf_counter() - began:.0f} s", flush=True)
    manifest = json.loads((work / "activations" / "manifest.json").read_text())
    train_tokens = sum(shard["tokens"] for shard in manifest["shards"] if shard["set"] == "train")
    bundle = Bundle.from_pretrained(work / "bundle")
    for shards in (work / "activations").glob("layer_*"):  # the manifest stays: rows say how much was trained on
        shutil.rmtree(shards)
    device = resolve_device("auto")
    model, tokenizer = load_model(options.model, device=device), load_tokenizer(options.model)
    settings = rows_of(bundle, options.recipe, options.yardsticks, options.densities)
    scored_before = work / "scored.txt"
    before = scored_before.read_text("utf-8").split() if scored_before.is_file() else []
    for name in (name for name in options.texts.split(",") if name not in before):
        documents: list[Document] = load_documents(TextSource(source=f"{options.data}/{name}.jsonl"))[0]
        corpus = hold_out(documents, tokenizer, WINDOW, options.tokens)
        scored = evaluate(model, bundle, corpus, settings, options.batch_tokens, weights=FLOAT16)
        dense = next(quality for quality in scored if quality.row.selection == "dense")
        for quality in scored:
            value, error = increase(quality.nats, dense.nats, corpus.document_tokens)
            mlp, heads = (
                total(sums for (_, name), sums in quality.sums.items() if name == target) for target in ("mlp", "heads")
            )
            sparse = quality.row.selection != "dense"
            row = {
                "model": Path(options.model).name,
                "training": options.label or options.training,
                "recipe": options.recipe,
                "seed": options.seed,
                "train_tokens": train_tokens,
                "steps": config.mlp.steps,
                "text": name,
                "documents": len(corpus.document_tokens),
                "tokens": corpus.tokens,
                "selection": quality.row.selection,
                "asked_mlp_density": round(quality.row.mlp_density, 5),
                "asked_head_density": quality.row.head_density,
                "mlp_selected": round(mlp.density, 5) if sparse else 1.0,
                "head_selected": round(heads.density, 5) if quality.row.head_density < 1 else 1.0,
                "mlp_bytes": None if quality.mlp_bytes is None else round(quality.mlp_bytes, 5),
                "recall": round(mlp.recall, 5) if sparse else 1.0,
                "retained_mass": round(mlp.retained_mass, 5) if sparse else 1.0,
                "perplexity": round(math.exp(quality.nats.sum() / corpus.tokens), 4),
                "increase": round(value, 6),
                "error": None if error is None else round(error, 6),
                "device": device_name(device),
                "torch": torch.__version__,
                **made_now("dejavu_train.run.pipeline", *SCORE),
            }
            append_row(options.output, row)
            if quality.row.selection == "predicted":
                asked = f"{quality.row.mlp_density:g}/{quality.row.head_density:g}"
                line = f"{100 * value:+.2f} +- {100 * (error or 0):.2f} %, {100 * row['mlp_bytes']:.1f} % of bytes"
                print(f"{work.name}: {name} {asked}: {line}", flush=True)
        with open(scored_before, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    scored_before.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("command", choices=("prepare", "run"))
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--config", default="configs/opt-mini.yaml")
    parser.add_argument("--data", default=".data", help="prepare: where the files lie; run: what prepare wrote")
    parser.add_argument("--to", default=".data", help="prepare: where the texts are written")
    parser.add_argument("--training", choices=TRAINING, default="self")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="default")
    parser.add_argument("--label", default="", help="names the training text in the rows, where flags change it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of every text; a shorter one is taken whole")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--densities", default="", help="of neurons and heads, as 0.1/1,0.2/0.85. Else the recipe's")
    parser.add_argument("--yardsticks", action="store_true", help="score the oracle and static selection too")
    parser.add_argument("--work", default="checkpoints/texts", help="folder of the runs")
    parser.add_argument("--cache", default="checkpoints/text")
    parser.add_argument("--output", default="docs/results/texts/opt-mini.csv")
    options, flags = parser.parse_known_args(argv)  # what is left are flags of train.py
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.command == "prepare":
        prepare(Path(options.data), Path(options.to), options.model, options.tokens, options.cache)
    else:
        run(options, flags)


if __name__ == "__main__":
    main()
