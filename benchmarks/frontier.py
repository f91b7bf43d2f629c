"""Quality at equal bytes: predictors of train.py against rivals, and heads against their oracle, on several texts.

    python -m benchmarks.frontier rivals            what needs no training, each in its best form (rivals.py)
    python -m benchmarks.frontier trained --seed 0  a run of train.py: its neurons at the same bytes, its heads
    bash benchmarks/frontier.sh                     the rivals and three seeds side by side on one GPU
    make tables                                     the rows as Markdown, in docs/frontier.md

Texts are those that `benchmarks/texts.py prepare` writes. Predictors, rivals and thresholds learn on the model's own
text; the test texts are only scored. Every row has its bytes as counted on the scored tokens.
"""

import argparse
import dataclasses
import datetime
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals import (
    Calibration,
    GraphSearch,
    Griffin,
    MlpWeights,
    Oracle,
    OracleHeads,
    Rival,
    Teal,
    WhitenedSVD,
    log_probabilities,
    score,
    second_moments,
)
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import mlp_share
from dejavu_train.cli import parse_config
from dejavu_train.config import RunConfig
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.text import Document, TextSource, cut_windows, load_documents
from dejavu_train.errors import UserError, exit_on_user_error
from dejavu_train.evaluation.perplexity import (
    EvalBatch,
    EvalCorpus,
    EvalSetting,
    eval_batches,
    evaluate,
    hold_out,
    increase,
)
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.pipeline import run as train
from dejavu_train.pipeline import sampled
from dejavu_train.predictors.metrics import total

TEXTS = "docs,readmes,licences,general,books,wikitext,lambada,code"
WINDOW = 512
SHARES = (0.08, 0.10)  # of the dense MLPs' bytes
RANKS = (32, 64, 96)
MLP_DENSITIES, HEAD_DENSITIES = (1.0, 0.2), (0.85, 0.75)


@dataclasses.dataclass
class FrontierRow:
    """One method at one budget on one text. ``mlp_bytes`` are shares of the dense MLPs', None with all neurons;
    ``calibration_nats`` is the divergence on calibration text, by which variants are chosen;
    ``perplexity`` is of whole windows, Griffin's dense prompt included, ``increase`` of the sparse positions."""

    model: str
    method: str
    seed: int
    text: str
    documents: int
    tokens: int
    asked_bytes: float | None
    mlp_bytes: float | None
    asked_mlp: float | None
    mlp_density: float | None
    asked_heads: float
    head_density: float
    perplexity: float
    increase: float
    error: float | None
    calibration_nats: float | None
    device: str
    torch: str
    commit: str
    date: str


