"""python -m dejavu_train.quantize --model MODEL --output FOLDER [--option value ...]"""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("quantize"))
