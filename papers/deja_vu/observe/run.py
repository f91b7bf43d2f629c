"""Walks from a dense model to observations: one pass over held-out text, parts that need more, files, pictures."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches
from dejavu_train.evaluation.provenance import hashes, versions
from dejavu_train.evaluation.rows import write_csv
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import EvalText, load_spread
from dejavu_train.families import Target
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_json
from dejavu_train.ground.progress import Progress
from dejavu_train.models.finite import check_logits
from dejavu_train.models.hooks import decoder_layers, record
from papers.deja_vu.observe.attention import Attention
from papers.deja_vu.observe.config import PARTS, PASS_PARTS, ObserveConfig
from papers.deja_vu.observe.cost import Peaks, cost_rows, measure_peaks
from papers.deja_vu.observe.neighbours import neighbour_rows
from papers.deja_vu.observe.predictors import predictor_rows
from papers.deja_vu.observe.residual import Residual
from papers.deja_vu.observe.selections import COMPARED, selection_rows
from papers.deja_vu.observe.titles import TITLES
from papers.deja_vu.observe.union import Unions
from papers.deja_vu.observe.units import Units

logger = logging.getLogger(__name__)

SCHEMA = 1
FOLDER = "observations"
Rows = dict[str, Sequence[Any]]


def observe(config: ObserveConfig, model: OPTForCausalLM, tokenizer: Any, bundle: Bundle | None) -> Path:
    """Measure what ``config.parts`` names and return the folder, in which every part is written as it is made.

    Args:
        model: dense, in evaluation mode, on its device. bundle: of this model, or None.

    Raises:
        UserError: what :func:`load_text` raises, or a value that does not fit the model.
    """
    config.check()
    folder = Path(config.output) / FOLDER
    if Path(config.output).is_file() or folder.is_file():
        raise UserError(f"--output {config.output} or {folder} is a file; choose another folder")
    if config.window - 1 > model.config.max_position_embeddings:
        raise UserError(
            f"--window {config.window} exceeds the model's {model.config.max_position_embeddings} positions"
        )
    if config.prompt + 20 > model.config.max_position_embeddings and "cost" in config.parts:
        raise UserError(f"--prompt {config.prompt} leaves no room to generate: the model has"
                        f" {model.config.max_position_embeddings} positions")  # fmt: skip
    text = None
    if set(config.parts) - {"cost"}:
        text = load_spread(config, bundle, tokenizer, TEXT_SET, config.window, config.tokens)
    seconds: dict[str, float] = {}
    missing: list[dict[str, str]] = []
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "model": config.model,
        "bundle": config.bundle if bundle else None,
        "hashes": hashes(config.model, config.revision, config.bundle if bundle else None),
        "versions": versions(),
        "device": str(model.device),
        "config": dataclasses.asdict(config),
        "text": text and _about(text),
        "seconds": seconds,
        "observed": [],
    }
    waiting = list(config.parts)
    drawn = False
    for parts, rows in _measure(config, model, tokenizer, bundle, text, missing, seconds):
        measured = {name: own for name, own in rows.items() if own}
        for name, own in measured.items():
            write_csv(folder / f"{name}.csv", own)
        pictures = draw(measured, folder)
        drawn = drawn or bool(pictures)
        about["observed"] += [
            {"name": name, **dataclasses.asdict(TITLES[name]), "rows": len(own), "picture": name in pictures}
            for name, own in measured.items()
        ]
        waiting = [part for part in waiting if part not in parts]
        lacking = [{"what": f"the part {part}", "why": "the run ended before it"} for part in waiting]
        if not drawn:
            lacking.append({"what": "pictures", "why": "matplotlib is not installed (pip install matplotlib)"})
        write_json(folder / "observations.json", about | {"not_measured": missing + lacking})
    return folder


def _measure(
    config: ObserveConfig,
    model: OPTForCausalLM,
    tokenizer: Any,
    bundle: Bundle | None,
    text: EvalText | None,
    missing: list[dict[str, str]],
    seconds: dict[str, float],
) -> Iterator[tuple[Sequence[str], Rows]]:
    """Parts of the config and their rows, as they are made. What cannot be, and seconds, are added to the others."""
    in_pass = [part for part in PASS_PARTS if part in config.parts]
    if in_pass and text is not None:
        with _timed(seconds, "one pass"):
            rows = one_pass(config, model, text.held)
        yield in_pass, rows
    others = [part for part in PARTS if part in config.parts and part not in PASS_PARTS]
    if others and others != ["cost"]:
        held = load_spread(config, bundle, tokenizer, TEXT_SET, config.window, config.slow_tokens).held
    for part in others:
        rows = {}
        with _timed(seconds, part), torch.no_grad():
            if part == "cost":
                rows = _cost(config, model)
            elif part == "neighbours":
                rows = _neighbours(config, model, bundle, held, missing)
            elif bundle is None:
                missing.append({"what": TITLES[part].title, "why": "no bundle was given (--bundle)"})
            elif part == "selections" and Target.MLP not in bundle.targets:
                missing.append({"what": TITLES[part].title, "why": "the bundle has no predictors for mlp"})
            elif part == "selections":
                with Progress(part, (1 + len(config.densities) * len(COMPARED)) * held.tokens, "token") as shown:
                    options = (config.densities, config.batch_tokens, config.seed, shown.update)
                    rows[part] = selection_rows(model, bundle, held, *options)
            else:
                validation = (config.predictor_set, config.window, config.slow_tokens)
                own = load_spread(config, bundle, tokenizer, *validation).held
                rows[part] = predictor_rows(model, bundle, own, config.batch_tokens)
        yield [part], rows


def one_pass(config: ObserveConfig, model: OPTForCausalLM, held: EvalCorpus) -> Rows:
    """All observations of one dense pass over ``held``, layer by layer. Memory does not grow with the text.

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
        seen = real.to(next(iter(got.values())).device)
        if "residual" in config.parts:
            residual.layer(layer, got, seen)
        if "attention" in config.parts:
            attention.layer(layer, got, seen)
        if {"units", "union"} & set(config.parts):
            sets = units.layer(layer, got, seen)
            if "union" in config.parts:
                unions.layer(layer, got, seen, sets)

    with Progress("observing", held.tokens, "token") as bar, torch.no_grad(), record(model, recorded, on_layer=add):
        for batch in eval_batches(held, config.batch_tokens, model.device):
            real = batch.real
            hidden = model.model.decoder(input_ids=batch.ids, use_cache=False).last_hidden_state
            check_logits(hidden[real.to(hidden.device)], model, batch.ids)
            bar.update(int(real.sum()))
    rows: Rows = {}
    if "residual" in config.parts:
        rows |= {"cosine": residual.cosine_rows(), "norms": residual.norm_rows()}
    if "units" in config.parts:
        rows["sparsity"] = units.sparsity_rows()
    if "attention" in config.parts:
        rows |= {"heads": attention.head_rows(), "uniformity": attention.uniformity_rows()}
    if "union" in config.parts:
        rows["union"] = unions.rows(config.seed)
    return rows


