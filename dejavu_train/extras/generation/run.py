"""Generates from held-out prompts, dense and sparse, and writes how far they are apart.

    dejavu generation --config configs/generation/opt-mini.yaml

Perplexity of a text that is given does not show how errors accumulate in a text that is being made. The reference is
the dense model through the same backend, so that all models round alike and draw the same random numbers. Into the
folder ``generation`` go generation.json (conditions, rows), rows.csv, positions.csv and the picture.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.folder import require_model
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.cli.parser import parse
from dejavu_train.evaluation.calibrated import described, moved
from dejavu_train.evaluation.html_report import rows_table
from dejavu_train.evaluation.perplexity import increase
from dejavu_train.evaluation.provenance import hashes, versions
from dejavu_train.evaluation.rows import write_csv
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import EvalText, load_spread
from dejavu_train.extras.generation import measures
from dejavu_train.extras.generation.config import DECODINGS, GenerationConfig
from dejavu_train.extras.generation.picture import draw
from dejavu_train.families import TARGETS, Target, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_json
from dejavu_train.ground.progress import Progress, set_up_logging
from dejavu_train.ground.table import table
from dejavu_train.kernels.common.checks import runs_on
from dejavu_train.models.load import drop_generation_defaults, load_model, load_tokenizer, resolve_device
from dejavu_train.sparse.model import SparseCausalLM

logger = logging.getLogger(__name__)

SCHEMA = 1
FOLDER = "generation"
NO_GUARD = Guard(every=0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A sparse model. ``asked_mlp_density``: None is as calibrated. ``thresholds``: ``still`` (the bundle's) or
    ``moved``. ``guard_every`` 0 is no guard."""

    asked_mlp_density: float | None
    sparse_from: str
    guard_every: int
    thresholds: str


@dataclasses.dataclass(frozen=True)
class Continuations:
    """Continuations of all prompts: tokens (P, N), their nats and greedy choices under the dense model (P, N)."""

    tokens: Tensor
    nats: Tensor
    greedy: Tensor


@dataclasses.dataclass(frozen=True)
class GenerationRow:
    """A sparse model under one decoding, beside the dense one.

    ``agreement`` is the mean over positions, ``late_agreement`` over the last quarter. ``median_divergence`` counts the
    tokens that are the same before the first other one. It is ``new_tokens`` where half the texts never part.
    ``dense_choice`` (greedy) is the share of tokens that the dense model would have chosen behind the same past. It
    does not sink only because two texts have parted. ``perplexity`` is of the generated text under the dense model.
    ``change`` is that over the dense model's own text. Its error is a paired bootstrap over prompts. ``repetition``
    is the share of repeated 4-grams. ``candidates`` and ``retained_mass`` are what a guard measured on dense tokens.
    """

    decoding: str
    asked_mlp_density: float
    asked_head_density: float
    sparse_from: str
    guard_every: int
    thresholds: str
    prompts: int
    new_tokens: int
    agreement: float
    late_agreement: float
    median_divergence: float
    diverged: float
    dense_choice: float | None
    perplexity: float
    dense_perplexity: float
    change: float
    error: float | None
    repetition: float
    dense_repetition: float
    candidates: float | None
    retained_mass: float | None


@dataclasses.dataclass(frozen=True)
class PositionRow:
    """The same at one position behind the prompt, from 0 on. ``nats`` are means under the dense model."""

    decoding: str
    asked_mlp_density: float
    sparse_from: str
    guard_every: int
    thresholds: str
    position: int
    agreement: float
    same_so_far: float
    dense_choice: float | None
    nats: float
    dense_nats: float


def read_config(argv: Sequence[str] | None) -> GenerationConfig:
    """Flags (None: those of the process) and YAML files as a checked config. Raises as :func:`parse`."""
    config = parse(GenerationConfig, argv, "dejavu generation", str(GenerationConfig.__doc__))
    config.check()
    return config


def variants(config: GenerationConfig, bundle: Bundle) -> list[Variant]:
    """All that is compared: without a guard from every start, then with guards from the prompt on.

    A bundle without predictors of neurons has no densities of them. A guard watches what is sparse, and moves no
    thresholds where the largest logits are selected.
    """
    densities: list[float | None] = [*(config.mlp_density if Target.MLP in bundle.targets else ())] or [None]
    made = [Variant(d, str(start), 0, "still") for d in densities for start in config.sparse_from]
    controls = [control for control in config.control if not (control and bundle.selects_top_k(Target.MLP))]
    guards = [(every, control) for control in controls for every in config.every]
    for density in densities:
        specs = moved(bundle, density, config.head_density).specs.values()
        if not all(spec.dense for spec in specs):
            made += [Variant(density, "prompt", n, "moved" if c else "still") for n, c in guards]
    return made


