"""Text to bundle: ``python train.py --config configs/opt-mini.yaml``. See ``--help`` and dejavu_train/pipeline.py."""

import sys

from dejavu_train.cli import main
from dejavu_train.errors import exit_on_user_error

if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
