"""Walks from text to bundle and does whatever is missing: collect, train all (layer, target), tune, calibrate, bundle.

Several invocations may share one output folder, each with its own ``--layers``. Collecting happens once under a lock,
and every job has a lock. ``--jobs`` starts workers on this host, ``--scheduler`` on others (crew.py). Whoever finishes
the last job calibrates and bundles.
"""

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dejavu_train.bundle.allocation import read_curve
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.spec import GOOD_MASS
from dejavu_train.calibration.by_layers import ByLayers, Sharing
from dejavu_train.calibration.calibrate import choose, measure_curves
from dejavu_train.cli.registry import extra
from dejavu_train.data.collect import check_same_text, collect
from dejavu_train.data.shard_reader import active_densities, recorded_windows
from dejavu_train.families import TARGETS, ModelDims, Target, UnitKey
from dejavu_train.families.dims import listed
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, read_sealed, remove_leftovers, replacing, sha256_file, write_sealed
from dejavu_train.ground.locks import locked
from dejavu_train.ground.table import table
from dejavu_train.models.config_values import read_values
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model, resolve_device, weight_hash
from dejavu_train.models.weight_format import WeightFormat, stored_format
from dejavu_train.run.check import check
from dejavu_train.run.crew import COLLECT, REST, calibrate_together, collect_together, run_elsewhere, train_together
from dejavu_train.run.folder import claimed_folder
from dejavu_train.run.own_text import sampled, tokens_to_sample
from dejavu_train.training.build import check_classes, predictor_classes
from dejavu_train.training.config import RunConfig, parse_layers
from dejavu_train.training.experiment import Experiment
from dejavu_train.training.finetune import finetune
from dejavu_train.training.job import (
    has_predictor,
    is_finished,
    job_folder,
    run_job,
    stored_stage,
    summary_rows,
)
from dejavu_train.training.loggers import build_loggers
from dejavu_train.training.rehearsal import rehearse
from dejavu_train.training.stages import Stage, calibrate_stage, curves_stage, train_stage, tune_stage
from dejavu_train.training.trainer import build_trainer, resolved_arguments, start_device
from dejavu_train.training.verdict import most_recall

logger = logging.getLogger(__name__)
STATES = "calibration-states"  # of windows between two layers, in the run's folder


def run(config: RunConfig) -> None:
    """Do what is missing between text and bundle. Nothing if the bundle is there.

    Raises:
        UserError: a mistake in the configuration, or a folder that holds something else.
    """
    given = config
    config, shape = checked(config)
    # The stages are those of the configuration as it was given; where it leaves a density open, predictors that were
    # trained before keep theirs.
    stages: dict[str, Stage] = {target: train_stage(config, target) for target in TARGETS}
    jobs, own = config.all_jobs(shape), config.own_jobs(shape)
    if bare := [layer for layer in parse_layers(config.layers, shape.n_layers) if not shape.targets_of(layer)]:
        logger.info("layers %s have no target: nothing of them is recorded, and they run as they are", listed(bare))
    mirrored(config, "pull")
    if not Path(config.output).exists():
        tokens_to_sample(config)  # what cannot be written by layers is refused before there is a folder
    with claimed_folder(config, given) as resolved:
        if config.scheduler == "local" or calibrate_stage(config).matches(bundle_stage(_bundle_folder(config))):
            _run(config, resolved, stages, jobs, own)
        else:
            print(run_elsewhere(config, own, stages))


def checked(config: RunConfig, only_plan: bool = False) -> tuple[RunConfig, ModelDims]:
    """The configuration with the trainer's arguments and all that is auto written out, and the model's sizes.

    All checks before any work are made.

    Args:
        only_plan: as in :func:`dejavu_train.run.check.check`.
    Raises:
        UserError: as :func:`dejavu_train.run.check.check`. A class, a logger or an argument of the trainer that
            cannot be. A device that is not there.
    """
    shape = check(config, only_plan)
    resolve_device(config.collect.device)
    config = config.settled(shape)
    check_classes(config, shape)
    config = dataclasses.replace(config, trainer=resolved_arguments(config.trainer))
    check_trainer(config, config.all_jobs(shape)[0])
    return config, shape


