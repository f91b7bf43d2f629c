"""Builds the Lightning Trainer of one job: what the configuration says, and what every job needs.

The section ``trainer`` of the configuration is a plain mapping until :func:`resolved_arguments` has Lightning's own
signature read it. So a mistake elsewhere is reported before Lightning is imported, which takes seconds.
"""

import contextlib
import copy
import datetime
import difflib
import functools
import inspect
import logging
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LightningArgumentParser, instantiate_class
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dejavu_train.cli.parser import WRONG_VALUE, Parser
from dejavu_train.families import UnitKey
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.training.callbacks import AtomicCheckpointIO
from dejavu_train.training.config import RunConfig
from dejavu_train.training.loggers import as_list

logger = logging.getLogger(__name__)

# Arguments of the Trainer that something else of the configuration decides, or that every job decides for itself.
REFUSED = {
    "max_steps": "set mlp.steps and heads.steps",
    "min_steps": "set mlp.steps and heads.steps, and patience 0",
    "fast_dev_run": "set mlp.steps and heads.steps to a few",
    "overfit_batches": "set collect.train_tokens to few",
    "barebones": "a job needs its validations and checkpoints",
    "enable_checkpointing": "a job goes on from its checkpoints",
    "limit_val_batches": "set collect.val_tokens",
    "limit_test_batches": "predictors are tested by infer.py",
    "limit_predict_batches": "predictors are tested by infer.py",
    "use_distributed_sampler": "the shards are split over the devices without one",
    "num_nodes": "start an invocation on each machine, all on one output, each with its own --layers",
    "default_root_dir": "set output",
    "reload_dataloaders_every_n_epochs": "the shards stay the same",
}

MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")  # of a process that mpirun has started

# Arguments of which Lightning takes 0, and then divides by it or trains nothing.
_UNTRAINED = "; predictors with their first values alone are made by mlp.steps 0 and heads.steps 0"
_POSITIVE = {
    "accumulate_grad_batches": "", "val_check_interval": "", "check_val_every_n_epoch": "",
    "limit_train_batches": _UNTRAINED, "max_epochs": _UNTRAINED,
}  # fmt: skip


class _TrainerParser(Parser, LightningArgumentParser):
    """Parser of the Trainer's arguments alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(prog="train.py", usage="train.py [--trainer.NAME VALUE ...]", **options)

    @classmethod
    @functools.cache
    def of_trainer(cls) -> "_TrainerParser":
        """Kept, because a run asks for it several times, and the Trainer's docstrings take long to read."""
        self = cls()
        self.add_lightning_class_args(lightning.Trainer, "trainer", required=False)
        self.set_defaults({"trainer.devices": 1})
        return self

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        match = WRONG_VALUE.match(message)
        if match is None:
            raise UserError(f"the trainer's arguments do not fit ({message}); see --trainer.help") from None
        lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.lstrip().startswith("- ")]
        reasons = [line for line in lines if "<class" not in line] or ["of the wrong type"]
        value = textwrap.shorten(match[2], 120)
        raise UserError(f"{match[1]} cannot be {value}: {'; '.join(reasons[:2])}; see --trainer.help") from None


def print_help() -> None:
    """The arguments of the Trainer, as Lightning describes them, and those that are refused."""
    _TrainerParser.of_trainer().print_help()
    print("\nRefused:")
    print("\n".join(f"  --trainer.{name}: {why}" for name, why in REFUSED.items()))


