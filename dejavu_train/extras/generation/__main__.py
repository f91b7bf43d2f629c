"""python -m dejavu_train.extras.generation --config configs/generation/opt-mini.yaml [--option value ...]"""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("generation"))