class Rows:
    """Appends rows of one model and device to a CSV, and says them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.output = options.output
        self.same = {
            "model": Path(options.model).name,
            "seed": options.seed,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
        }

    def add(
        self, corpus: EvalCorpus, nats: np.ndarray, dense: np.ndarray, positions: Sequence[int], **more: Any
    ) -> None:
        """``nats`` and ``dense`` summed per document, of which ``positions`` were sparse."""
        some = np.asarray(positions) > 0
        value, error = increase(nats[some], dense[some], np.asarray(positions)[some].tolist())
        perplexity = math.exp(nats.sum() / corpus.tokens)
        empty = {"asked_bytes": None, "asked_mlp": None, "mlp_density": None, "calibration_nats": None}
        row = FrontierRow(
            **{**empty, **self.same, **more},
            documents=int(some.sum()),
            tokens=int(sum(positions)),
            perplexity=perplexity,
            increase=value,
            error=error,
        )
        names = [field.name for field in dataclasses.fields(FrontierRow)]
        append_row(self.output, five_digits(dataclasses.asdict(row)), names)
        read = "" if row.mlp_bytes is None else f", {100 * row.mlp_bytes:.2f} % of the MLPs' bytes"
        heads = "" if row.asked_heads == 1 else f", {100 * row.head_density:.1f} % of the heads"
        print(f"{row.method}: {row.text} {100 * value:+.2f} +- {100 * (error or 0):.2f} %{read}{heads}", flush=True)


def corpora(options: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, EvalCorpus]]:
    for name in options.texts.split(","):
        documents: list[Document] = load_documents(TextSource(source=f"{options.data}/{name}.jsonl"))[0]
        yield name, hold_out(documents, tokenizer, WINDOW, options.tokens)


def some_windows(windows: Sequence[Sequence[int]], tokens: int) -> EvalCorpus:
    """About ``tokens`` tokens of windows that lie evenly over all of them."""
    there = sum(len(window) - 1 for window in windows)
    cut = [list(window) for window in windows[:: max(1, there // tokens)]]
    return EvalCorpus(cut, list(range(len(cut))), [len(window) - 1 for window in cut], 0)


def configured(options: argparse.Namespace, flags: Sequence[str]) -> RunConfig:
    """The default recipe with this seed, its text and its initialisation."""
    given = [f"--config={options.config}", f"--model={options.model}", f"--seed={options.seed}"]
    if options.seed:  # as much text as lies beside the model for seed 0
        given += [f"--text.sample.seed={options.seed}", "--text.sample.tokens=370000"]
    work = Path(options.work) / f"seed-{options.seed}"
    return parse_config([*given, f"--output={work}", "--trainer.logger=false", *flags])


def every_rival(
    weights: Sequence[MlpWeights], moments: Sequence[torch.Tensor], often: Sequence[torch.Tensor]
) -> list[Rival]:
    ranks = sorted({min(rank, weights[0].fc1.shape[1]) for rank in RANKS})
    low_rank = [WhitenedSVD(weights, moments, rank) for rank in ranks]
    return [Oracle(weights), *low_rank, GraphSearch(weights, moments, often), Griffin(weights), Teal(weights)]


def rivals(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Rows of all rivals at every budget that they can meet."""
    device = resolve_device("auto")
    model, tokenizer = load_opt(options.model, device=device), load_tokenizer(options.model)
    load = sampled(configured(options, flags))
    assert load is not None, "the default recipe trains on the model's own text"
    sets, _ = load()

    def own_text(name: str, tokens: int) -> list[EvalBatch]:
        windows = [part for document in sets[name] for part in cut_windows(document.ids, WINDOW)]
        return list(eval_batches(some_windows(windows, tokens), options.batch_tokens, device))

    moments, often = second_moments(model, own_text("train", options.moment_tokens))
    calibration = own_text("calibration", options.calibration_tokens)
    dense = [log_probabilities(model, calibration[0])]
    chosen = []
    for rival in every_rival(MlpWeights.of(model), moments, often):
        began = time.perf_counter()
        calibrated = Calibration(model, rival, calibration, dense)
        for share in SHARES:
            try:
                thresholds = calibrated.thresholds(share)
            except UserError as error:
                print(f"{rival.name} is not scored at {share:.0%}: {error}", flush=True)
                continue
            chosen.append((rival, share, thresholds, calibrated.divergence(thresholds)))
        print(f"{rival.name}: calibrated in {time.perf_counter() - began:.0f} s", flush=True)
    rows = Rows(options, device)
    for name, corpus in corpora(options, tokenizer):
        batches = list(eval_batches(corpus, options.batch_tokens, device))
        documents = len(corpus.document_tokens)
        reference, _, _ = score(model, Oracle(MlpWeights.of(model)), {}, batches, documents)
        for rival, share, thresholds, nats in chosen:
            found, positions, ledger = score(model, rival, thresholds, batches, documents)
            what = {"method": rival.name, "text": name, "asked_bytes": share, "mlp_bytes": ledger.share(rival)}
            what |= {"asked_heads": 1.0, "head_density": 1.0, "calibration_nats": nats}
            rows.add(corpus, found, reference, positions.astype(int).tolist(), **what)


def at_bytes(model: Any, bundle: Bundle, corpus: EvalCorpus, share: float, batch_tokens: int) -> float:
    """The density of candidates at which the bundle reads ``share`` of the MLPs' bytes, counted on ``corpus``."""
    asked, density = share, 1.0
    for _ in range(4):
        low, high = 0.001, 1.0
        for _ in range(40):
            density = (low + high) / 2
            low, high = (density, high) if mlp_share(bundle.at(density), FLOAT16) < asked else (low, density)
        asked_row = [EvalSetting("predicted", density)]
        measured = evaluate(model, bundle, corpus, asked_row, batch_tokens, weights=FLOAT16)[0].mlp_bytes
        assert measured is not None
        if abs(measured / share - 1) < 0.005:
            break
        asked *= share / measured
    return density