def _run(
    config: RunConfig, resolved: RunConfig, stages: Mapping[str, Stage], jobs: Sequence[UnitKey], own: Sequence[UnitKey]
) -> None:
    output = Path(config.output)
    folder, stage = _bundle_folder(config), calibrate_stage(config)
    if stage.matches(bundle_stage(folder)):
        try:
            bundle = Bundle.from_pretrained(folder, predictor_class=predictor_classes(config))
        except UserError as error:
            logger.info("the bundle is written anew: %s", error)
            shutil.rmtree(folder)
        else:
            bundle.check_model(config.model, config.revision)
            check_same_text(bundle.metadata["text"], config.text, f"{folder} was made")
            if (experiment := Experiment(config)).interrupted:
                experiment.close(bundle, jobs)
            mirrored(config, "push_bundle")
            print(f"{folder} is complete; nothing to do")
            return
    if notice := unused_heads(config, jobs):
        logger.info("%s", notice)
    _collect(config, resolved)
    experiment, began = Experiment(config), time.monotonic()
    on_finished = experiment.log_job if own == jobs else _forget
    train_together(config, own, stages, on_finished)
    _train(resolved, stages, own, on_finished)
    logger.info("trained in %.0f s", time.monotonic() - began)

    mirrored(config, "pull")  # what other hosts have trained meanwhile
    open_jobs = [job for job in jobs if not is_finished(output, job, stages[job[1]])]
    if open_jobs:
        names = ", ".join(f"layer {layer} {target}" for layer, target in open_jobs)
        print(f"predictors still open: {names}; the bundle is written when they are trained")
        return
    with locked(output / ".holders" / "bundle", "another process is writing the bundle; waiting for it"):
        before = bundle_stage(folder)
        if not stage.matches(before):
            remove_leftovers(folder)  # the lock says nobody else is writing
            if before is not None:
                logger.info("%s: calibrated anew, %s", folder, stage.difference(before))
            trained, calibrated = resolved.mlp.density, config.calibrate.mlp_density
            if config.mlp.enabled and trained != calibrated and config.calibrate.budget is None:
                logger.info("the MLPs' predictors were trained for density %g, calibrated for %g", trained, calibrated)
            experiment.record.write()
            experiment.close(finish(config, output, jobs, stage), jobs)
            mirrored(config, "push_bundle")
    print(f"bundle: {folder}")


def work(config: RunConfig, part: str) -> None:
    """Do a part of a run, as a worker of crew.py: collect, train what is open, or all that is missing.

    Raises:
        UserError: as :func:`run`.
    """
    if part == REST:
        run(config)
        return
    given = config
    config, shape = checked(config)
    stages: dict[str, Stage] = {target: train_stage(config, target) for target in TARGETS}
    with claimed_folder(config, given) as resolved:
        if part == COLLECT:
            _collect(config, resolved)
            return
        _train(resolved, stages, config.own_jobs(shape), _forget)


def _collect(config: RunConfig, resolved: RunConfig) -> None:
    """Make the activations complete."""
    full_hash, activations = config.verify == "full", Path(config.output) / "activations"
    share = partial(collect_together, config, activations) if _shares(config) else None
    how = (config.seed, config.revision, full_hash, sampled(config), share)
    collect(config.model, config.text, config.collect, activations, *how)
    mirrored(config, "push_activations")
    say_what_density_holds(resolved, activations)


def _shares(config: RunConfig) -> bool:
    """Whether several processes of this host run by layers."""
    return config.jobs != 1 and config.collect.device in ("auto", "cpu", "cuda")


def _train(
    resolved: RunConfig, stages: Mapping[str, Stage], own: Sequence[UnitKey], on_finished: Callable[[UnitKey], None]
) -> None:
    """Train one after another what nobody else is training."""
    output = Path(resolved.output)
    for number, job in enumerate(own, 1):
        title = f"[{number}/{len(own)}] layer {job[0]} {job[1]}"
        if is_finished(output, job, stages[job[1]]):
            logger.info("%s: trained before", title)
            mirrored(resolved, "push_predictor", job)
            continue
        before = stored_stage(job_folder(output, job)) if has_predictor(output, job) else None
        again = f" anew, {stages[job[1]].difference(before)}" if before else ""
        if again:
            logger.info("%s: training%s", title, again)
        if run_job(resolved, job, title, stages[job[1]]):
            mirrored(resolved, "push_predictor", job)
            on_finished(job)
        else:
            logger.info("%s: another process is training it", title)


def mirrored(config: RunConfig, what: str, *given: Any) -> None:
    """Call a function of :mod:`dejavu_train.extras.hosts.mirror`, where the run is kept in a store as well."""
    if config.store is not None:
        getattr(extra("hosts.mirror", "--store"), what)(config, *given)


def _forget(job: UnitKey) -> None:
    """An invocation that trains a part leaves the loggers to the one that writes the bundle."""


def _bundle_folder(config: RunConfig) -> Path:
    return Path(config.output) / config.bundle


def say_what_density_holds(config: RunConfig, activations: Path) -> None:
    """Warn where fewer neurons will be selected than are active in the mean: not even a perfect predictor finds all."""
    density, active = config.mlp.density, active_densities(activations)
    mean = sum(active.values()) / len(active)
    if config.mlp.enabled and density is not None and density < mean:
        logger.warning(
            "%.1f %% of the neurons are active, more than mlp.density %g can hold: recall is at most %.3f in the mean;"
            " what counts is the retained mass; raise --mlp.density to keep more of it",
            100 * mean,
            density,
            density / mean,
        )


