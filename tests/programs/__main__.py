"""``python -m tests.programs --seeds 0-499 --out FILE``: run programs, print each finding's shrunk program."""

import argparse
import collections
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers that tests share

from benchmarks.rows import CPU_STEP, STEP, made_now

from .judge import COMPARED, SEEN
from .program import describe, draw, quiet, run, shrink, without
from .world import Base


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seeds", default="0-49", help="first-last, or one")
    parser.add_argument("--out", help="a JSON file for counts and findings")
    parser.add_argument("--keep", action="store_true", help="print findings as they were drawn, not shrunk")
    parser.add_argument("--show", action="store_true", help="print each program before it runs")
    parser.add_argument("--leave_out", nargs="+", default=[], help="calls or kinds that are known to fail")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    calls, refused, reasons, findings, seconds = 0, 0, collections.Counter(), [], 0.0
    with quiet(), tempfile.TemporaryDirectory() as folder:
        base = Base(Path(folder))
        for seed in range(int(first), int(last or first) + 1):
            program = without(draw(seed), set(asked.leave_out))
            if asked.show:
                print(describe(program), flush=True)
            outcome = run(program, base)
            calls, refused, seconds = calls + outcome.calls, refused + len(outcome.refusals), seconds + outcome.seconds
            reasons.update(f"{name}: {message}" for name, message in outcome.refusals)
            if outcome.finding is not None:
                shown = (program, outcome) if asked.keep else shrink(program, base)
                if shown[1].finding is None:
                    shown = (program, outcome)  # a race that did not show again
                findings.append({"seed": seed, "kind": shown[1].kind, "finding": shown[1].finding, "program": shown[0]})
                print(f"seed {seed}: {shown[1].kind}: {shown[1].finding}\n{describe(shown[0])}", flush=True)
    print(f"positions compared: {COMPARED[0]} of {COMPARED[1]}, the others padding or near a threshold")
    print(f"{calls} calls, {refused} refused, {len(findings)} findings, {seconds:.0f} s")
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    for (dtype, sparse), errors in sorted(SEEN.items(), key=str):
        mean, largest = (sorted(values) for values in zip(*errors, strict=True))
        print(
            f"  {dtype} sparse {sparse}: {len(mean)} logits, mean error median {mean[len(mean) // 2]:.2g} largest"
            f" {mean[-1]:.2g}, largest error {largest[-1]:.2g}"
        )
    if asked.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        rows = {
            "seeds": asked.seeds,
            "left_out": asked.leave_out,
            **made_now("dejavu_train.sparse.model", *STEP, *CPU_STEP),
            **versions,
        }
        rows |= {"positions_compared": COMPARED, "seconds": round(seconds)}
        rows |= {"calls": calls, "refused": refused, "refusals": dict(reasons), "findings": findings}
        Path(asked.out).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
