"""``python -m tests.files --seeds 0-499``: make files, print each that is read wrong."""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

from programs.program import quiet, seeds_of

from .kinds import Base
from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.files", description=__doc__)
    parser.add_argument("--seeds", default="0-49", help="first-last, or one")
    counts, findings = collections.Counter(), 0
    with quiet(), tempfile.TemporaryDirectory() as folder:
        base = Base(Path(folder))
        for seed in seeds_of(parser.parse_args().seeds):
            outcome = run(seed, base)
            counts[f"{outcome.kind} {'read' if outcome.refusal is None else 'refused'}"] += 1
            if outcome.finding is not None:
                findings += 1
                print(f"seed {seed}: {outcome.kind}, {outcome.about}: {outcome.finding}", flush=True)
    print(f"{sum(counts.values())} files, {findings} findings")
    for name, count in sorted(counts.items()):
        print(f"  {count} x {name}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