def choose_backend(config: GenerationConfig, positions: int, device: torch.device, bundle: Bundle) -> str:
    """The backend of all models.

    Args:
        positions: of the model.
        device: of the model.
    Raises:
        UserError: too few positions, a device without the backend, or a bundle that cannot do what is asked.
    """
    if config.prompt + config.new_tokens > positions:
        raise UserError(f"--prompt {config.prompt} and --new_tokens {config.new_tokens} exceed the model's"
                        f" {positions} positions; choose less")  # fmt: skip
    if config.backend == "triton" and not runs_on(device):
        raise UserError(f"--backend triton needs a GPU, and this would run on {device}; use gather")
    for variant in variants(config, bundle):
        used = moved(bundle, variant.asked_mlp_density, config.head_density)
        if variant.guard_every:
            GuardState(_guard(variant), used.specs, "cpu")
    if config.backend == "auto":
        return "triton" if device.type == "cuda" else "gather"
    return config.backend


def compare_generation(
    config: GenerationConfig, dense: PreTrainedModel, bundle: Bundle, prompts: Tensor, backend: str
) -> Iterator[tuple[list[GenerationRow], list[PositionRow]]]:
    """Generate with the dense model and with every variant, whose rows come as they are made.

    Args:
        dense: in evaluation mode, on its device. The backend lays some of its weights out anew, in place, and its own
            defaults of ``generate()`` are dropped.
        prompts: (P, T) ids.
        backend: of :func:`choose_backend`.
    """
    drop_generation_defaults(dense)
    asked = variants(config, bundle)
    with Progress("generating", (1 + len(asked)) * len(DECODINGS) * len(prompts), "text") as shown:
        reference = SparseCausalLM.from_model(dense, bundle.at(1.0, 1.0), backend)
        dense_texts = {
            decoding: _continue(config, reference, dense, prompts, decoding, shown) for decoding in DECODINGS
        }
        for variant, model in _models(config, dense, bundle, backend, asked):
            rows: list[GenerationRow] = []
            positions: list[PositionRow] = []
            for decoding in DECODINGS:
                model.reset_guard()
                model.sparse_from = "prompt" if variant.sparse_from == "prompt" else 0
                made = _continue(config, model, dense, prompts, decoding, shown)
                used = {target: model.bundle.mean_density(target) for target in TARGETS}
                about = dataclasses.asdict(variant) | {"asked_mlp_density": used[Target.MLP]}
                watched = model.guard_report()
                rows.append(_row(about, used[Target.HEADS], decoding, made, dense_texts[decoding], watched))
                positions += _positions(about, decoding, made, dense_texts[decoding])
            yield rows, positions


def _models(
    config: GenerationConfig, dense: PreTrainedModel, bundle: Bundle, backend: str, asked: Sequence[Variant]
) -> Iterator[tuple[Variant, SparseCausalLM]]:
    """A model for every variant. Two that differ in where sparsity begins share one."""
    before: tuple[float | None, Guard] | None = None
    for variant in asked:
        guard = _guard(variant)
        if before != (variant.asked_mlp_density, guard):
            before = (variant.asked_mlp_density, guard)
            used = moved(bundle, variant.asked_mlp_density, config.head_density)
            logger.info("%s: %s", config.bundle, described(used))
            model = SparseCausalLM.from_model(dense, used, backend, guard=guard)
        yield variant, model


def _guard(variant: Variant) -> Guard:
    return Guard(variant.guard_every, variant.thresholds == "moved") if variant.guard_every else NO_GUARD


def load_prompts(config: GenerationConfig, tokenizer: Any, bundle: Bundle) -> tuple[EvalText, Tensor]:
    """The text, and (P, T) ids from </s> on: beginnings of documents, and further pieces where these are too few."""
    tokens = 2 * config.prompts * (config.prompt - 1)  # some windows are the short ends of documents
    text = load_spread(config, bundle, tokenizer, TEXT_SET, config.prompt, tokens)
    whole = [window for window in text.held.windows if len(window) == config.prompt][: config.prompts]
    if len(whole) < config.prompts:
        raise UserError(
            f"{config.text} has {len(whole)} prompts of {config.prompt} tokens, not {config.prompts}; ask for fewer or"
            " shorter ones"
        )
    return text, torch.tensor(whole)


