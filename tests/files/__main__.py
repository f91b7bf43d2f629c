"""``python -m tests.files --seeds 0-499 --out FILE``: make files, print each that is read wrong."""

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

from programs.program import quiet

from benchmarks.rows import made_now

from .kinds import Base
from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.files", description=__doc__)
    parser.add_argument("--seeds", default="0-49", help="first-last, or one")
    parser.add_argument("--out", help="a JSON file for counts and findings")
    parser.add_argument("--show", action="store_true", help="print each file and what became of it")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    counts, findings, began = collections.Counter(), [], time.perf_counter()
    with quiet(), tempfile.TemporaryDirectory() as folder:
        base = Base(Path(folder))
        for seed in range(int(first), int(last or first) + 1):
            outcome = run(seed, base)
            counts[f"{outcome.kind} {'read' if outcome.refusal is None else 'refused'}"] += 1
            if asked.show or outcome.finding is not None:
                said = outcome.finding or outcome.refusal or "read"
                print(f"seed {seed}: {outcome.kind}, {outcome.about}: {said}", flush=True)
            if outcome.finding is not None:
                findings.append(
                    {"seed": seed, "kind": outcome.kind, "about": outcome.about, "finding": outcome.finding}
                )
    seconds = time.perf_counter() - began
    print(f"{sum(counts.values())} files in {seconds:.0f} s, {len(findings)} findings")
    for name, count in sorted(counts.items()):
        print(f"  {count} x {name}")
    if asked.out:
        rows = {
            "seeds": asked.seeds,
            **made_now("dejavu_train.bundle.artifact", "dejavu_train.data.text", "dejavu_train.quantize.source"),
            "seconds": round(seconds),
            "files": dict(counts),
        }
        Path(asked.out).write_text(json.dumps(rows | {"findings": findings}, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
