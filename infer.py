"""Reads a bundle, writes results: python infer.py --config configs/infer/opt-mini.yaml [--option value ...]."""

import sys

from dejavu_train.errors import exit_on_user_error
from dejavu_train.inference import main

if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