def resolved_arguments(trainer: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the Trainer as plain values: what was given, its class names written out, and the defaults.

    Raises:
        UserError: an argument that the Trainer does not have, or that is refused here. A value of the wrong type.
    """
    parameters = inspect.signature(lightning.Trainer.__init__).parameters
    for name, value in trainer.items():
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, 1)
            meant = f"did you mean trainer.{close[0]}?" if close else "--trainer.help lists them"
            raise UserError(f"the Trainer of Lightning has no argument trainer.{name}; {meant}")
        if name in REFUSED and value is not None and value != parameters[name].default:
            raise UserError(f"trainer.{name} has no use here: {REFUSED[name]}")
    if trainer.get("max_epochs") is not None:
        logger.info("trainer.max_epochs says how long predictors are trained; mlp.steps and heads.steps do not")
    for name in _POSITIVE:
        number: Any = trainer.get(name)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if is_number and number <= 0 and (name, number) != ("max_epochs", -1):
            raise UserError(f"trainer.{name} must lie above 0, got {number}{_POSITIVE[name]}")
    # A logger is given its folder and id by build_loggers, so what is written of it need not be complete.
    given = copy.deepcopy({name: value for name, value in trainer.items() if name != "logger"})  # it is written into
    parsed: Any = _TrainerParser.of_trainer().parse_object({"trainer": given})
    arguments = _plain(parsed["trainer"])
    return arguments | {"logger": [_class_entry(entry) for entry in as_list(trainer.get("logger"))] or None}


def _class_entry(entry: Any) -> dict[str, Any]:
    """A logger by name as ``class_path`` and ``init_args``. Lightning's own may be named without their module."""
    entry = {"class_path": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
        raise UserError(f"trainer.logger must name classes by class_path, got {entry}")
    path = entry["class_path"]
    return entry | {"class_path": path if "." in path else f"lightning.pytorch.loggers.{path}"}


def _plain(value: Any) -> Any:
    """Namespaces as dicts, at any depth, and what YAML cannot hold (a device, a path, a duration) as text."""
    if isinstance(value, Namespace):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, datetime.timedelta):
        return {"seconds": value.total_seconds()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def count_devices(trainer: dict[str, Any]) -> int:
    """How many processes a fit with these trainer arguments takes (0: several, their number unknown)."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, list):
        return len(devices)
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) if trainer.get("accelerator", "auto") != "cpu" else 1
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    return int(text) if text.isdigit() else 0


def start_device(trainer: dict[str, Any]) -> torch.device:
    """Where the first values are computed: this process's GPU if the fit will be on one, else the CPU."""
    if torch.cuda.is_available() and trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda"):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def default_arguments() -> dict[str, Any]:
    """Every argument of the Trainer that nobody has given, as :func:`resolved_arguments` writes it."""
    return resolved_arguments({"devices": 1})


def build_trainer(
    config: RunConfig,
    job: UnitKey,
    folder: Path,
    callbacks: list[Any],
    checkpoints: AtomicCheckpointIO | None = None,
) -> lightning.Trainer:
    """A fresh Trainer for one job: what the configuration says, and what a job needs.

    Args:
        callbacks: those of the job, beside those of the configuration.
        checkpoints: what writes them. None writes them aside and renames them.

    Raises:
        UserError: arguments that Lightning refuses.
    """
    arguments = dict(config.trainer)
    section = config.predictor(job[1])
    interval = None
    if arguments.get("max_epochs") in (None, -1) and arguments.get("max_steps", -1) in (-1, None):
        steps = max(1, section.steps // section.validations)
        arguments |= {"max_epochs": -1, "max_steps": section.steps - section.steps % steps}
        if arguments.get("val_check_interval") is None and arguments.get("check_val_every_n_epoch") in (None, 1):
            # Counted over epochs, so that the last step is validated too.
            interval = steps
            arguments |= {"val_check_interval": interval, "check_val_every_n_epoch": None}
    # Lightning's bar knows the epochs of a fit; ours, in callbacks.py, knows which job of how many it is.
    quieter = {"num_sanity_val_steps": 0, "enable_model_summary": False, "enable_progress_bar": False}
    for name, value in ({"devices": 1} | quieter).items():
        if arguments.get(name) is None:
            arguments[name] = value
    try:
        extra = [_build(entry) for entry in as_list(arguments.pop("callbacks", None))]
        plugins = [_build(entry) for entry in as_list(arguments.pop("plugins", None))]
        arguments.pop("logger", None)  # of the experiment, see experiment.py
        arguments = {name: _build(value) for name, value in arguments.items()}
        # The data module splits by rank itself; whatever else Lightning writes belongs to this job.
        arguments |= {"use_distributed_sampler": False, "default_root_dir": folder}
        with quiet():
            trainer = _made(
                arguments,
                logger=[CSVLogger(folder, "csv")],
                callbacks=extra + callbacks,
                plugins=[*plugins, *_environment(plugins), checkpoints or AtomicCheckpointIO()],
            )
    except UserError:
        raise
    except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
        raise UserError(f"the trainer's arguments do not fit ({first_line(error)}); see --trainer.help") from None

    if str(trainer.precision) in ("16-true", "bf16-true"):
        raise UserError(
            f"trainer.precision {trainer.precision} keeps weights and the optimiser's states in 16 bits, in which small"
            f" steps are lost; use {str(trainer.precision).replace('true', 'mixed')} or 32-true"
        )
    if interval is not None:
        _validate_by_steps(trainer, interval)
    return trainer


def _validate_by_steps(trainer: lightning.Trainer, interval: int) -> None:
    """Validate behind every ``interval`` optimiser steps. Lightning counts batches, of which several make a step."""
    epoch = trainer.fit_loop.epoch_loop

    def is_due(_fetcher: Any) -> bool:
        if not epoch._should_check_val_epoch():
            return False
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early
        return ends or (not epoch._should_accumulate() and trainer.global_step % interval == 0)

    epoch._should_check_val_fx = is_due  # type: ignore[method-assign]


def _environment(plugins: list[Any]) -> list[ClusterEnvironment]:
    """The environment of a process that no launcher has started. Empty where Lightning shall find it.

    Where mpi4py is installed Lightning asks MPI itself, which ends a process whose MPI cannot start.
    """
    launchers = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)
    if any(isinstance(each, ClusterEnvironment) for each in plugins) or any(each.detect() for each in launchers):
        return []
    return [] if any(name in os.environ for name in MPI) else [LightningEnvironment()]


def count_epochs(trainer: lightning.Trainer, batches: int) -> int:
    """In how many epochs of so many batches the steps of a fit will be over. Callbacks ask for it: SWA begins at a
    share of them.

    A scheduler of accumulation changes how many steps an epoch has. The number then stays open, -1.
    """
    if trainer.max_epochs != -1 or any(isinstance(each, GradientAccumulationScheduler) for each in _callbacks(trainer)):
        return trainer.max_epochs or -1
    limit = trainer.limit_train_batches
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit or batches)
    steps = max(1, -(-batches // trainer.accumulate_grad_batches))
    return max(1, -(-trainer.max_steps // steps))


def _callbacks(trainer: lightning.Trainer) -> list[Any]:
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def _made(arguments: dict[str, Any], **ours: Any) -> lightning.Trainer:
    try:
        return lightning.Trainer(**arguments, **ours)
    except TypeError as error:  # so Lightning refuses a number of devices
        raise UserError(f"the trainer's arguments do not fit ({first_line(error)}); see --trainer.help") from None


def _build(value: Any) -> Any:
    """A class from ``class_path`` and ``init_args``, at any depth. Anything else as it is."""
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
