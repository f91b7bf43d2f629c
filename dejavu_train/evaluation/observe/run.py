"""Walks from a dense model to observations: one pass over held-out text, parts that need more, files, pictures."""

import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import TextSource
from dejavu_train.errors import UserError
from dejavu_train.evaluation.observe.attention import Attention, map_rows
from dejavu_train.evaluation.observe.config import NEED_BUNDLE, PASS_PARTS, ObserveConfig
from dejavu_train.evaluation.observe.cost import Peaks, cost_rows, measure_peaks
from dejavu_train.evaluation.observe.neighbours import neighbour_rows
from dejavu_train.evaluation.observe.predictors import predictor_rows
from dejavu_train.evaluation.observe.residual import Residual
from dejavu_train.evaluation.observe.rows import write_csv
from dejavu_train.evaluation.observe.selections import COMPARED, selection_rows
from dejavu_train.evaluation.observe.titles import TITLES
from dejavu_train.evaluation.observe.union import Unions
from dejavu_train.evaluation.observe.units import Units
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches
from dejavu_train.evaluation.provenance import hashes, versions
from dejavu_train.evaluation.texts import EvalText, load_text, trained_text
from dejavu_train.files import write_json
from dejavu_train.models.hooks import decoder_layers, record

logger = logging.getLogger(__name__)

SCHEMA = 1
FOLDER = "observations"
ONE_WINDOW_EACH = 1 << 40  # over how many documents the tokens are spread
SENTENCE = (3, 64)  # tokens of the sentence whose attention is drawn
Rows = dict[str, Sequence[Any]]


def observe(config: ObserveConfig, model: OPTForCausalLM, tokenizer: Any, bundle: Bundle | None) -> Path:
    """Measure what ``config.parts`` names, write it, and return the folder.

    Args:
        model: dense, in evaluation mode, on its device. bundle: of this model, or None.

    Raises:
        UserError: what :func:`load_text` raises, or a value that does not fit the model.
    """
    config.check()
    folder = Path(config.output) / FOLDER
    if Path(config.output).is_file() or folder.is_file():
        raise UserError(f"--output {config.output} must be a folder in which the folder {FOLDER} can be made")
    sentence = _sentence(config, model, tokenizer)
    if config.prompt + 20 > model.config.max_position_embeddings and "cost" in config.parts:
        raise UserError(f"--prompt {config.prompt} leaves no room to generate: the model has"
                        f" {model.config.max_position_embeddings} positions")  # fmt: skip
    text = _load(config, tokenizer, bundle, config.text_set, config.tokens)
    slow = _load(config, tokenizer, bundle, config.text_set, config.slow_tokens)
    missing: list[dict[str, str]] = []
    rows: Rows = {}
    seconds: dict[str, float] = {}
    if set(PASS_PARTS) & set(config.parts):
        with _timed(seconds, "one pass"):
            rows |= one_pass(config, model, text.held)
    if "attention" in config.parts:
        rows["attention_maps"] = map_rows(model, *sentence, config.chosen_heads())
    with torch.no_grad():
        rows |= _more(config, model, tokenizer, bundle, slow.held, missing, seconds)
    rows = {name: found for name, found in rows.items() if found}
    for name, found in rows.items():
        write_csv(folder / f"{name}.csv", found)
    drawn = draw(rows, folder)
    if not drawn:
        missing.append({"what": "pictures", "why": "matplotlib is not installed (pip install matplotlib)"})
    write_json(
        folder / "observations.json",
        {
            "schema": SCHEMA,
            "model": config.model,
            "bundle": config.bundle if bundle else None,
            "hashes": hashes(config.model, config.revision, config.bundle if bundle else None),
            "versions": versions(),
            "device": str(model.device),
            "config": dataclasses.asdict(config),
            "text": _about(text),
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "observed": [
                {"name": name, **dataclasses.asdict(TITLES[name]), "rows": len(found), "picture": name in drawn}
                for name, found in rows.items()
            ],
            "not_measured": missing,
        },
    )
    return folder


def one_pass(config: ObserveConfig, model: OPTForCausalLM, held: EvalCorpus) -> Rows:
    """All observations of one dense pass over ``held``, layer by layer; memory does not grow with the text.

    (Except for the sets of at most ``config.requests`` windows, bit-packed, and a number a window.)
    """
    blocks = decoder_layers(model)
    share = min(1.0, config.sampled / held.tokens)
    units = Units(blocks, config.losses, share, torch.Generator().manual_seed(config.seed))
    residual, attention = Residual(len(blocks)), Attention(model, config.queries)
    unions = Unions(len(blocks), config.window - 1, config.requests)
    recorded: set[str] = set()
    for part, places in (("residual", residual.places), ("units", units.places), ("attention", attention.places)):
        recorded |= places if part in config.parts else set()
    recorded |= unions.places | units.places if "union" in config.parts else set()
    real = torch.empty(0, dtype=torch.bool)

    def add(layer: int, got: dict[str, Tensor]) -> None:
        own = real.to(next(iter(got.values())).device)
        if "residual" in config.parts:
            residual.layer(layer, got, own)
        if "attention" in config.parts:
            attention.layer(layer, got, own)
        if {"units", "union"} & set(config.parts):
            sets = units.layer(layer, got, own)
            if "union" in config.parts:
                unions.layer(layer, got, own, sets)

    with _bar(held.tokens, "observing") as bar, torch.no_grad(), record(model, recorded, on_layer=add):
        for batch in eval_batches(held, config.batch_tokens, model.device):
            real = batch.real
            model.model.decoder(input_ids=batch.ids, use_cache=False)
            bar.update(int(real.sum()))
    rows: Rows = {}
    if "residual" in config.parts:
        rows |= {"cosine": residual.cosine_rows(), "norms": residual.norm_rows(), "clusters": residual.cluster_rows()}
    if "units" in config.parts:
        rows |= {"sparsity": units.sparsity_rows(), "frequency": units.frequency_rows()}
        rows |= {"concentration": units.concentration_rows(), "overlap": units.overlap_rows()}
    if "attention" in config.parts:
        rows |= {"heads": attention.head_rows(), "uniformity": attention.uniformity_rows()}
    if "union" in config.parts:
        rows["union"] = unions.rows(config.seed)
    return rows