def trained(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """A run of train.py with one seed: its neurons at every budget, and its heads beside two oracles."""
    config = configured(options, flags)
    began = time.perf_counter()
    train(config)
    print(f"seed {options.seed}: trained in {time.perf_counter() - began:.0f} s", flush=True)
    output = Path(config.output)
    bundle = Bundle.from_pretrained(output / config.bundle)
    windows = ShardReader(output / "activations", 0, "calibration").windows()
    shutil.rmtree(output / "activations")
    device = resolve_device("auto")
    model, tokenizer = load_opt(options.model, device=device), load_tokenizer(options.model)
    own = some_windows(windows, options.calibration_tokens)
    densities = {at_bytes(model, bundle, own, share, options.batch_tokens): share for share in SHARES}
    calibration = list(eval_batches(own, options.batch_tokens, device))
    oracle = OracleHeads(model, bundle.head_means(device))
    calibrated = Calibration(model, oracle, calibration, [log_probabilities(model, calibration[0])])
    shared_out = {density: calibrated.thresholds(density) for density in HEAD_DENSITIES}
    settings = [EvalSetting("dense"), *(EvalSetting("predicted", density) for density in densities)]
    for mlp in MLP_DENSITIES:
        settings += [EvalSetting("predicted", mlp)] if mlp < 1 else []
        settings += [EvalSetting("predicted", mlp, heads) for heads in HEAD_DENSITIES]
    settings += [EvalSetting("oracle", 1.0, heads) for heads in HEAD_DENSITIES]
    rows = Rows(options, device)
    for name, corpus in corpora(options, tokenizer):
        scored = evaluate(model, bundle, corpus, settings, options.batch_tokens, weights=FLOAT16)
        dense = scored[0].nats
        for quality in scored[1:]:
            setting = quality.row
            mlp, heads = (
                total(sums for (_, name), sums in quality.sums.items() if name == target).density
                for target in ("mlp", "heads")
            )
            share = densities.get(setting.mlp_density) if setting.head_density == 1 else None
            method = "predictors" if setting.selection == "predicted" else "oracle, as many as predicted"
            what = {"method": method, "text": name, "asked_bytes": share, "mlp_bytes": quality.mlp_bytes}
            what |= {"asked_mlp": setting.mlp_density, "mlp_density": mlp if setting.mlp_density < 1 else 1.0}
            what |= {"asked_heads": setting.head_density, "head_density": heads if setting.head_density < 1 else 1.0}
            if setting.mlp_density == 1:
                what["mlp_bytes"] = None
            rows.add(corpus, quality.nats, dense, corpus.document_tokens, **what)
        batches = list(eval_batches(corpus, options.batch_tokens, device))
        for density, thresholds in shared_out.items():
            nats, positions, ledger = score(model, oracle, thresholds, batches, len(corpus.document_tokens))
            what = {"method": oracle.name, "text": name, "mlp_bytes": None, "asked_mlp": 1.0, "mlp_density": 1.0}
            what |= {"asked_heads": density, "head_density": ledger.share(oracle)}
            rows.add(corpus, nats, dense, positions.astype(int).tolist(), **what)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=("rivals", "trained"))
    parser.add_argument("--model", default="checkpoints/opt-mini")
    parser.add_argument("--config", default="configs/opt-mini.yaml")
    parser.add_argument("--data", default=".data", help="what `benchmarks/texts.py prepare` wrote")
    parser.add_argument("--texts", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=50_000, help="of every text; a shorter one is taken whole")
    parser.add_argument("--calibration-tokens", type=int, default=24_000)
    parser.add_argument("--moment-tokens", type=int, default=100_000, help="of training text, for second moments")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", default="checkpoints/frontier", help="folder of the runs")
    parser.add_argument("--output", default="docs/frontier/rivals.csv")
    options, flags = parser.parse_known_args(argv)  # what is left are flags of train.py
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    (rivals if options.command == "rivals" else trained)(options, flags)


if __name__ == "__main__":
    raise SystemExit(exit_on_user_error(main))