def _neighbours(
    config: ObserveConfig,
    model: OPTForCausalLM,
    bundle: Bundle | None,
    held: EvalCorpus,
    missing: list[dict[str, str]],
) -> Rows:
    density = config.neighbour_density
    efs = sorted({max(ef, round(density * model.config.ffn_dim)) for ef in config.ef})
    with Progress("neighbours", (3 + len(efs)) * held.tokens, "token") as shown:
        found, why = neighbour_rows(model, held, density, efs, config.batch_tokens, bundle, shown.update)
    if why:
        missing.append({"what": "approximate nearest neighbours", "why": why})
    return {"neighbours": found}


def _cost(config: ObserveConfig, model: OPTForCausalLM) -> Rows:
    if config.peak_tflops is None or config.peak_gb_s is None:
        peaks = measure_peaks(model.device, model.dtype)
    else:
        peaks = Peaks(config.peak_tflops, config.peak_gb_s, "given")
    peaks = Peaks(config.peak_tflops or peaks.tera_operations, config.peak_gb_s or peaks.gigabytes, peaks.device)
    return {"peaks": [peaks], "cost": cost_rows(model, peaks, config.batch, config.prompt)}


def draw(rows: Rows, folder: Path) -> list[str]:
    """Draw all that has a picture as NAME.svg and NAME.png. Returns the names, none without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from dejavu_train.evaluation.figure import save
    from papers.deja_vu.observe import pictures

    drawn = []
    for name, picture in pictures.DRAWN.items():
        if name in rows:
            extra = [rows.get("uniformity", [])] if name == "heads" else []
            save(picture(rows[name], *extra), folder / name)
            drawn.append(name)
    return drawn


def _about(text: EvalText) -> dict[str, Any]:
    names = ("name", "sha256", "set_name", "whole", "domain", "window")
    about = {name: getattr(text, name) for name in names}
    return about | {"documents": len(text.held.document_tokens), "tokens": text.held.tokens}


class _timed:
    """Notes how long its block took."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 1)
        logger.info("%s: %.0f s", self.name, self.seconds[self.name])
