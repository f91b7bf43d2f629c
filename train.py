"""Text to bundle: ``python train.py --config configs/opt-mini.yaml``. See ``--help`` and dejavu_train/pipeline.py."""

import os
import sys

if __name__ == "__main__":
    # Before torch is loaded: waiting threads sleep. Where cores are shared, spinning ones cost a factor of twenty.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from dejavu_train.cli import main
    from dejavu_train.errors import exit_on_user_error

    sys.exit(exit_on_user_error(main))
