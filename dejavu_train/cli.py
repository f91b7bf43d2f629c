"""The command line of train.py."""

import logging
import sys
from collections.abc import Sequence

from dejavu_train.config import RunConfig
from dejavu_train.models.shape import read_shape
from dejavu_train.parser import parse


def parse_config(argv: Sequence[str] | None) -> RunConfig:
    """Flags (None: those of the process) and YAML files as a config; raises as :func:`parse`."""
    return parse(
        RunConfig,
        argv,
        "train.py",
        "Train the predictors of an OPT: collect, train every (layer, target), calibrate, write the bundle. Does"
        " whatever is missing; the same command goes on after an interruption.",
    )


def set_up_logging() -> None:
    """Our lines on stderr, without those of the libraries below."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check what needs no model, and run; see :func:`dejavu_train.pipeline.run`."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--trainer.help" in arguments:
        from dejavu_train.training.trainer import print_help

        print_help()
        return
    config = parse_config(arguments)
    config.check(read_shape(config.model, config.revision))
    set_up_logging()
    from dejavu_train.pipeline import run  # imports torch and lightning, which takes seconds

    run(config)
