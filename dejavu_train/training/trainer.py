"""Builds the Lightning Trainer of one job: what the configuration says, and what every job needs."""

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError
from dejavu_train.stages import trained_identity
from dejavu_train.training.callbacks import AtomicCheckpointIO


def count_devices(trainer: dict[str, Any]) -> int:
    """How many processes a fit with these trainer arguments takes (0: several, their number unknown)."""
    devices, nodes = trainer.get("devices", 1), int(trainer.get("num_nodes") or 1)
    if isinstance(devices, list):
        return len(devices) * nodes
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) * nodes if trainer.get("accelerator", "auto") != "cpu" else nodes
    if "," in text:
        return len([part for part in text.split(",") if part.strip()]) * nodes
    return int(text) * nodes if text.isdigit() else 0


def start_device(trainer: dict[str, Any]) -> torch.device:
    """Where the first values are computed: this process's GPU if the fit will be on one, else the CPU."""
    if torch.cuda.is_available() and trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda"):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def build_trainer(config: RunConfig, job: tuple[int, str], folder: Path, callbacks: list[Any]) -> lightning.Trainer:
    """A fresh Trainer for one job: what the configuration says, and what a job needs.

    Raises:
        UserError: arguments that Lightning refuses, or a logger whose package is not installed.
    """
    arguments = dict(config.trainer)
    section = config.predictor(job[1])
    if arguments.get("max_epochs") is None and arguments.get("max_steps", -1) in (-1, None):
        interval = max(1, section.steps // section.validations)
        arguments |= {"max_epochs": -1, "max_steps": section.steps - section.steps % interval}
        if arguments.get("val_check_interval") is None:
            # Counted in steps over epochs, so that the last step is validated too.
            arguments |= {"val_check_interval": interval, "check_val_every_n_epoch": None}
    # Lightning's bar knows the epochs of a fit; ours, in callbacks.py, knows which job of how many it is.
    quieter = {"num_sanity_val_steps": 0, "enable_model_summary": False, "enable_progress_bar": False}
    for name, value in ({"devices": 1} | quieter).items():
        if arguments.get(name) is None:
            arguments[name] = value
    try:
        extra = [_build(entry) for entry in as_list(arguments.pop("callbacks", None))]
        plugins = [_build(entry) for entry in as_list(arguments.pop("plugins", None))]
        loggers = build_loggers(config, arguments.pop("logger", None), folder, f"layer-{job[0]:02d}-{job[1]}")
        arguments = {name: _build(value) for name, value in arguments.items()}
        # The data module splits by rank itself; whatever else Lightning writes belongs to this job.
        arguments |= {"use_distributed_sampler": False, "default_root_dir": folder}
        with quiet():
            return lightning.Trainer(
                **arguments,
                logger=loggers,
                callbacks=extra + callbacks,
                plugins=[*plugins, AtomicCheckpointIO()],
            )
    except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
        raise UserError(f"the trainer's arguments do not fit: {str(error).splitlines()[0]}") from None


def build_loggers(config: RunConfig, configured: Any, folder: Path, name: str) -> list[Any]:
    """CSV always, and the loggers of the configuration, each with run, group and folder where it takes them."""
    use_wandb_offline_without_key()
    group = f"{Path(config.output).name}-{trained_identity(config)[:8]}"
    loggers: list[Any] = [CSVLogger(folder, "csv")]
    for entry in as_list(configured):
        if not isinstance(entry, dict) or entry["class_path"].endswith("CSVLogger"):
            continue  # true or false: CSV is there anyway
        module_name, _, class_name = entry["class_path"].rpartition(".")
        kind = getattr(__import__(module_name, fromlist=[class_name]), class_name)
        parameters = inspect.signature(kind.__init__).parameters
        given = {
            k: v for k, v in (entry.get("init_args") or {}).items() if k in parameters and v != parameters[k].default
        }
        known = {"save_dir": config.output, "name": name}
        if class_name == "WandbLogger":  # the id lets a resumed job go on with its run
            known |= {"id": f"{group}-{name}", "group": group}
        for key, value in known.items():
            if key in parameters or class_name == "WandbLogger":
                given.setdefault(key, value)
        Path(config.output).mkdir(parents=True, exist_ok=True)
        made = kind(**given, **(entry.get("dict_kwargs") or {}))
        # Lightning hands wandb a setting that wandb warns about, once per job.
        getattr(made, "_wandb_init", {}).pop("anonymous", None)
        loggers.append(made)
    return loggers


def use_wandb_offline_without_key() -> None:
    """Without a key wandb would ask for one; a run that nobody watches must not wait."""
    os.environ.setdefault("WANDB_SILENT", "true")
    netrc = Path.home() / ".netrc"
    has_key = "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb.ai" in netrc.read_text(errors="ignore"))
    if not has_key:
        os.environ.setdefault("WANDB_MODE", "offline")


def as_list(value: Any) -> list[Any]:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _build(value: Any) -> Any:
    """A class from ``class_path`` and ``init_args``, at any depth; anything else as it is."""
    if isinstance(value, list):
        return [_build(entry) for entry in value]
    if isinstance(value, dict) and "class_path" in value:
        arguments = {name: _build(entry) for name, entry in (value.get("init_args") or {}).items()}
        return instantiate_class((), {"class_path": value["class_path"], "init_args": arguments})
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's remarks about choices that are made on purpose."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for text in (
            ".*does not have many workers.*",
            ".*`IterableDataset` has `__len__` defined.*",
            ".*resuming from a checkpoint that ended before the epoch ended.*",
            ".*Checkpoint directory .* exists and is not empty.*",
            ".*dirpath.*has changed from.*",
            ".*The number of training batches.*",
            ".*GPU available but not used.*",
            ".*no accelerator is found.*",
            ".*LeafSpec.*",
        ):
            warnings.filterwarnings("ignore", message=text)
        yield
