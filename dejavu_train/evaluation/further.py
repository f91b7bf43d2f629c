"""What infer.py measures beside its own rows when it is asked to: generation, tasks.

Each is a command of its own. Here it takes the model, the bundle and the device of the run, and writes into its output
folder, where report.html finds it. lm-eval is imported only where ``tasks`` is asked for.
"""

import dataclasses
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text_check import check_source
from dejavu_train.errors import UserError
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.further_config import GenerationConfig, TasksConfig
from dejavu_train.evaluation.generation.run import choose_backend, table, write_generation
from dejavu_train.models.config_values import read_dims

logger = logging.getLogger(__name__)

SHARED = ("model", "revision", "bundle", "device", "device_map", "dtype", "text_cache")


@dataclasses.dataclass(frozen=True)
class Further:
    """What is asked for, checked. None is not."""

    generation: GenerationConfig | None
    tasks: TasksConfig | None


def plan(config: InferConfig) -> Further:
    """Read the options of everything that is asked for, before anything slow starts.

    Raises:
        UserError: an option that the command does not have or would refuse. A text or a folder of tasks that is not
            there. An unknown task. lm-eval is not installed.
    """
    tasks = None
    if config.tasks is not None:
        try:
            from dejavu_train.evaluation.lm_eval.tasks import find_tasks
        except ModuleNotFoundError as error:
            if error.name != "lm_eval":
                raise
            raise UserError("--tasks needs lm-eval: pip install 'dejavu-train[eval]'") from None
        tasks = _of_run(TasksConfig, config, "tasks", f"{config.output}/tasks")
        if tasks.folder is not None:
            find_tasks((*tasks.tasks, *tasks.text), tasks)
    generation = None
    if config.generation is not None:
        generation = _of_run(GenerationConfig, config, "generation", config.output)
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
    """Run what is asked for. Its files lie in the output folder afterwards. Raises what the commands raise.

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


def _of_run(kind: Any, config: InferConfig, name: str, output: str) -> Any:
    """The options ``--name`` of another command, checked, with what the run shares."""
    options = vars(getattr(config, name))
    known = {field.name for field in dataclasses.fields(kind)}
    made = kind(**options, **{key: getattr(config, key) for key in SHARED if key in known}, output=output)
    try:
        made.check()
    except UserError as error:
        raise UserError(f"--{name}: {error}") from None
    return made
