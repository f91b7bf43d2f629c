"""``python -m tests.asked --seeds 0-499``: ask, and print each finding with its request."""

import argparse
import collections
import contextlib
import io
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

import torch
from conftest import save_tiny_opt
from programs.program import seeds_of

from .bodies import draw
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.asked", description=__doc__)
    parser.add_argument("--seeds", default="0-499", help="first-last, or one")
    kinds, findings, said = collections.Counter(), 0, io.StringIO()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        world = World(save_tiny_opt(Path(folder) / "model"))
        for seed in seeds_of(parser.parse_args().seeds):
            outcome = world.ask(seed)
            kinds[outcome.kind] += 1
            if outcome.finding is not None:
                findings += 1
                print(f"seed {seed}: {outcome.finding}\n  {draw(seed, 'tiny')}"[:2000], flush=True)
        alive = world.alive
    tracebacks = said.getvalue().count("Traceback")
    print(f"{dict(kinds)}, {findings} findings, {tracebacks} tracebacks, the server {'goes on' * alive or 'is lost'}")
    return 1 if findings or tracebacks or not alive else 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
