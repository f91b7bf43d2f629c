"""python -m dejavu_train COMMAND [--option value ...]. See dejavu_train/commands.py"""

import sys

from dejavu_train.commands import main

if __name__ == "__main__":
    sys.exit(main())
