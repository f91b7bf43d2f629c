"""The keys of ``dejavu tasks``. Readable without torch and without lm-eval."""

import dataclasses
from pathlib import Path

from dejavu_train.evaluation.shared_config import ModelConfig
from dejavu_train.ground.errors import UserError

# Deja Vu's seven and HellaSwag.
TASKS = ("cb", "copa", "lambada", "openbookqa", "piqa", "rte", "winogrande", "hellaswag")
TEXTS = ("wikitext", "c4", "prose")
LOCAL = Path(__file__).parents[2] / "configs" / "tasks"  # of the YAMLs of local tasks, installed with the package


@dataclasses.dataclass(frozen=True)
class AskedOptions:
    """Tasks to run."""

    GONE = {"texts": "its name is --text, as on every command"}
    CONSTANTS = {"include_path": "configs/tasks"}

    tasks: tuple[str, ...] = tuple(TASKS)
    """Accuracies, at every number of shots: the paper's by their short names, or any of lm-eval's."""
    text: tuple[str, ...] = ("wikitext",)
    """Perplexities: wikitext, c4, prose."""
    folder: str | None = None
    """Folder of local files, which configs/tasks names. null: the hub."""
    shots: tuple[int, ...] = (0, 5)
    """Numbers of examples before the question."""
    limit: int | None = None
    """Examples of each task, the first ones. null: all."""
    batch_size: int | str = "auto"
    """Rows, or auto."""
    seed: int = 1234
    """Seed of the few-shot examples."""

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit must be at least 1, got {self.limit}")
        if not self.shots or min(self.shots) < 0:
            raise UserError(f"--shots must be numbers of examples, such as [0, 5], got {self.shots}")
        if not self.tasks and not self.text:
            raise UserError("--tasks and --text are both empty; name one")
        if self.batch_size != "auto" and not (isinstance(self.batch_size, int) and self.batch_size > 0):
            raise UserError(f"--batch_size must be auto or a number, got {self.batch_size}")


@dataclasses.dataclass(frozen=True)
class TasksOptions(AskedOptions):
    """Tasks for a dense and a sparse model. Densities are means over the layers."""

    backend: str = "mask"
    """Backend of the sparse model: mask, gather, triton or auto."""
    mlp_density: float | None = None
    """Density of the neurons. null: as the bundle was calibrated."""
    head_density: float | None = None
    """Density of the heads. null: as the bundle was calibrated."""
    sparse_from: int | str = 0
    """prompt: contexts are dense and continuations sparse. A position: sparse from there on. 0: everything is."""
    use_cache: str | None = None
    """File of answers that a next run takes up, less its ending."""
    log_samples: bool = False
    """Write samples_<task>_<shots>_<model>.jsonl."""

    def check(self) -> None:
        """Raise UserError for a value that cannot be meant."""
        super().check()
        position = self.sparse_from
        if position != "prompt" and (isinstance(position, str) or position < 0):
            raise UserError(f"--sparse_from must be prompt or a position, got {self.sparse_from}")


@dataclasses.dataclass(frozen=True)
class TasksConfig(TasksOptions, ModelConfig):
    """Tasks and their model."""

    RESULTS = "tasks"
