"""Builds the loggers of one job: CSV always, and those of the configuration, with their run, group and folder."""

import hashlib
import importlib
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError
from dejavu_train.stages import trained_identity

SUMMARY = "summary"  # the run of a table of all jobs
LONGEST_ID = 100  # it is part of a folder's name
# What an agent of wandb gives the process of a trial. wandb would give every job the run that they name.
_SWEEP = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
_TAKEN = "DEJAVU_TRAIN_"
# Arguments of wandb.init as wandb.Settings calls them.
_SETTINGS = {
    "id": "run_id", "group": "run_group", "name": "run_name", "project": "project", "entity": "entity",
    "tags": "run_tags", "notes": "run_notes", "job_type": "run_job_type", "mode": "mode",
}  # fmt: skip


def build_loggers(config: RunConfig, configured: Any, folder: Path, name: str) -> list[Any]:
    """CSV always, and the loggers of the configuration, each with run, group and folder where it takes them.

    Args:
        configured: one entry or several, each with ``class_path``.
        folder: that of the job. CSV writes there.
        name: of the job, or ``summary``.

    Raises:
        UserError: a logger that is not there, does not take its arguments, or that wandb would refuse when it begins.
    """
    use_wandb_offline_without_key()
    group = f"{Path(config.output).resolve().name}-{trained_identity(config)[:8]}"
    loggers: list[Any] = [CSVLogger(folder, "csv")]
    for entry in as_list(configured):
        if entry["class_path"].endswith("CSVLogger"):
            continue  # CSV is there anyway
        module_name, _, class_name = entry["class_path"].rpartition(".")
        try:
            kind = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"trainer.logger: there is no {entry['class_path']} ({error})") from None
        parameters = inspect.signature(kind.__init__).parameters
        given = dict(entry.get("init_args") or {})
        for key, value in list(given.items()):
            if key not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                raise UserError(f"trainer.logger: {class_name} has no argument {key}")
            if key in parameters and value == parameters[key].default:
                del given[key]  # so that ours goes before a default that was written out
        known = {"save_dir": config.output, "name": name}
        dict_kwargs = entry.get("dict_kwargs") or {}
        if class_name == "WandbLogger":
            known |= _wandb_run({**dict_kwargs, **given}, group, name)
            given.pop("version", None)  # the same as id
            given |= {"id": known["id"]}
        for key, value in known.items():
            if key in parameters or class_name == "WandbLogger":
                given.setdefault(key, value)
        if class_name == "WandbLogger" and kind.__module__.startswith("lightning"):
            _check_wandb({**dict_kwargs, **given}, parameters)
        Path(config.output).mkdir(parents=True, exist_ok=True)
        built = kind(**given, **dict_kwargs)
        # Lightning hands wandb a setting that wandb warns about, once per job.
        getattr(built, "_wandb_init", {}).pop("anonymous", None)
        loggers.append(built)
    return loggers


def _wandb_run(given: Mapping[str, Any], group: str, name: str) -> dict[str, Any]:
    """Group and id of a job's run. A job that is resumed goes on with the run of its id, and shares it with no other.

    In a sweep the summary is the trial's own run, and the trial is part of every other id.
    """
    if "WANDB_SWEEP_ID" in os.environ:
        os.environ.update({_TAKEN + key: os.environ.pop(key) for key in _SWEEP if key in os.environ})
    sweep, trial = os.environ.get(_TAKEN + "WANDB_SWEEP_ID"), os.environ.get(_TAKEN + "WANDB_RUN_ID")
    if sweep and trial and name == SUMMARY:
        import wandb

        return {"id": trial, "group": clean_id(group), "settings": wandb.Settings(sweep_id=sweep)}
    group = "-".join(filter(None, [group, sweep and (trial or sweep)]))
    stem = given.get("version") or given.get("id") or group
    return {"id": clean_id(f"{stem}-{name}"), "group": clean_id(group)}


def clean_id(text: str) -> str:
    """``text`` as an id that wandb and a folder's name take. Texts that differ stay different.

    >>> clean_id("mine-layer-00-mlp"), clean_id("50%_a#b")
    ('mine-layer-00-mlp', '50-_a-b-9ac0dad6')
    """
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:LONGEST_ID]
    if cleaned == text:
        return text
    return f"{cleaned}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


def _check_wandb(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Look at what ``wandb.init`` will be called with. It is called when a job begins.

    Raises:
        UserError: an argument that it does not have, or a value that it refuses.
    """
    import wandb

    for key in given:
        if key not in known and key not in inspect.signature(wandb.init).parameters:
            raise UserError(f"trainer.logger: WandbLogger has no argument {key}")
    try:
        settings = wandb.Settings(**{_SETTINGS[key]: value for key, value in given.items() if key in _SETTINGS})
        settings.update_from_env_vars(dict(os.environ))
    except (wandb.Error, ValueError) as error:
        lines = str(error).splitlines()
        said = "; ".join(line.strip() for line in lines[:3])
        raise UserError(f"trainer.logger: wandb refuses what WandbLogger or WANDB_* gives it: {said}") from None
    online = given.get("mode") or (None if given.get("offline") else settings.mode)
    if online in ("online", "shared") and not os.environ.get("WANDB_DISABLED") and not _has_wandb_key():
        raise UserError(
            "trainer.logger: wandb is to be online and has no key; type wandb login, or set WANDB_MODE=offline"
        )


def use_wandb_offline_without_key() -> None:
    """Without a key wandb would ask for one. A run that nobody watches must not wait."""
    os.environ.setdefault("WANDB_SILENT", "true")
    if not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")


def _has_wandb_key() -> bool:
    if "WANDB_API_KEY" in os.environ:
        return True
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # "~" stays where nobody knows a home
    try:
        return "wandb.ai" in netrc.read_text(errors="ignore")
    except OSError:
        return False  # none, or one that we may not read


def as_list(value: Any) -> list[Any]:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