def unused_heads(config: RunConfig, jobs: Sequence[UnitKey]) -> str:
    """Notice before a run that trains predictors of heads and then selects none. "" where they are used."""
    heads = sum(job.target == Target.HEADS for job in jobs)
    if not heads or config.calibrate.head_density < 1 or config.calibrate.budget is not None:
        return ""
    return (
        f"{heads} of {len(jobs)} predictors are of heads. They are trained, and the bundle does not use them, because"
        " calibrate.head_density is 1: every head runs. --heads.enabled false leaves them out,"
        " --calibrate.head_density 0.85 uses them"
    )


def bundle_stage(folder: Path, name: str = "stage") -> Any:
    """The stage that a bundle's folder says made it, or its ``curves``. None where there is no bundle."""
    if not (folder / "bundle.json").is_file():
        return None
    stored = read_json(folder / "bundle.json", "the bundle")
    metadata = stored.get("metadata") if isinstance(stored, dict) else None
    return (metadata.get(name) if isinstance(metadata, dict) else None) or {}


def measured_before(config: RunConfig, curves: Stage) -> Bundle | None:
    """A bundle of this run with the very curves that ``curves`` would measure, at whatever densities. None: there is
    none that can be read."""
    for path in sorted(Path(config.output).glob("*/bundle.json")):
        try:
            if not curves.matches(bundle_stage(path.parent, "curves")):
                continue
            bundle = Bundle.from_pretrained(path.parent, predictor_class=predictor_classes(config))
        except UserError as error:
            logger.info("%s: not used, %s", path.parent, error)
            continue
        logger.info("calibration curves: those of %s", path.parent)
        return bundle
    return None


def finish(config: RunConfig, output: Path, jobs: Sequence[UnitKey], stage: Stage) -> Bundle:
    """Calibrate, write the bundle, and show what it has. ``summary.csv`` has what training had."""
    activations = output / "activations"
    windows = recorded_windows(activations, "calibration") if config.calibrate.sensitivity_tokens else None

    def load_dense() -> Any:
        run, device = config.collect, resolve_device(config.collect.device)
        if run.by_layers:
            walk = LayerWalk(config.model, device, run.dtype, config.revision)
            start = partial(calibrate_together, config)
            sharing = Sharing(config.model, config.revision, run.device, run.dtype, start) if _shares(config) else None
            return ByLayers(walk, output / STATES, weight_hash(config.model, revision=config.revision), sharing)
        return load_model(config.model, run.dtype, device, run.device_map, config.revision)

    def measure(folder: Path) -> Bundle:
        asked = [target for target in TARGETS if config.predictor(target).enabled]
        device, classes = config.collect.device, predictor_classes(config)
        return measure_curves(folder, activations, config.calibrate, windows, load_dense, device, asked, classes)

    folder = output / "predictors"
    weights = stored_format(read_values(config.model, config.revision))
    if config.tune.steps:
        tuning = tune_stage(config)
        if not tuning.matches(stored_stage(output / "tuned")):
            settings = dataclasses.replace(config.calibrate, head_density=1.0)  # one error at a time: see TuneConfig
            if config.tune.density is not None:
                settings = dataclasses.replace(
                    settings, mlp_density=config.tune.density, budget=None, retained_mass=None
                )
            finetune_all(config, output, jobs, choose(measure(folder), settings, weights), tuning, weights)
        folder = output / "tuned"
    curves = curves_stage(config)
    measured = measured_before(config, curves) or measure(folder)
    bundle = choose(measured, config.calibrate, weights)
    about: dict[str, Any] = {"stage": stage.to_json(), "curves": curves.to_json()}
    family = read_values(config.model, config.revision)["model_type"]
    if family != "opt":  # what a card is tagged with
        about["family"] = family
    if config.tune.steps:
        about["untuned_layers"] = untuned = untuned_layers(folder, bundle)
        if untuned:
            logger.warning(
                "layers %s were dense when the others were tuned and keep their predictors as trained; set tune.density"
                " to tune at the densities of this bundle",
                ", ".join(map(str, untuned)),
            )
    bundle = dataclasses.replace(bundle, model=config.model, metadata=bundle.metadata | about)
    bundle.save_pretrained(output / config.bundle)
    columns, rows = summary_rows(output, jobs)
    with replacing(output / "predictors" / "summary.csv") as path:
        path.write_text("\n".join(",".join(str(value) for value in row) for row in [columns, *rows]) + "\n")
    print(bundle_summary(bundle))
    return bundle


