"""The command: what it is told is read and checked before torch, which takes seconds, is loaded."""

import sys
from collections.abc import Sequence

from dejavu_train.cli.flags import take_check
from dejavu_train.cli.parser import parse
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.quantize.check import check, check_device, plan
from dejavu_train.quantize.config import QuantizeConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Everything the command does. Raises :class:`UserError` for what the user can mend."""
    only_check, arguments = take_check(sys.argv[1:] if argv is None else argv)
    config = parse(
        QuantizeConfig,
        arguments,
        "dejavu quantize",
        "Write a model's matrices in 4 bits, as a model folder that every command takes as --model. --check only looks"
        " for mistakes and prints what would be done.",
    )
    shape = check(config)
    check_device(config)
    set_up_logging()
    print(plan(config, shape))
    if not only_check:
        from dejavu_train.quantize.run import quantise

        quantise(config)
