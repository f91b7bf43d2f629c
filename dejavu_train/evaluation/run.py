"""Walks from a bundle to results: held-out text, quality rows, decode timing, a picture, generated text."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard import GuardState
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.bundle.spec import check_low_rank
from dejavu_train.data.text import import_text
from dejavu_train.engine import cpu_limits
from dejavu_train.engine.cpu import load_engine
from dejavu_train.engine.ranks.group import Group, launched
from dejavu_train.engine.ranks.part import ranks_of
from dejavu_train.evaluation import report
from dejavu_train.evaluation.attach import attach, numbers_of
from dejavu_train.evaluation.calibrated import described, ignored, opening, timed, writing
from dejavu_train.evaluation.check import check, planned_step
from dejavu_train.evaluation.config import InferConfig, name_texts
from dejavu_train.evaluation.html_report import log_to_wandb, read_results, write_report
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalResult, EvalSetting, evaluate, passes
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.provenance import hashes, new_run
from dejavu_train.evaluation.ranks import together
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import EvalText, behind_start, load_text, trained_text
from dejavu_train.evaluation.timing import (
    DENSE_CPU,
    DENSE_ENGINE,
    ON_CPU,
    ON_GPU,
    TRITON,
    WARM_UP,
    Clock,
    Timing,
    build_engine,
    time_decoding,
    time_engine,
)
from dejavu_train.evaluation.verdict import equal_tokens, exact_report, verdict
from dejavu_train.families import TARGETS, Target, dims_of
from dejavu_train.families.dims import SILENT
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.experiments import record_of, use_wandb_offline_without_key
from dejavu_train.ground.progress import Progress
from dejavu_train.kernels.common.checks import runs_on
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.finite import FiniteLogits
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.models.weight_format import loaded_format
from dejavu_train.predictors.custom import PredictorClass, import_predictor
from dejavu_train.sparse.model import SparseCausalLM
from dejavu_train.sparse.runtime import ENGINES

logger = logging.getLogger(__name__)


def quality_rows(config: InferConfig, targets: Sequence[str] = TARGETS, first: bool = True) -> list[EvalSetting]:
    """The quality rows in the order of the table: dense, the reference of all, as calibrated, what else is asked for.

    Args:
        targets: of the bundle. No row stands at densities of others.
        first: of the first text. Later ones take predicted and oracle rows only, because each row is a pass. They take
            the heads' densities at the largest ``mlp_density``. With ``yardstick_texts`` ``all`` they have every row.
    """
    if not targets:
        return [EvalSetting("dense")]
    whole = first or config.yardstick_texts == "all"
    names = [name for name in config.selections if name in ("predicted", "oracle") or (whole and name != "dense")]
    densities = sorted(config.mlp_density) if Target.MLP in targets else []
    curve = set(config.curve_mlp_density if Target.MLP in targets and whole else ()) - set(densities)
    heads = config.head_density if Target.HEADS in targets else ()
    rows = [EvalSetting("dense"), *(EvalSetting(name, None, None) for name in names)]
    for density in sorted({*densities, *curve}):
        kept = [name for name in names if density in densities or name != "noncontextual"]
        rows += [EvalSetting(name, density) for name in kept]
    if "predicted" in names:
        beside: list[float | None] = [*(densities if whole else densities[-1:])] or [None]
        rows += [EvalSetting("predicted", mlp, share) for mlp in beside for share in heads]
    if "predicted" in names and whole:
        for start in (start for start in config.sparse_from if start):
            rows += [EvalSetting("predicted", None, None, start)]
            rows += [EvalSetting("predicted", density, 1.0, start) for density in densities]
    return list(dict.fromkeys(rows))


def run(config: InferConfig) -> None:
    """Everything that infer.py does. Raises :class:`UserError` for what the user can mend."""
    with together(config) as group:
        _run(config, group)


def _run(config: InferConfig, group: Group | None) -> None:
    """group: of the processes that do this together. None = this one alone."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    bundle, device = checked(config)
    device = device if group is None else group.device
    for line in (opening(config, bundle, device), *ignored(config, bundle)):
        logger.info("%s", line)
    tokenizer = load_tokenizer(config.model, config.revision)
    texts = _load_texts(config, bundle, tokenizer) if config.tokens != 0 or config.timing else []
    if group is None:
        dense = load_model(config.model, config.dtype, device, config.device_map, config.revision)
    else:
        from dejavu_train.engine.ranks.load import load_rank  # imports triton

        dense = load_rank(config.model, bundle, config.dtype, group, config.revision)
        logger.info("%s", group.describe())
    prompt = None if config.generate is None else _prompt(config, dense, tokenizer)
    if config.timing:
        _check_room(config, dense, texts[0].held)
    about = {
        "run": new_run(),
        "config": dataclasses.asdict(config),
        "hashes": hashes(config.model, config.revision, config.bundle),
    }
    scored = _score(config, dense, bundle, texts, about) if config.tokens != 0 else []
    not_measured: list[dict[str, str]] = []
    timings = _time(config, dense, bundle, texts[0].held, not_measured) if config.timing else []
    results = report.results(config.model, config.bundle, scored, timings, _bandwidth(timings)) | about
    results["not_measured"] = not_measured
    if not bundle.specs:
        equal = equal_tokens({timing.backend: timing.tokens for timing in timings})
        results["exact"] = exact_report(results["quality"], bundle.shape, loaded_format(dense)) | equal
    writes = group is None or group.rank == 0
    if timings and writes:  # kept, whatever comes after, as what was scored is
        report.write_results(results, config.output)
    watched = None
    if prompt is not None:  # last: the engine lays weights of the model out anew
        text, watched, accepted = _generate(config, dense, bundle, tokenizer, prompt)
        print(text)
        if accepted is not None:
            results["lossless"] = accepted
            print(report.lossless_line(accepted))
    if watched is not None:
        results["guard"] = watched
        print(report.guard_line(watched))
    print(report.tables(results))
    if not writes:
        return
    report.write_results(results, config.output)
    written = [str(Path(config.output) / "results.json")]
    if scored:
        picture = Path(config.output) / "curve.png"
        if plot_curves(results, picture):
            written.append(str(picture))
        else:
            drawable = any(row["selection"] == "predicted" for row in results["quality"])
            missing = "no curve.png: matplotlib is not installed (pip install matplotlib)"
            logger.info(missing if drawable else "no curve.png: no predicted row was scored")
    written.append(str(write_report(config.output)))
    logger.info("wrote %s", " and ".join(written))
    if said := verdict(results):
        print("\n" + "\n".join(said))
    record = record_of(config.bundle, bundle.metadata) if bundle.specs else None
    if record is not None:
        use_wandb_offline_without_key()
        attach(results, record, wandb_too=config.wandb is None)
    if config.wandb is not None:
        log_to_wandb(read_results(config.output), config.wandb, numbers_of(results), record)


