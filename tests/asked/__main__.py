"""``python -m tests.asked --seeds 0-499 --out FILE``: ask, and print each finding with its request."""

import argparse
import collections
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

import torch
import transformers
from conftest import save_tiny_opt

from benchmarks.rows import SERVER, made_now

from .bodies import draw
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.asked", description=__doc__)
    parser.add_argument("--seeds", default="0-499", help="first-last, or one")
    parser.add_argument("--out", help="a JSON file for counts and findings")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    kinds, findings, said = collections.Counter(), [], io.StringIO()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        world = World(save_tiny_opt(Path(folder) / "model"))
        for seed in range(int(first), int(last or first) + 1):
            outcome = world.ask(seed)
            kinds[outcome.kind] += 1
            if outcome.finding is not None:
                findings.append({"seed": seed, "finding": outcome.finding})
                print(f"seed {seed}: {outcome.finding}\n  {draw(seed, 'tiny')}"[:2000], flush=True)
        alive = world.alive
    tracebacks = said.getvalue().count("Traceback")
    print(
        f"{dict(kinds)}, {len(findings)} findings, {tracebacks} tracebacks, the server {'goes on' * alive or 'is lost'}"
    )
    if options.out:
        rows = {"seeds": options.seeds, **made_now(*SERVER)}
        rows |= {"torch": torch.__version__, "transformers": transformers.__version__, **kinds}
        rows |= {"tracebacks": tracebacks, "alive": alive, "findings": findings}
        Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if findings or tracebacks or not alive else 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
