"""Text to bundle: ``python train.py --config configs/opt-mini.yaml``. See ``--help`` and dejavu_train.run.pipeline."""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("train"))