def _predictor_class(config: InferConfig) -> PredictorClass | dict[str, PredictorClass] | None:
    """Class that ``--predictor.class_path`` names, or several by their names."""
    if config.predictor is None:
        return None
    names = str(config.predictor.get("class_path")).split(",")
    classes = {name: import_predictor(config.predictor | {"class_path": name}, "--predictor") for name in names}
    return classes if len(classes) > 1 else classes[names[0]]


def checked(config: InferConfig) -> tuple[Bundle, torch.device]:
    """The bundle and the device, after all checks that need no model.

    Raises:
        UserError: as :func:`dejavu_train.evaluation.check.check`. A bundle that is damaged, of another model, or cannot
            give what is asked. A device that is not there.
    """
    check(config)
    if not config.bundle:
        shape, digest = read_dims(config.model, config.revision), weight_hash(config.model, revision=config.revision)
        bundle = Bundle.exact(config.model, shape, digest)
    else:
        bundle = Bundle.from_pretrained(config.bundle, predictor_class=_predictor_class(config))
    if config.verify == "full" and config.bundle and not bundle.weight_hash.startswith("full:"):
        raise UserError(
            f"--verify full: the bundle {config.bundle} was made with sampled hashes; train with verify full"
        )
    bundle.check_model(config.model, config.revision)
    _check_densities(config, bundle)
    device = resolve_device(config.device)
    _check_engines(config, bundle, device)
    return bundle, device


def print_plan(config: InferConfig) -> None:
    """Check everything that needs no model, then print what would be scored, timed and written. Writes nothing.

    Raises:
        UserError: as :func:`checked`.
    """
    bundle, device = checked(config)
    for line in (opening(config, bundle, device), *ignored(config, bundle)):
        print(line)
    names = list(name_texts(config.text)) + (["a text of your own"] if config.own_text is not None else [])
    tokens = "all" if config.tokens is None else f"about {config.tokens:,}"
    for number, name in enumerate(names if config.tokens != 0 else []):
        rows = quality_rows(config, bundle.targets, first=number == 0)
        print(f"score {name}: {tokens} tokens, {len(rows)} rows, {passes(rows)} passes of the model")
    if config.timing:
        asked = config.timing_backends or ("dense", "the engines of this device")
        print(f"time {', '.join(asked)}: {config.new_tokens} tokens behind a prompt of {config.prompt}")
    if config.generate is not None:
        print(f"generate {config.new_tokens} tokens with {config.backend}")
    if config.timing or config.generate is not None:
        used = [timed(config, bundle)] * config.timing + [writing(config, bundle)] * (config.generate is not None)
        print("\n".join(dict.fromkeys(planned_step(config, each, device) for each in used)))
    print(f"on {device}, results in {config.output}; no mistake was found, the same command without --check begins")


