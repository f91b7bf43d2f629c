"""python -m dejavu_train.extras.tasks --config configs/eval/opt-mini.yaml [--key value ...]"""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("tasks"))