def _continue(
    config: GenerationConfig,
    model: SparseCausalLM,
    dense: PreTrainedModel,
    prompts: Tensor,
    decoding: str,
    shown: Progress,
) -> Continuations:
    torch.manual_seed(config.seed)  # the same draws for every model
    settings: dict[str, Any] = {"do_sample": False}
    if decoding == "sampled":
        settings = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    settings |= {"max_new_tokens": config.new_tokens, "eos_token_id": None, "pad_token_id": 1}
    settings["lossless"] = False  # whatever the bundle asks for: sparse text is what is compared
    made = []
    for ids in prompts.split(config.batch):
        ids = ids.to(model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        made.append(out[:, ids.shape[1] :].cpu())
        shown.update(len(ids))
    tokens = torch.cat(made)
    return Continuations(tokens, *measures.score(dense, prompts, tokens))


def _row(
    about: dict[str, Any],
    head_density: float,
    decoding: str,
    made: Continuations,
    dense: Continuations,
    watched: dict[str, Any] | None,
) -> GenerationRow:
    tokens, reference = made.tokens, dense.tokens
    n_prompts, n = tokens.shape
    parted, same = measures.divergence(tokens, reference), measures.agreement(tokens, reference)
    nats = (made.nats.sum(1).numpy(), dense.nats.sum(1).numpy())
    change, error = increase(*nats, [n] * n_prompts)
    measured = (watched or {}).get(Target.MLP, {})
    return GenerationRow(
        decoding=decoding,
        **about,
        asked_head_density=head_density,
        prompts=n_prompts,
        new_tokens=n,
        agreement=float(same.mean()),
        late_agreement=float(same[-(n // 4) :].mean()),
        median_divergence=float(parted.double().quantile(0.5)),
        diverged=float((parted < n).double().mean()),
        dense_choice=float(made.greedy.double().mean()) if decoding == "greedy" else None,
        perplexity=math.exp(float(made.nats.mean())),
        dense_perplexity=math.exp(float(dense.nats.mean())),
        change=change,
        error=error,
        repetition=float(measures.repetition(tokens).mean()),
        dense_repetition=float(measures.repetition(reference).mean()),
        candidates=measured.get("candidates"),
        retained_mass=measured.get("retained_mass"),
    )


def _positions(about: dict[str, Any], decoding: str, made: Continuations, dense: Continuations) -> list[PositionRow]:
    columns = {
        "agreement": measures.agreement(made.tokens, dense.tokens),
        "same_so_far": measures.same_so_far(made.tokens, dense.tokens),
        "nats": made.nats.mean(0),
        "dense_nats": dense.nats.mean(0),
    }
    chosen = made.greedy.double().mean(0) if decoding == "greedy" else None
    rows = []
    for i in range(made.tokens.shape[1]):
        values: dict[str, Any] = {name: float(column[i]) for name, column in columns.items()}
        values |= {"position": i, "dense_choice": None if chosen is None else float(chosen[i])}
        rows.append(PositionRow(decoding=decoding, **about, **values))
    return rows


def write_generation(
    config: GenerationConfig, dense: PreTrainedModel, tokenizer: Any, bundle: Bundle
) -> tuple[Path, list[GenerationRow]]:
    """Measure, and write the rows as they come. The folder and its rows.

    Raises:
        UserError: what :func:`choose_backend` and :func:`load_prompts` raise.
    """
    folder = Path(config.output) / FOLDER
    if Path(config.output).is_file() or folder.is_file():
        raise UserError(f"--output {config.output} or {folder} is a file; choose another folder")
    # Before anything slow: what the bundle lacks is told here.
    backend = choose_backend(config, dims_of(dense.config).max_positions, dense.device, bundle)
    text, prompts = load_prompts(config, tokenizer, bundle)
    about = {
        "schema": SCHEMA,
        "model": config.model,
        "bundle": config.bundle,
        "hashes": hashes(config.model, config.revision, config.bundle),
        "versions": versions(),
        "device": str(dense.device),
        "config": dataclasses.asdict(config),
        "text": {"name": text.name, "sha256": text.sha256, "set_name": text.set_name, "domain": text.domain},
    }
    rows: list[GenerationRow] = []
    positions: list[PositionRow] = []

    def write(drawn: bool) -> None:
        write_csv(folder / "rows.csv", rows)
        write_csv(folder / "positions.csv", positions)
        about["rows"] = [dataclasses.asdict(row) for row in rows]
        write_json(folder / "generation.json", about | {"picture": drawn})

    for more, places in compare_generation(config, dense, bundle, prompts, backend):
        rows += more
        positions += places
        write(drawn=False)
    write(draw(rows, positions, folder / "generation"))
    return folder, rows


def shown_rows(rows: Sequence[GenerationRow]) -> str:
    """Rows for people."""
    names = ["decoding", "sparse_from", "guard_every", "thresholds", "agreement", "median_divergence", "dense_choice"]
    names += ["perplexity", "change", "error", "repetition", "dense_repetition"]
    shown = rows_table("", [{"neurons": row.asked_mlp_density} | {n: getattr(row, n) for n in names} for row in rows])
    return table(shown.headings, shown.cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, generate, write."""
    config = read_config(argv)
    require_model(config.model, config.bundle)
    set_up_logging()
    transformers.utils.logging.disable_progress_bar()
    bundle = Bundle.from_pretrained(config.bundle)
    bundle.check_model(config.model, config.revision)
    tokenizer = load_tokenizer(config.model, config.revision)
    dense = load_model(config.model, config.dtype, resolve_device(config.device), None, config.revision)
    folder, rows = write_generation(config, dense, tokenizer, bundle)
    print(shown_rows(rows))
    logger.info("wrote %s", folder)
