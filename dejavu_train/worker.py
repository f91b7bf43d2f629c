"""A process that crew.py starts: ``python -m dejavu_train.worker PART CONFIG.yaml OUTPUT LAYERS TARGETS``."""

import sys
from collections.abc import Sequence

from dejavu_train.children import end_with_parent, forget_launcher
from dejavu_train.cli import parse_config, set_up_logging
from dejavu_train.errors import GOES_ON, exit_on_user_error
from dejavu_train.pipeline import work


def main(argv: Sequence[str] | None = None) -> None:
    """Do a part of the run in a folder.

    Args:
        argv: the part, path of the run's configuration, its folder, layers ("" for all) and targets. None: of the
            process.

    Raises:
        UserError: as :func:`dejavu_train.pipeline.work`.
    """
    end_with_parent()
    forget_launcher()
    part, path, output, layers, targets = sys.argv[1:] if argv is None else argv
    set_up_logging()
    own = ["--layers", layers] if layers else []
    work(parse_config(["--config", path, "--output", output, "--targets", targets, *own]), part)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main, after_signal=GOES_ON))
