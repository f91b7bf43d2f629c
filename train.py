"""Text to bundle: ``python train.py --config configs/opt-mini.yaml``. See ``--help`` and dejavu_train/pipeline.py."""

import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # Before torch is loaded: waiting threads sleep. Where cores are shared, spinning ones cost a factor of twenty.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from dejavu_train.errors import GOES_ON, exit_on_user_error

    def main(argv: Sequence[str] | None) -> None:
        from dejavu_train.cli import main  # takes seconds, in which a signal is heard already

        main(argv)

    sys.exit(exit_on_user_error(main, after_signal=GOES_ON))
