"""python -m dejavu_train COMMAND [--option value ...]. See dejavu_train/cli/commands.py"""

import sys

from dejavu_train.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