def finetune_all(
    config: RunConfig, output: Path, jobs: Sequence[UnitKey], bundle: Bundle, stage: Stage, weights: WeightFormat
) -> None:
    """Tune the neuron predictors of ``bundle`` in the model. ``tuned`` holds those, and the others as trained."""
    run = config.collect
    dtype = "bfloat16" if run.dtype == "float16" else run.dtype  # gradients of a divergence vanish in float16
    device = start_device(config.trainer)
    model: Any
    if run.by_layers:
        model = LayerWalk(config.model, device, dtype, config.revision)
    else:
        model = load_model(config.model, dtype, device, run.device_map, config.revision)
    windows = recorded_windows(output / "activations", "train")
    state = output / "tuning.ckpt"
    tuned, metrics = finetune(model, bundle, windows, config.tune, weights, config.seed, state)
    folder = output / ".tmp-tuned"
    shutil.rmtree(folder, ignore_errors=True)
    for layer, target in jobs:
        source = job_folder(output, UnitKey(layer, target))
        kept_folder = folder / source.relative_to(output / "predictors")
        shutil.copytree(
            source, kept_folder, ignore=lambda _, names: {name for name in names if not name.startswith("predictor.")}
        )
        if target == Target.MLP and layer in tuned:
            tensors = {name: tensor.contiguous() for name, tensor in tuned[layer].state_dict().items()}
            save_file(tensors, kept_folder / "predictor.safetensors")
            metadata = read_sealed(kept_folder / "predictor.json", "a finished predictor")
            metadata |= {"sha256": sha256_file(kept_folder / "predictor.safetensors"), "tuned": metrics[-1]}
            write_sealed(kept_folder / "predictor.json", metadata)
    write_sealed(folder / "stage.json", stage.to_json() | {"layers": sorted(tuned)})
    shutil.rmtree(output / "tuned", ignore_errors=True)
    folder.rename(output / "tuned")
    state.unlink(missing_ok=True)


def untuned_layers(tuned: Path, bundle: Bundle) -> list[int]:
    """Layers whose neurons ``bundle`` selects by predictors as trained: they were dense when the others were tuned."""
    layers = (stored_stage(tuned) or {}).get("layers")
    sparse = [layer for (layer, target), spec in bundle.specs.items() if target == Target.MLP and not spec.dense]
    return [] if layers is None else sorted(set(sparse) - set(layers))


def check_trainer(config: RunConfig, job: UnitKey) -> None:
    """Refuse trainer arguments that cannot work before anything is collected.

    Raises:
        UserError: as :func:`dejavu_train.training.trainer.build_trainer`,
            :func:`dejavu_train.training.loggers.build_loggers` and :func:`dejavu_train.training.rehearsal.rehearse`.
    """
    with tempfile.TemporaryDirectory() as folder:  # loggers make folders
        elsewhere = dataclasses.replace(config, output=folder)
        build_loggers(elsewhere)
        build_trainer(elsewhere, job, Path(folder), [])
    rehearse(config, job)


def bundle_summary(bundle: Bundle) -> str:
    """All predictors as they were calibrated, then their means, and what to do where these are low.

    Measured on documents set aside for calibration. Only a second stage has candidates.
    """
    columns = ["layer", "target", "active", "candidates", "selected", "recall", "at most", "retained mass"]
    rows: list[list[Any]] = []
    lines = []
    for target in bundle.targets:
        specs = [spec for _, spec in sorted(bundle.specs.items()) if spec.target == target]
        for spec in specs:
            active = "-" if spec.active_density is None else spec.active_density
            if spec.dense:
                rows.append([spec.layer, str(target), active, "", "dense", *[""] * 3])
                continue
            most = most_recall(spec.density, spec.active_density or 0.0)
            second = spec.curve is not None and "selected" in spec.curve
            selected = read_curve(spec.curve, spec.density)["selected"] if second else spec.density
            cells = [spec.density if second else "", selected, spec.recall, most, spec.retained_mass]
            rows.append([spec.layer, str(target), active, *cells])
        recall, mass = (sum(getattr(spec, name) for spec in specs) / len(specs) for name in ("recall", "retained_mass"))
        line = f"{target}: recall {recall:.3f}, retained mass {mass:.3f} at density {bundle.mean_density(target):.3f}"
        staged = any(spec.curve is not None and "selected" in spec.curve for spec in specs)
        lines.append(line + (" of candidates" if staged else "") + ", means over the layers")
        if all(spec.dense for spec in specs):
            lines[-1] = f"{target}: all run, because their density is 1. Their predictors are kept and not used"
        elif mass < GOOD_MASS:
            flag = f"--calibrate.{'mlp' if target == Target.MLP else 'head'}_density"
            lines.append(
                f"{target}: a retained mass below {GOOD_MASS} costs quality; raise {flag}, or --{target}.steps"
            )
    if Target.HEADS not in bundle.targets:
        lines.append("heads: all run, because they have no predictors. --heads.enabled true trains some")
    return "\n".join([table(columns, [[_shown(value) for value in row] for row in rows]), *lines])


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
