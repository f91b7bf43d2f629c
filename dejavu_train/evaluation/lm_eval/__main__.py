"""python -m dejavu_train.evaluation.lm_eval --config configs/eval/opt-mini.yaml [--key value ...]"""

import sys

from dejavu_train.commands import run

if __name__ == "__main__":
    sys.exit(run("tasks"))
