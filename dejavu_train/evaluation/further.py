"""What infer.py measures beside its own rows when it is asked to: generation, tasks.

Each is a command of its own; here it takes the model, the bundle and the device of the run, and writes into its output
folder, where report.html finds it. lm-eval is imported only where ``tasks`` is asked for.
"""

import dataclasses
import json
import logging
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text_check import check_source
from dejavu_train.errors import UserError
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.generation.config import GenerationConfig
from dejavu_train.evaluation.generation.run import choose_backend, table, write_generation
from dejavu_train.models.config_values import read_dims
from dejavu_train.parser import parse

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHARED = ("model", "revision", "bundle", "device", "device_map", "dtype", "text_cache")


@dataclasses.dataclass(frozen=True)
class Further:
    """What is asked for, checked; None is not. ``tasks`` is a TasksConfig."""

    generation: GenerationConfig | None
    tasks: Any


def plan(config: InferConfig) -> Further:
    """Read the options of everything that is asked for, before anything slow starts.

    Raises:
        UserError: an option that the command does not have or would refuse, a text or a folder of tasks that is not
            there, an unknown task, or lm-eval is not installed.
    """
    tasks: Any = None
    if config.tasks is not None:
        try:
            from dejavu_train.evaluation.lm_eval.run import TasksConfig
            from dejavu_train.evaluation.lm_eval.tasks import find_tasks
        except ModuleNotFoundError as error:
            if error.name != "lm_eval":
                raise
            raise UserError("--tasks needs lm-eval: pip install 'dejavu-train[eval]'") from None
        tasks = _of_run(TasksConfig, config, "tasks", f"{config.output}/tasks")
        if tasks.folder is not None:
            find_tasks((*tasks.tasks, *tasks.texts), tasks.where)
    generation = _of_run(GenerationConfig, config, "generation", config.output)
    if generation is not None:
        check_source(generation.source(generation.text))
    return Further(generation, tasks)


def check_plan(asked: Further, bundle: Bundle, device: torch.device) -> None:
    """Raise :class:`UserError` for what neither the model, nor the bundle, nor the device can give."""
    config = asked.generation
    if config is None:
        return
    try:
        choose_backend(config, read_dims(config.model, config.revision).max_positions, device, bundle)
    except UserError as error:
        raise UserError(f"--generation: {error}") from None


def measure(asked: Further, dense: PreTrainedModel, tokenizer: Any, bundle: Bundle) -> None:
    """Run what is asked for; its files lie in the output folder afterwards. Raises what the commands raise.

    Args:
        dense: on its device. Generation comes last: its backend lays some of the weights out anew, in place.
    """
    if asked.tasks is not None:
        from dejavu_train.evaluation.lm_eval.run import write_tasks

        write_tasks(asked.tasks)
    if asked.generation is not None:
        folder, rows = write_generation(asked.generation, dense, tokenizer, bundle)
        print(table(rows))
        logger.info("wrote %s", folder)


def _of_run(kind: type[T], config: InferConfig, name: str, output: str) -> T | None:
    """The options ``--name`` of another command, with what the run shares; None where it is not asked for."""
    given: dict[str, Any] | None = getattr(config, name)
    if given is None:
        return None
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {key: getattr(config, key) for key in SHARED if key in known} | {"output": output}
    taken = sorted(values.keys() & given.keys())
    if taken:
        raise UserError(f"--{name}.{taken[0]} is that of the run; give --{taken[0]}")
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    flags += [f"--{key}={'null' if value is None else value}" for key, value in values.items()]
    try:
        made: Any = parse(kind, flags, "infer.py", str(kind.__doc__))
        made.check()
    except UserError as error:
        raise UserError(f"--{name}: {error}") from None
    return made  # type: ignore[no-any-return]
