"""``python -m tests.programs --seeds 0-499``: run programs, print each finding's shrunk program."""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

from .judge import COMPARED, SEEN
from .program import describe, draw, quiet, run, seeds_of, shrink, without
from .world import Base


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seeds", default="0-49", help="first-last, or one")
    parser.add_argument("--leave_out", nargs="+", default=[], help="calls or kinds that are known to fail")
    asked = parser.parse_args()
    calls, refused, reasons, findings = 0, 0, collections.Counter(), 0
    with quiet(), tempfile.TemporaryDirectory() as folder:
        base = Base(Path(folder))
        for seed in seeds_of(asked.seeds):
            program = without(draw(seed), set(asked.leave_out))
            outcome = run(program, base)
            calls, refused = calls + outcome.calls, refused + len(outcome.refusals)
            reasons.update(f"{name}: {message}" for name, message in outcome.refusals)
            if outcome.finding is not None:
                findings += 1
                shown = shrink(program, base)
                if shown[1].finding is None:
                    shown = (program, outcome)  # a race that did not show again
                print(f"seed {seed}: {shown[1].kind}: {shown[1].finding}\n{describe(shown[0])}", flush=True)
    print(f"positions compared: {COMPARED[0]} of {COMPARED[1]}, the others padding or near a threshold")
    print(f"{calls} calls, {refused} refused, {findings} findings")
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    for (dtype, sparse), errors in sorted(SEEN.items(), key=str):
        mean, largest = (sorted(values) for values in zip(*errors, strict=True))
        print(
            f"  {dtype} sparse {sparse}: {len(mean)} logits, mean error median {mean[len(mean) // 2]:.2g} largest"
            f" {mean[-1]:.2g}, largest error {largest[-1]:.2g}"
        )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