def _check_densities(config: InferConfig, bundle: Bundle) -> None:
    """Let impossible densities, and a guard that cannot be, fail before anything slow starts."""
    rows = quality_rows(config, bundle.targets) if config.tokens != 0 else []
    for pair in {(row.mlp_density, row.head_density): row for row in rows}:
        bundle.at(*pair)
    used = writing(config, bundle)
    if config.guard.every:
        GuardState(config.guard, used.specs, "cpu")


def _check_engines(config: InferConfig, bundle: Bundle, device: torch.device) -> None:
    """Let an engine that is asked for by name refuse this machine, or predictors of your own, before anything slow."""
    asked = [("--timing_backends", name) for name in (config.timing_backends if config.timing else ())]
    for flag, backend in asked + ([("--backend", config.backend)] if config.generate else []):
        if backend in ON_GPU and not (runs_on(device) or launched()):
            raise UserError(f"{flag} {backend} needs a GPU, and this would run on {device}; use gather or cpu")
        if backend in ON_CPU:
            load_engine()
            if flag == "--timing_backends" and config.batch > cpu_limits.MAX_BATCH:
                raise UserError(
                    f"{flag} {backend} times 1 to {cpu_limits.MAX_BATCH} rows at once, got --batch {config.batch}"
                )
        if backend in ENGINES:
            check_low_rank(timed(config, bundle).specs, f"the engine {backend}")


def _load_texts(config: InferConfig, bundle: Bundle, tokenizer: Any) -> list[EvalText]:
    trained = trained_text(bundle, config.bundle)
    named = list(name_texts(config.text).items())
    tokens = config.tokens
    if tokens == 0:  # without scoring one window is enough: timing takes its prompt from it
        named, tokens = named[:1], config.window - 1
    options = (TEXT_SET, config.model, trained, tokenizer, config.window, tokens, config.seed)
    sources: list[tuple[str, str | dict[str, Any]]] = [*named]
    if config.own_text is not None:
        import_text(config.own_text, "--own_text")  # named by its flag where it cannot be imported
        sources.insert(0, (str(config.own_text.get("class_path")).rpartition(".")[2], config.own_text))
    texts = []
    for name, source in sources:
        texts.append(load_text(name, config.source(source), *options))
    return texts


def _score(
    config: InferConfig, dense: Any, bundle: Bundle, texts: Sequence[EvalText], about: dict[str, Any]
) -> list[tuple[EvalText, list[EvalResult]]]:
    """Score every text, writing results.json after each: what was scored is kept, whatever comes after."""
    asked = [quality_rows(config, bundle.targets, first=text is texts[0]) for text in texts]
    total = sum(text.held.tokens * passes(rows) for text, rows in zip(texts, asked, strict=True))
    scored = []
    with Progress("scoring", total, "token") as bar:
        for text, rows in zip(texts, asked, strict=True):
            bar.describe(f"scoring {text.name}")
            qualities = evaluate(dense, bundle, text.held, rows, config.batch_tokens, config.seed, bar.update)
            scored.append((text, qualities))
            report.write_results(report.results(config.model, config.bundle, scored, []) | about, config.output)
    return scored


def _sparse(dense: Any, bundle: Bundle, backend: str, guard: Guard | None = None, stored: str | None = None) -> Any:
    if backend == "dense":
        return dense
    return SparseCausalLM.from_model(dense, bundle, backend, sparse_from="prompt", guard=guard, stored=stored)


def _prompt(config: InferConfig, dense: Any, tokenizer: Any) -> torch.Tensor:
    """(1, T) token ids of ``--generate``."""
    ids = torch.tensor([behind_start(tokenizer, str(config.generate), "--generate")])
    room = dims_of(dense.config).max_positions
    if ids.shape[1] >= room:
        raise UserError(f"--generate: the prompt has {ids.shape[1]} tokens, the model {room} positions; shorten it")
    return ids


