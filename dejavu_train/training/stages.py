"""Dependencies of every stage of a run: the keys of the configuration that decide what it makes, and their hash.

    text and collect  ->  train mlp, train heads  ->  tune  ->  curves  ->  calibrate

A stage's identity is the hash of its own keys and of the identities of the stages before it. So a changed key makes
anew what depends on it, and nothing else. How a run runs (devices, workers, layers of this invocation, loggers) is in
no identity. The file of a class of your own is a key: an edited class is trained anew.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from dejavu_train.families import TARGETS, Target
from dejavu_train.ground.files import sha256_file
from dejavu_train.training.config import RunConfig

# How a run runs, not what it makes.
_NOT_KEYS = {
    "trainer": ("devices", "strategy", "logger", "accelerator", "num_nodes", "enable_progress_bar"),
    "data": ("num_workers",),
    "collect": ("device", "device_map", "batch_size", "dtype", "by_layers"),
    "text": ("cache",),
}
# What is chosen from calibration curves, not what they are measured with.
_CHOICES = ("mlp_density", "head_density", "retained_mass", "budget", "selection")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: its keys by dotted name, and the identity of what it makes with them."""

    name: str
    keys: dict[str, Any]
    identity: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def matches(self, stored: Any) -> bool:
        """Whether ``stored`` (of :meth:`to_json`) says that this very stage made an artefact."""
        return isinstance(stored, dict) and stored.get("identity") == self.identity

    def difference(self, stored: Any) -> str:
        """Why the stored stage is another one, in words: all keys that differ, or what it depends on."""
        before = stored.get("keys") if isinstance(stored, dict) else None
        if not isinstance(before, dict):
            return "it was made by an older version"
        keys = [key for key in sorted({*before, *self.keys}) if before.get(key) != self.keys.get(key)]
        return difference_of(before, self.keys, keys) if keys else "what it depends on has changed"

    def flags_of(self, stored: Any) -> str:
        """Flags to type for the keys of the stored stage that differ. Keys that are no flags are left out."""
        before = (stored.get("keys") if isinstance(stored, dict) else None) or {}
        return " ".join(
            f"--{key} {_typed(value)}"
            for key, value in sorted(before.items())
            if value != self.keys.get(key) and not key.endswith(".file_sha256")
        )


def difference_of(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """In words how two mappings differ in ``keys``."""
    return "; ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys)


def _typed(value: Any) -> str:
    """A value as a flag takes it in a shell."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def collect_stage(config: RunConfig) -> Stage:
    """Text and activations."""
    values = config.to_json()
    keys = {name: values[name] for name in ("model", "revision", "verify", "seed")}
    return _stage("collect", keys | _section(values, "text") | _section(values, "collect"))


def train_stage(config: RunConfig, target: Target) -> Stage:
    """The predictors of one target, all layers: how they are trained, and the dtype through which they are."""
    values = config.to_json()
    keys = _section(values, target) | _section(values, "data") | _section(values, "trainer")
    keys["calibrate.dtype"] = config.calibrate.dtype_of(target)
    return _stage(f"train {target}", keys, collect_stage(config))


def tune_stage(config: RunConfig) -> Stage:
    """The neurons' predictors after training in the model: what they are, and what kind of selection they make."""
    values = config.to_json()
    keys = _section(values, "tune") | {"calibrate.cascade": config.calibrate.cascade}
    return _stage("tune", keys, *_trained(config))


def curves_stage(config: RunConfig) -> Stage:
    """Stage of what every density would select, keep and cost: a calibration but the choice of the densities."""
    keys = _section(config.to_json(), "calibrate")
    for choice in _CHOICES:
        del keys[f"calibrate.{choice}"]
    return _stage("curves", keys, *_deployed(config))


def calibrate_stage(config: RunConfig) -> Stage:
    """Thresholds and bundle."""
    return _stage("calibrate", _section(config.to_json(), "calibrate"), *_deployed(config))


def trained_identity(config: RunConfig) -> str:
    """One name for all predictors of a run as trained. Groups their records in a tracker."""
    return _stage("train", {}, *_trained(config)).identity


def _deployed(config: RunConfig) -> list[Stage]:
    """The stages that made the predictors of a bundle."""
    return [tune_stage(config)] if config.tune.steps else _trained(config)


def _trained(config: RunConfig) -> list[Stage]:
    return [train_stage(config, target) for target in TARGETS if config.predictor(target).enabled]


def _section(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The keys of one section of the configuration as ``section.key``, nested ones likewise."""
    left_out = _NOT_KEYS.get(section, ())
    flat: dict[str, Any] = {}

    def add(prefix: str, part: Mapping[str, Any]) -> None:
        for name, value in part.items():
            if isinstance(value, dict) and isinstance(value.get("class_path"), str):
                flat[f"{prefix}.{name}.file_sha256"] = _file_digest(value["class_path"])
            if isinstance(value, dict) and value:
                add(f"{prefix}.{name}", value)
            else:
                flat[f"{prefix}.{name}"] = value

    add(section, {name: value for name, value in values[section].items() if name not in left_out})
    flat |= {name: value for name, value in RunConfig.CONSTANTS.items() if name.startswith(f"{section}.")}
    if section == "trainer":  # its classes are Lightning's for the most part, and change with its version
        flat = {name: value for name, value in flat.items() if not name.endswith(".file_sha256")}
    return flat


def _file_digest(class_path: str) -> str | None:
    """The beginning of the SHA-256 of the file of a class. None where it has none. What it imports is not read."""
    try:
        spec = importlib.util.find_spec(class_path.rpartition(".")[0])
    except (ImportError, ValueError):
        return None  # the checks name what cannot be imported
    if spec is None or not spec.origin or not os.path.isfile(spec.origin):
        return None
    return sha256_file(spec.origin)[:12]


def _stage(name: str, keys: dict[str, Any], *before: Stage) -> Stage:
    text = json.dumps([name, keys, [stage.identity for stage in before]], sort_keys=True)
    return Stage(name, keys, hashlib.sha256(text.encode()).hexdigest()[:16])
