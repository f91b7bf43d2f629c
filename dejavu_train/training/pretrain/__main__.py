"""python -m dejavu_train.training.pretrain --output FOLDER --text FILE [--option value ...]"""

import sys

from dejavu_train.commands import run

if __name__ == "__main__":
    sys.exit(run("pretrain"))
