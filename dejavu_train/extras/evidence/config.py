"""The keys of ``dejavu evidence``, with their defaults. Readable without torch."""

import dataclasses
from pathlib import Path
from typing import Literal

from dejavu_train.data.text import INSTALLED
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.shared_config import TextConfig
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, SEED, Range, check_ranges

PARTS = ("active", "speed", "quality", "tasks", "generation")
TASKS = ("cb", "copa", "lambada", "openbookqa", "piqa", "rte", "winogrande", "hellaswag", "arc_challenge", "mmlu")
SETS = ("gsm8k", "math500", "ifeval", "humaneval", "retrieval")


@dataclasses.dataclass(frozen=True)
class EvidenceConfig(TextConfig):
    """Evidence on one model: a page, results.json and CSV rows. The same command goes on where it stopped.

    Without a bundle everything is measured but what needs predictors.
    """

    EXACT = True
    EXAMPLES = (
        "dejavu evidence --model checkpoints/opt-mini --bundle checkpoints/opt-mini/bundle --local DATA",
        "dejavu evidence --model facebook/opt-1.3b --bundle checkpoints/opt-1.3b/bundle --plan",
    )
    COMMON = ("model", "bundle", "output", "smaller", "parts", "plan", "budget", "local", "limit")

    output: str = ""
    """Folder of results. Empty: checkpoints/evidence/NAME."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # type: ignore[assignment]
    """Type of the weights. auto: float32 on a CPU, the model's type of 16 bits on a GPU."""
    text: tuple[str, ...] = INSTALLED
    """SOURCE or NAME=SOURCE, one or several: installed-..., a .txt or .jsonl file, a hub dataset. The questions of
    the sets are one more text where they fill a window."""
    tokens: int = 4096
    """How many are scored of each text."""
    window: int = 512
    """Tokens of a sequence, the leading start token included."""
    batch_tokens: int = 4096
    """Positions in one forward pass."""
    parts: tuple[str, ...] = PARTS
    """Which parts are measured: active, speed, quality, tasks, generation."""
    plan: bool = False
    """Only say hours and bytes by part, from a rate that is measured in seconds."""
    budget: float | None = None
    """Hours at most. What does not fit is left out, and the page names it. null: no limit."""
    local: str | None = None
    """Folder of local data: files of configs/tasks, and SET.jsonl of the sets as published. What it lacks comes from
    the hub."""
    four_bits: str = ""
    """Folder of the model in 4 bits. Empty: made by gptq in the folder of results."""
    smaller: str = ""
    """Folder or hub id of a smaller model of the family, whose quality and bytes a step stand beside."""
    rows: tuple[int, ...] = (1, 2, 4, 8)
    """Rows that are timed, behind the first prompt."""
    prompts: tuple[int, ...] = (128, 512, 2048, 8192, 16384)
    """Prompts that are timed with one row, in tokens. Those beyond the model's positions are left out."""
    new_tokens: int = 64
    """Tokens that are timed."""
    tasks: tuple[str, ...] = TASKS
    """Tasks of lm-eval."""
    shots: int = 0
    """Examples before the question of a task."""
    sets: tuple[str, ...] = SETS
    """Sets to generate long answers for: gsm8k, math500, ifeval, humaneval, retrieval."""
    set_shots: int = 5
    """Worked examples before a question of gsm8k (5 at most) and math500 (4), as many as fit."""
    contexts: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Tokens of a text that hides a number, for retrieval. Those beyond the model's positions are left out."""
    run_code: bool = False
    """Let humaneval run the programs that the model writes, in a process with limits."""
    limit: int | None = 100
    """Examples of each task and set, the first ones. null: all."""
    answer_tokens: int = 512
    """Tokens of an answer at most."""

    def __post_init__(self) -> None:
        if not self.output:
            object.__setattr__(self, "output", str(Path("checkpoints/evidence") / Path(self.model).name))
        super().__post_init__()

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        if not self.model:
            raise UserError("evidence needs a model; give --model FOLDER or a hub id")
        for name, known in (("parts", PARTS), ("sets", SETS)):
            given = getattr(self, name)
            if unknown := [each for each in given if each not in known]:
                raise UserError(f"--{name} must be some of {', '.join(known)}, got {unknown[0]}")
        if not self.parts:
            raise UserError(f"--parts is empty; name some of {', '.join(PARTS)}")
        counts = ("tokens", "batch_tokens", "rows", "prompts", "new_tokens", "limit", "answer_tokens")
        others = {
            "contexts": Range(128, COUNT.most),
            "window": Range(2, COUNT.most),
            "shots": NUMBER,
            "set_shots": NUMBER,
            "seed": SEED,
        }
        others |= {"budget": Range(0, 10**6, above=True)}
        check_ranges(self, "--", dict.fromkeys(counts, COUNT) | others)
        if self.local is not None and not Path(self.local).is_dir():
            raise UserError(f"there is no folder {self.local}; give --local the folder of the data, or leave it out")
        if self.four_bits and not Path(self.four_bits).is_dir():
            raise UserError(f"there is no folder {self.four_bits}; give --four_bits what dejavu quantize has written")
        name_texts(self.text)
