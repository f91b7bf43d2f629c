"""The keys of commands that infer.py runs as well, with their defaults. Readable without torch and without lm-eval.

Options are what ``--generation`` and ``--tasks`` take. The commands' own configurations name a model besides.
"""

import dataclasses
from typing import Literal

from dejavu_train.bundle.guard_config import Guard
from dejavu_train.errors import UserError
from dejavu_train.evaluation.shared_config import ModelConfig, TextConfig, TextOptions
from dejavu_train.ranges import COLDEST, SHARE, WIDEST, check_ranges

# Deja Vu's seven and HellaSwag.
TASKS = ("cb", "copa", "lambada", "openbookqa", "piqa", "rte", "winogrande", "hellaswag")
TEXTS = ("wikitext", "c4", "prose")


@dataclasses.dataclass(frozen=True)
class GenerationOptions(TextOptions):
    """Continuations of held-out prompts, dense and sparse, side by side."""

    text: str = "installed-docs"
    """An installed source, a .txt or .jsonl file, or a hub dataset."""
    prompts: int = 32
    """How many, of as many documents as there are."""
    prompt: int = 32
    """Tokens of each prompt, the leading </s> included."""
    new_tokens: int = 128
    """Of every continuation. </s> ends none."""
    decodings: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")
    """Sampled ones draw the same random numbers for every model."""
    temperature: float = 1.0
    """Of sampling."""
    top_p: float = 1.0
    """Of sampling."""
    densities: tuple[float, ...] = ()
    """Of the MLPs' candidates, means over the layers. None named: as the bundle was calibrated."""
    head_density: float | None = None
    """Of the heads. null: as calibrated."""
    sparse_from: tuple[Literal["prompt", 0], ...] = ("prompt", 0)
    """Where sparsity begins: prompt keeps prompts dense, 0 has every token sparse. Guards are compared at prompt."""
    every: tuple[int, ...] = (8, 16, 32)
    """Of the guards: every so many-th decoding step is dense. None named: no guards."""
    control: tuple[bool, ...] = (False, True)
    """Of the guards: thresholds as the bundle has them, and moved."""
    batch: int = 32
    """Rows at once."""
    backend: Literal["auto", "gather", "triton"] = "auto"
    """Of all models, the dense one included. auto: the engine on a GPU, gather on a CPU."""

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        for name, least in {"prompts": 2, "prompt": 2, "new_tokens": 8, "batch": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("decodings", "sparse_from"):
            if not getattr(self, name):
                raise UserError(f"--{name} is empty; name one")
        check_ranges(self, "--", {"densities": SHARE, "head_density": SHARE})
        if not COLDEST <= self.temperature <= WIDEST:
            raise UserError(f"--temperature must lie in {COLDEST:g} to {WIDEST:g}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p must lie above 0 and at most at 1, got {self.top_p}")
        if 0 in self.every:
            raise UserError("--every must be at least 2, got 0; leave it out, rows without a guard are always there")
        for every in self.every:
            Guard(every=every)


@dataclasses.dataclass(frozen=True)
class GenerationConfig(GenerationOptions, TextConfig):
    """Continuations of held-out prompts, dense and sparse, side by side."""


@dataclasses.dataclass(frozen=True)
class AskedOptions:
    """What is asked."""

    GONE = {"texts": "its name is --text, as on every command"}

    tasks: tuple[str, ...] = tuple(TASKS)
    """Accuracies, at every number of shots: the paper's by their short names, or any of lm-eval's."""
    text: tuple[str, ...] = ("wikitext",)
    """Perplexities: wikitext, c4, prose."""
    folder: str | None = None
    """Of local files (configs/tasks names them). null: the hub."""
    include_path: str = "configs/tasks"
    """Folder of task YAMLs."""
    shots: tuple[int, ...] = (0, 5)
    """Numbers of examples before the question."""
    limit: int | None = None
    """Examples of each task, the first ones. null: all."""
    batch_size: int | str = "auto"
    """Rows, or auto."""
    seed: int = 1234
    """Of the few-shot examples."""

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
    """What is asked of a dense and a sparse model. Densities are means over the layers."""

    backend: str = "mask"
    """Of the sparse model: mask, gather, triton or auto."""
    mlp_density: float | None = None
    """Of the neurons. null: as the bundle was calibrated."""
    head_density: float | None = None
    """Of the heads. null: as the bundle was calibrated."""
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
    """What is asked of which model."""

    RESULTS = "tasks"
