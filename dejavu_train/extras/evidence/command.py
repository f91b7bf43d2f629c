"""The command line of evidence."""

from collections.abc import Sequence

from dejavu_train.cli.parser import parse
from dejavu_train.extras.evidence.config import EvidenceConfig
from dejavu_train.ground.progress import set_up_logging


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check and run. See :func:`dejavu_train.extras.evidence.run.run`."""
    config = parse(
        EvidenceConfig,
        argv,
        "dejavu evidence",
        "Measure what a model gains and loses, and write a page. --plan only says hours, bytes and lacking data.",
    )
    config.check()
    set_up_logging()
    from dejavu_train.extras.evidence.run import run  # imports torch and transformers, which takes seconds

    run(config)
