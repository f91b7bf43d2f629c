"""One fit in a process of its own: ``python -m dejavu_train.run.job_process CONFIG.yaml LAYER TARGET TITLE HOLDS``.

:func:`dejavu_train.training.job.run_job` starts it where a fit takes several devices. Under DDP every rank runs it.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

from dejavu_train.families import Target, UnitKey
from dejavu_train.ground.children import end_with_parent
from dejavu_train.ground.errors import GOES_ON, exit_on_user_error
from dejavu_train.ground.locks import claim
from dejavu_train.ground.progress import set_up_logging
from dejavu_train.run.command import parse_config
from dejavu_train.training.job import fit


def main(argv: Sequence[str] | None = None) -> None:
    """Read the job's resolved configuration and fit its predictor.

    Args:
        argv: path of the configuration, layer, target, title, and as JSON the folders that are held for this job with
        their identities. Should the caller be killed, this process still holds them. None takes the arguments of the
        process.

    Raises:
        UserError: a configuration that cannot be read, shards or trainer arguments that are wrong.
    """
    end_with_parent()
    path, layer, target, title, holds = sys.argv[1:] if argv is None else argv
    set_up_logging()
    config = parse_config(["--config", path])
    with contextlib.ExitStack() as stack:
        for folder, identity in json.loads(holds).items():
            stack.enter_context(claim(folder, identity))
        fit(dataclasses.replace(config, layers=None), UnitKey(int(layer), Target(target)), title)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main, after_signal=GOES_ON))
