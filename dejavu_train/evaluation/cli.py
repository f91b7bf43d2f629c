"""The command line of infer.py."""

import logging
import sys
from collections.abc import Sequence

from dejavu_train.evaluation.config import InferConfig
from dejavu_train.models.shape import read_shape
from dejavu_train.parser import parse


def read_config(argv: Sequence[str] | None) -> InferConfig:
    """Flags (None: those of the process) and YAML files as a checked config; raises as :func:`parse`."""
    config = parse(InferConfig, argv, "infer.py", "Score, time and run a sparse OPT.")
    config.check()
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check what needs no model, and run; see :func:`dejavu_train.evaluation.run.run`."""
    config = read_config(argv)
    read_shape(config.model, config.revision)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from dejavu_train.evaluation.run import run  # imports torch and transformers, which takes seconds

    run(config)
