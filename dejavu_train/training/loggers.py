"""Builds the loggers that a configuration names, each with its run, group and folder. Jobs have CSV alone."""

import importlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.ground.experiments import clean_id, has_wandb_key, use_wandb_offline_without_key
from dejavu_train.training.config import RunConfig
from dejavu_train.training.stages import calibrate_stage, trained_identity

# Arguments of wandb.init as wandb.Settings calls them.
_SETTINGS = {
    "id": "run_id", "group": "run_group", "name": "run_name", "project": "project", "entity": "entity",
    "tags": "run_tags", "notes": "run_notes", "job_type": "run_job_type", "mode": "mode",
}  # fmt: skip


def experiment_id(config: RunConfig) -> str:
    """The name of an experiment: the output's, and a hash of all that decides what the bundle is."""
    return clean_id(f"{Path(config.output).resolve().name}-{calibrate_stage(config).identity[:8]}")


def build_loggers(config: RunConfig) -> list[Any]:
    """The loggers of the configuration, one run each for the experiment, with what they take of id, group and folder.

    Raises:
        UserError: a logger that is not there, does not take its arguments, or that wandb would refuse when it begins.
    """
    use_wandb_offline_without_key()
    name = "/".join([Path(config.output).resolve().name, *([config.bundle] if config.bundle != "bundle" else [])])
    loggers: list[Any] = []
    for entry in as_list(config.trainer.get("logger")):
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
        dict_kwargs = entry.get("dict_kwargs") or {}
        known = {"save_dir": config.output, "name": name}
        if class_name == "WandbLogger":
            known |= _wandb_run({**dict_kwargs, **given}, config)
            given.pop("version", None)  # the same as id
            given |= {"id": known["id"]}
        else:
            known |= {"name": class_name.removesuffix("Logger").lower(), "version": experiment_id(config)}
        for key, value in known.items():
            if key in parameters or class_name == "WandbLogger":
                given.setdefault(key, value)
        if class_name == "WandbLogger" and kind.__module__.startswith("lightning"):
            _check_wandb({**dict_kwargs, **given}, parameters)
        Path(config.output).mkdir(parents=True, exist_ok=True)
        try:
            built = kind(**given, **dict_kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise UserError(f"trainer.logger: {class_name} refuses its arguments ({first_line(error)})") from None
        # Lightning hands wandb a setting that wandb warns about.
        getattr(built, "_wandb_init", {}).pop("anonymous", None)
        loggers.append(built)
    return loggers


def _wandb_run(given: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Group and id of the experiment's run. Experiments of the same predictors have one group.

    A trial of a sweep is the run that wandb's agent gave it.
    """
    trial = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
    group = f"{Path(config.output).resolve().name}-{trained_identity(config)[:8]}"
    own = trial or given.get("version") or given.get("id") or experiment_id(config)
    return {"id": clean_id(str(own)), "group": clean_id(group)}


def _check_wandb(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Look at what ``wandb.init`` will be called with. It is called when an experiment begins.

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
    if online in ("online", "shared") and not os.environ.get("WANDB_DISABLED") and not has_wandb_key():
        raise UserError(
            "trainer.logger: wandb is to be online and has no key; type wandb login, or set WANDB_MODE=offline"
        )


def as_list(value: Any) -> list[Any]:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
