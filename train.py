"""Text to bundle: ``python train.py --config configs/opt-mini.yaml``. See ``--help`` and dejavu_train/pipeline.py."""

import sys

from dejavu_train.commands import run

if __name__ == "__main__":
    sys.exit(run("train"))
