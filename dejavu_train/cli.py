"""The command line of train.py."""

import importlib.util
import logging
import sys
from collections.abc import Sequence

from dejavu_train.config import RunConfig
from dejavu_train.errors import UserError
from dejavu_train.models.shape import read_shape
from dejavu_train.parser import parse

TRAINING_PACKAGES = ("lightning", "torchmetrics", "h5py")


def parse_config(argv: Sequence[str] | None) -> RunConfig:
    """Flags (None: those of the process) and YAML files as a config; raises as :func:`parse`."""
    return parse(
        RunConfig,
        argv,
        "train.py",
        "Train the predictors of an OPT: collect, train every (layer, target), calibrate, write the bundle. Does"
        " whatever is missing; the same command goes on after an interruption.",
    )


def check_packages() -> None:
    """Raise :class:`UserError` where only what inference needs is installed; nothing is imported."""
    missing = [name for name in TRAINING_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}: pip install 'dejavu-train[train]'")


def set_up_logging() -> None:
    """Our lines on stderr, without those of the libraries below."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dejavu_train").setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check what needs no model, and run; see :func:`dejavu_train.pipeline.run`."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--trainer.help" in arguments:
        check_packages()
        from dejavu_train.training.trainer import print_help

        print_help()
        return
    config = parse_config(arguments)
    config.check(read_shape(config.model, config.revision))
    check_packages()
    set_up_logging()
    from dejavu_train.pipeline import run  # imports torch and lightning, which takes seconds

    run(config)
