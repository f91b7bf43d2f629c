"""The command line of a survey."""

import sys
from collections.abc import Sequence

from dejavu_train.cli.flags import take_check
from dejavu_train.cli.parser import parse
from dejavu_train.extras.survey.config import SurveyConfig
from dejavu_train.ground.progress import set_up_logging


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check and run. See :func:`dejavu_train.extras.survey.run.run`."""
    only_check, arguments = take_check(sys.argv[1:] if argv is None else argv)
    config = parse(
        SurveyConfig,
        arguments,
        "dejavu survey",
        "Tell what a model would gain from contextual sparsity, without training anything. --check only looks for"
        " mistakes.",
    )
    config.check()
    set_up_logging()
    from dejavu_train.extras.survey.run import check, run  # imports torch and transformers, which takes seconds

    if only_check:
        print(check(config))
    else:
        run(config)
