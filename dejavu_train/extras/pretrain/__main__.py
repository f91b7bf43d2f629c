"""python -m dejavu_train.extras.pretrain --output FOLDER --text FILE [--option value ...]"""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("pretrain"))
