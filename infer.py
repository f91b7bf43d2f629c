"""Reads a bundle, writes results: python infer.py --config configs/infer/opt-mini.yaml [--option value ...]."""

import sys

from dejavu_train.cli.commands import run

if __name__ == "__main__":
    sys.exit(run("infer"))
