"""python -m dejavu_train.evaluation.survey --model X [--option value ...]"""

import sys

from dejavu_train.commands import run

if __name__ == "__main__":
    sys.exit(run("survey"))