def _generate(
    config: InferConfig, dense: Any, bundle: Bundle, tokenizer: Any, ids: torch.Tensor
) -> tuple[str, dict[str, Any] | None, dict[str, float] | None]:
    """The text, what the guard measured where one is asked for, and what was accepted under lossless."""
    new_tokens = min(config.new_tokens, dims_of(dense.config).max_positions - ids.shape[1])
    if new_tokens < config.new_tokens:
        logger.warning(
            "--generate: %d new tokens, not %d: the prompt has %d tokens, the model %d positions",
            new_tokens, config.new_tokens, ids.shape[1], dims_of(dense.config).max_positions,
        )  # fmt: skip
    if config.backend in (DENSE_ENGINE, DENSE_CPU):
        generated = build_engine(config.backend, dense, stored=config.stored).generate(ids.tolist(), new_tokens)
        return str(tokenizer.decode([*ids[0].tolist(), *generated[0]], skip_special_tokens=True)), None, None
    model = _sparse(dense, writing(config, bundle), config.backend, config.guard, config.stored)
    ids = ids.to(model.device)
    clock = Clock()
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 1, "streamer": clock}
    settings |= config.drafting if isinstance(model, SparseCausalLM) else {}
    if config.backend == "dense":
        settings["logits_processor"] = [FiniteLogits(model)]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    if len(clock.times) > 2:
        used = "dense"
        if isinstance(model, SparseCausalLM):  # auto is known by now
            used = f"{model.backend}, at {described(model.bundle)},"
        logger.info("%s generated %.1f tokens a second", used, clock.rate)
    watched = model.guard_report() if config.guard.every else None
    accepted = model.lossless_report() if isinstance(model, SparseCausalLM) else None
    return str(tokenizer.decode(out[0], skip_special_tokens=True)), watched, accepted


def _bandwidth(timings: Sequence[Timing]) -> float | None:
    """GB/s at which this machine reads memory: the yardstick of engines for CPUs, where one was timed."""
    if not any(timing.backend in ON_CPU for timing in timings):
        return None
    from dejavu_train.engine.cpu.bandwidth import read_bandwidth  # imports numba

    return read_bandwidth()


def _time(
    config: InferConfig, dense: Any, bundle: Bundle, held: EvalCorpus, not_measured: list[dict[str, str]]
) -> list[Timing]:
    """Dense first: gather lays some weights of the shared model out anew. What refuses goes to ``not_measured``, and
    gather stands in for a sparse engine."""
    longest = max(held.windows, key=len)
    prompt = torch.tensor([longest[: config.prompt]]).repeat(config.batch, 1)
    timings = []
    engines: tuple[str, ...] = ON_CPU if dense.device.type == "cpu" else ON_GPU
    if bundle.shape.activation not in SILENT:
        engines = engines[1:]  # which read all rows
    if config.device_map is not None:
        engines = ()  # the engines run on one device
    every: tuple[str, ...] = ("dense", *engines) if ranks_of(dense) is None else ON_GPU[1:]
    if not bundle.specs:
        every = tuple(name for name in every if name not in ENGINES)
    waiting: list[str] = sorted(config.timing_backends or every, key=lambda name: name != "dense")
    for backend in waiting:
        logger.info("timing %s", backend)
        try:
            timings.append(_time_one(config, dense, bundle, backend, prompt))
        except UserError as error:
            if config.timing_backends or ranks_of(dense) is not None:  # asked for by name, or by all ranks
                raise
            logger.info("%s is not timed: %s", backend, error)
            not_measured.append({"what": f"timing of {backend}", "why": str(error)})
            if backend in ENGINES:
                waiting.append("gather")  # which generate() takes then
    return timings


def _time_one(config: InferConfig, dense: Any, bundle: Bundle, backend: str, prompt: torch.Tensor) -> Timing:
    used = None if backend.startswith("dense") else timed(config, bundle)
    if backend in (*ON_CPU, *ON_GPU):
        timing = time_engine(dense, used, backend, prompt, config.new_tokens, config.stored)
    else:
        timing = time_decoding(_sparse(dense, timed(config, bundle), backend), backend, prompt, config.new_tokens)
    mlp, heads = (1.0 if used is None else used.mean_density(target) for target in TARGETS)
    staged = used is not None and any(spec.kind == "cascade" and not spec.dense for spec in used.specs.values())
    second = backend != TRITON if staged else None
    return dataclasses.replace(timing, asked_mlp_density=mlp, asked_head_density=heads, second_stage=second)


def _check_room(config: InferConfig, dense: Any, held: EvalCorpus) -> None:
    """Raise :class:`UserError` unless the prompt and the new tokens of timing fit text and model."""
    longest, room = len(max(held.windows, key=len)), dims_of(dense.config).max_positions
    if longest < config.prompt or config.prompt + config.new_tokens + WARM_UP > room:
        raise UserError(
            f"--prompt {config.prompt} and --new_tokens {config.new_tokens} do not fit: the longest window has"
            f" {longest} tokens, the model {room} positions; choose less"
        )
