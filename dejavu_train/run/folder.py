"""Reads and writes ``run.json``, the description of an output folder, and keeps two different runs out of one folder.

    run.json        the stages as they were last asked for, the densities that predictors were trained for, and the
                    folder where relative paths begin
    config.yaml     the configuration that asked for them: ``train.py --output FOLDER`` goes on with it
    .holders/run    a file of every invocation for as long as it works

Only invocations that agree hold ``.holders/run`` together.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dejavu_train.families import TARGETS, Target
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, read_sealed, way_from, write_json, write_text
from dejavu_train.ground.locks import LockHeld, claim
from dejavu_train.training.config import INVOCATION, RunConfig
from dejavu_train.training.stages import Stage, calibrate_stage, collect_stage, train_stage

SCHEMA = 2
CONFIG = "config.yaml"


@contextlib.contextmanager
def claimed_folder(config: RunConfig, given: RunConfig | None = None) -> Iterator[RunConfig]:
    """Hold the output folder for a run, and note in it what the run makes.

    Args:
        given: the configuration before anything of it was resolved, to be kept. None keeps ``config``.

    Yields the configuration with the densities filled in that predictors of the same settings were trained for before.

    Raises:
        UserError: the folder holds activations of other text or another model, another process works on it with other
            settings, or it is no folder.
    """
    output = Path(config.output)
    whole = calibrate_stage(config)
    try:
        with claim(output / ".holders" / "run", whole.identity, whole.to_json()):
            yield _described(config, given or config, output, whole)
    except LockHeld as held:
        reason = whole.difference(held.holder.note)
        raise UserError(
            f"{held.holder} works in {output} with other settings ({reason}); wait for it or choose another --output"
        ) from None


def saved_config(output: str | Path) -> Path | None:
    """The file of the configuration of the run in a folder. None where there is no run.

    Raises:
        UserError: there is a run without it, made before runs kept it. To begin with the defaults would change the run.
    """
    path = Path(output) / CONFIG
    if not path.is_file() and (Path(output) / "run.json").is_file():
        raise UserError(
            f"the run in {output} has no {CONFIG}, by which --output alone goes on; name its configuration once more,"
            " such as --config FILE or --model FOLDER with its other flags"
        )
    return path if path.is_file() else None


def begun_in(output: str | Path) -> Path:
    """Where relative paths of the configuration of a run begin: the folder where it was given. Here where none is
    known, as of a run made before runs kept it."""
    way = _stored(Path(output)).get("begun_in")
    return Path(os.path.abspath(Path(output) / way)) if isinstance(way, str) else Path.cwd()


def _described(config: RunConfig, given: RunConfig, output: Path, whole: Stage) -> RunConfig:
    """Write ``run.json`` and the configuration, or refuse the folder. The configuration with its open densities filled
    in."""
    resolved, described = check_run_folder(config, whole)
    if _stored(output) != described:
        write_json(output / "run.json", described)
    kept = given.to_json()
    for name in INVOCATION:
        del kept[name]
    text = yaml.safe_dump(kept, sort_keys=False)
    path = output / CONFIG
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return resolved


def check_run_folder(config: RunConfig, whole: Stage) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration with its open densities filled in, and what ``run.json`` says of it. Nothing is written.

    Raises:
        UserError: the folder holds activations of other text or another model, or a run of another schema.
    """
    output = Path(config.output)
    stored = _stored(output)
    collect = collect_stage(config)
    has_output = (output / "activations" / "manifest.json").exists() or (output / "predictors").exists()
    if stored and has_output and stored.get("schema") != SCHEMA:
        raise UserError(
            f"the folder {output} holds a run of schema {stored.get('schema')}, this version goes on with"
            f" {SCHEMA}: choose another --output or delete the folder; infer.py still reads its bundle"
        )
    if stored and has_output and not collect.matches(stored.get("collect")):
        reason, flags = collect.difference(stored.get("collect")), collect.flags_of(stored.get("collect"))
        raise UserError(
            f"the folder {output} holds another run ({reason}); choose another --output, or go on with what it had:"
            f" {flags or 'restore the file'}"
        )
    densities = {target: _trained_density(config, target) for target in TARGETS}
    described = {
        "schema": SCHEMA,
        "begun_in": way_from(output, os.getcwd()),
        "collect": collect.to_json(),
        "train": {
            target: train_stage(config, target).to_json() | {"density": densities[target]}
            for target in TARGETS
            if config.predictor(target).enabled
        },
        "calibrate": whole.to_json(),
    }
    resolved = dataclasses.replace(
        config,
        mlp=dataclasses.replace(config.mlp, density=densities[Target.MLP]),
        heads=dataclasses.replace(config.heads, density=densities[Target.HEADS]),
    )
    return resolved, described


def _stored(output: Path) -> dict[str, Any]:
    path = output / "run.json"
    values = read_json(path, "the description of the run") if path.exists() else {}
    return values if isinstance(values, dict) else {}


def _trained_density(config: RunConfig, target: Target) -> float:
    """The density a target's predictors are trained for: as configured, else as one was trained, else calibrate's."""
    configured = config.predictor(target).density
    if configured is not None:
        return configured
    stage = train_stage(config, target)
    trained = sorted(Path(config.output).glob(f"predictors/layer_*/{target}/stage.json"))
    for before in [read_sealed(path, "the description of a stage") for path in trained]:
        if stage.matches(before) and isinstance(before.get("density"), float):
            return before["density"]
    return config.calibrate.mlp_density if target == Target.MLP else config.calibrate.head_density
