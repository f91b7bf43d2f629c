"""A process that crew.py starts.

It is called as ``python -m dejavu_train.run.worker PART CONFIG.yaml OUTPUT LAYERS TARGETS``, and does a part of a run.
With ``ACTIVATIONS NUMBER COUNT`` it collects a range of the shards by layers. With ``STATES WHAT NUMBER COUNT`` it
calibrates a range of the windows.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dejavu_train.calibration.by_layers import calibrate_part
from dejavu_train.data.parts import record_part
from dejavu_train.ground.children import end_with_parent, forget_launcher
from dejavu_train.ground.errors import GOES_ON, exit_on_user_error
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.run.command import parse_config
from dejavu_train.run.pipeline import work


def main(argv: Sequence[str] | None = None) -> None:
    """Do a part of the run in a folder.

    Args:
        argv: the part, path of the run's configuration, its folder, layers ("" for all) and targets. Or the folder of
            activations, which range of the shards it is, and how many there are. Or the folder of states, what of their
            stage is shared, which range of the windows it is, and how many there are. None: of the process.

    Raises:
        UserError: as :func:`dejavu_train.run.pipeline.work`.
    """
    end_with_parent()
    forget_launcher()
    given = sys.argv[1:] if argv is None else argv
    set_up_logging()
    if len(given) == 3:
        return record_part(Path(given[0]), int(given[1]), int(given[2]))
    if len(given) == 4:
        return calibrate_part(Path(given[0]), given[1], int(given[2]), int(given[3]))
    part, path, output, layers, targets = given
    own = ["--layers", layers] if layers else []
    work(parse_config(["--config", path, "--output", output, "--targets", targets, *own]), part)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main, after_signal=GOES_ON))
