"""Rows of downstream tasks: python -m benchmarks.tasks --config configs/eval/opt-mini.yaml --folder FOLDER

Takes the options of `python -m dejavu_train.evaluation.lm_eval`, or after the word `paper` those of its module `paper`,
and appends the rows with their conditions to benchmarks/results/tasks.csv (or paper.csv).
"""

import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.errors import exit_on_user_error
from dejavu_train.evaluation.lm_eval.paper import PaperConfig, PaperRow, Variant, paper
from dejavu_train.evaluation.lm_eval.run import TasksConfig, parse, tasks, versions
from dejavu_train.evaluation.lm_eval.tasks import TaskRow, quiet

RESULTS = Path("benchmarks/results")


def conditions(config: Any) -> dict[str, Any]:
    """What every row of a run shares."""
    cuda = torch.cuda.is_available() and config.device != "cpu"
    shared = {"model": Path(config.model).name, "limit": config.limit, "dtype": config.dtype}
    shared |= {"device": torch.cuda.get_device_name() if cuda else "CPU", **versions()}
    return shared | {"commit": commit(), "date": datetime.date.today().isoformat()}


def main(argv: Sequence[str] | None = None) -> None:
    flags = list(sys.argv[1:] if argv is None else argv)
    quiet()
    if flags[:1] == ["paper"]:
        config = parse(PaperConfig, flags[1:], __doc__ or "")
        rows = [row.flat() for row in paper(config)]
        empty = PaperRow(Variant("", ""), 1.0, 1.0, 0.0, TaskRow("", 0, "", 0, 0.0, 0.0, 0.0, None, None, 0.0, 0.0))
        path, columns = RESULTS / "paper.csv", list(empty.flat())
    else:
        config = parse(TasksConfig, flags, __doc__ or "")
        used = Bundle.from_pretrained(config.bundle).at(config.mlp_density, config.head_density)
        asked = {"backend": config.backend, "sparse_from": config.sparse_from}
        asked |= {"mlp_density": used.mean_density("mlp"), "head_density": used.mean_density("heads")}
        rows = [asked | dataclasses.asdict(row) for row in tasks(config)]
        path, columns = RESULTS / "tasks.csv", [*asked, *(field.name for field in dataclasses.fields(TaskRow))]
    shared = conditions(config)
    for row in rows:
        append_row(path, five_digits(row) | shared, [*columns, *shared])
    print(f"appended {len(rows)} rows to {path}")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
