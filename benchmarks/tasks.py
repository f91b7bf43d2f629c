"""Rows of downstream tasks: python -m benchmarks.tasks --config configs/eval/opt-mini.yaml

Takes the options of `dejavu tasks`. Appends the rows with their conditions, as they come,
to tasks.csv in benchmarks/results, or in the folder that DEJAVU_RESULTS names.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import SCORE, append_row, device_name, five_digits, made_now
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.extras.tasks.config import TasksConfig
from dejavu_train.extras.tasks.run import read_config, tasks, versions
from dejavu_train.extras.tasks.tasks import quiet
from dejavu_train.families import Target
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.load import resolve_device

RESULTS = Path(os.environ.get("DEJAVU_RESULTS", "benchmarks/results"))


def conditions(config: Any) -> dict[str, Any]:
    """What every row of a run shares."""
    shared = {"model": Path(config.model).name, "limit": config.limit, "dtype": config.dtype}
    shared |= {"device": device_name(resolve_device(config.device)), **versions()}
    return shared | made_now("dejavu_train.extras.tasks.model", *SCORE)


def selection(config: TasksConfig) -> dict[str, Any]:
    """How the sparse model of a run selects."""
    used = Bundle.from_pretrained(config.bundle).at(config.mlp_density, config.head_density)
    about = {"backend": config.backend, "sparse_from": config.sparse_from}
    mlp, heads = used.mean_density(Target.MLP), used.mean_density(Target.HEADS)
    return about | {"asked_mlp_density": mlp, "asked_head_density": heads}


def main(argv: Sequence[str] | None = None) -> None:
    quiet()
    config: TasksConfig = read_config(TasksConfig, list(sys.argv[1:] if argv is None else argv), __doc__ or "")
    shared = conditions(config) | selection(config)  # the commit at the start: a run may outlast it
    for rows in tasks(config):
        for row in rows:
            append_row(RESULTS / "tasks.csv", five_digits(shared | dataclasses.asdict(row)))
        print(f"appended {len(rows)} rows to {RESULTS / 'tasks.csv'}", flush=True)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
