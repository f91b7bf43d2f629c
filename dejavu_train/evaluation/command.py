"""The command line of infer.py."""

import sys
from collections.abc import Sequence

from dejavu_train.cli.flags import take_check
from dejavu_train.cli.parser import parse
from dejavu_train.evaluation.check import check
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.ground.progress import set_up_logging


def read_config(argv: Sequence[str] | None) -> InferConfig:
    """Flags (None: those of the process) and YAML files as a checked config. Raises as :func:`parse`."""
    config = parse(
        InferConfig, argv, "infer.py", "Score, time and run a sparse model. --check only looks for mistakes."
    )
    config.check()
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check what needs no model, and run. See :func:`dejavu_train.evaluation.run.run`."""
    only_check, arguments = take_check(sys.argv[1:] if argv is None else argv)
    config = read_config(arguments)
    check(config)
    set_up_logging()
    from dejavu_train.evaluation.run import print_plan, run  # imports torch and transformers, which takes seconds

    if only_check:
        print_plan(config)
    else:
        run(config)
