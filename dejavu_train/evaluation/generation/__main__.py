"""python -m dejavu_train.evaluation.generation --config configs/generation/opt-mini.yaml [--option value ...]"""

import sys

from dejavu_train.commands import run

if __name__ == "__main__":
    sys.exit(run("generation"))