def _more(
    config: ObserveConfig,
    model: OPTForCausalLM,
    tokenizer: Any,
    bundle: Bundle | None,
    held: EvalCorpus,
    missing: list[dict[str, str]],
    seconds: dict[str, float],
) -> Rows:
    """The parts that are no share of the pass."""
    rows: Rows = {}
    options = (config.batch_tokens, config.seed)
    for part in NEED_BUNDLE:
        if part in config.parts and bundle is None:
            missing.append({"what": TITLES[part].title, "why": "no bundle was given (--bundle)"})
    if "selections" in config.parts and bundle is not None:
        passes = 1 + len(config.densities) * len(COMPARED)
        with _timed(seconds, "selections"), _bar(passes * held.tokens, "selections") as bar:
            rows["selections"] = selection_rows(model, bundle, held, config.densities, *options, bar.update)
    if "predictors" in config.parts and bundle is not None:
        own = _load(config, tokenizer, bundle, config.predictor_set, config.slow_tokens).held
        with _timed(seconds, "predictors"):
            rows["predictors"] = predictor_rows(model, bundle, own, config.batch_tokens)
    if "neighbours" in config.parts:
        density = config.neighbour_density
        efs = sorted({max(ef, round(density * model.config.ffn_dim)) for ef in config.ef})
        passes = 3 + len(efs)
        with _timed(seconds, "neighbours"), _bar(passes * held.tokens, "neighbours") as bar:
            found, why = neighbour_rows(model, held, density, efs, config.batch_tokens, bundle, bar.update)
        rows["neighbours"] = found
        if why:
            missing.append({"what": "approximate nearest neighbours", "why": why})
    if "cost" in config.parts:
        with _timed(seconds, "cost"):
            if config.peak_tflops is None or config.peak_gb_s is None:
                peaks = measure_peaks(model.device, model.dtype)
            else:
                peaks = Peaks(config.peak_tflops, config.peak_gb_s, "given")
            peaks = Peaks(
                config.peak_tflops or peaks.tera_operations, config.peak_gb_s or peaks.gigabytes, peaks.device
            )
            rows["peaks"] = [peaks]
            rows["cost"] = cost_rows(model, peaks, config.batch, config.prompt)
    return rows


def draw(rows: Rows, folder: Path) -> list[str]:
    """Draw all that has a picture as NAME.svg and NAME.png; returns the names, none without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from dejavu_train.evaluation.observe import pictures

    drawn = []
    for name, picture in pictures.DRAWN.items():
        if name in rows:
            extra = [rows.get("uniformity", [])] if name == "heads" else []
            pictures.save(picture(rows[name], *extra), folder / name)
            drawn.append(name)
    return drawn


def _load(config: ObserveConfig, tokenizer: Any, bundle: Bundle | None, set_name: str, tokens: int | None) -> EvalText:
    source = TextSource(
        source=config.text,
        config=config.text_config,
        revision=config.text_revision,
        field=config.text_field,
        cache=config.text_cache,
    )
    trained = trained_text(bundle, str(config.bundle)) if bundle else {}
    options = (config.model, trained, tokenizer, config.window, tokens, config.seed, ONE_WINDOW_EACH)
    return load_text(config.text, source, set_name, *options)


def _about(text: EvalText) -> dict[str, Any]:
    names = ("name", "sha256", "set_name", "whole", "domain", "window")
    about = {name: getattr(text, name) for name in names}
    return about | {"documents": len(text.held.document_tokens), "tokens": text.held.tokens}


def _sentence(config: ObserveConfig, model: OPTForCausalLM, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Ids of the sentence, from </s> on, and each as it is shown."""
    ids = [2, *tokenizer(config.sentence, add_special_tokens=False)["input_ids"]]
    if not SENTENCE[0] <= len(ids) <= SENTENCE[1]:
        low, high = SENTENCE
        raise UserError(f"--sentence must have {low} to {high} tokens, </s> included; it has {len(ids)}")
    if config.window - 1 > model.config.max_position_embeddings:
        raise UserError(
            f"--window {config.window} exceeds the model's {model.config.max_position_embeddings} positions"
        )
    n_layers, n_heads = model.config.num_hidden_layers, model.config.num_attention_heads
    for layer, head in config.chosen_heads() or []:
        if layer >= n_layers or head >= n_heads:
            raise UserError(f"--heads L{layer}H{head}: the model has {n_layers} layers of {n_heads} heads, from 0 on")
    return ids, [tokenizer.decode([token]).strip() or "␣" for token in ids]


def _bar(total: int, what: str) -> Any:
    return tqdm(total=total, desc=what, unit="token", unit_scale=True, disable=not sys.stderr.isatty())


class _timed:
    """Notes how long its block took."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = time.perf_counter() - self.start
        logger.info("%s: %.0f s", self.name, self.seconds[self.name])
