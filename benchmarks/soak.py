"""Interrupts training at random moments and compares the bundle with that of an undisturbed run, bit for bit.

    python -m benchmarks.soak --interruptions 100 --seed 0 --out benchmarks/results/soak.jsonl

A run is interrupted by SIGKILL, SIGTERM or SIGINT, one of them drawn, after a time drawn up to 40 % of an undisturbed
run's, and started again with the same command, until it ends; then the next run begins.
"""

import argparse
import collections
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_run import bundle_bytes, flags, make_inputs, start

SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
STARTED = ("collecting", "layer 0 mlp", "layer 1 mlp", "layer 0 heads", "layer 1 heads", "thresholds", "sensitivity")


def phase(text: str) -> str:
    """The phase that the log of an attempt reached last."""
    reached = [(text.rfind(name), name) for name in STARTED if name in text]
    return max(reached)[1].split(" of ")[0] if reached else "start"


def soak(interruptions: int, seed: int, folder: Path) -> dict[str, Any]:
    """Interrupt so many times; returns counts by signal, phase and outcome."""
    draw = random.Random(seed)
    model, text = make_inputs(folder)
    start(["--print_config"], folder / "log").join()  # the server has imported everything now
    began = time.monotonic()
    first = start(flags(model, text, folder / "undisturbed"), folder / "log")
    first.join()
    assert first.exitcode == 0, (folder / "log").read_text()
    seconds, reference = time.monotonic() - began, bundle_bytes(folder / "undisturbed")
    by_signal: collections.Counter[str] = collections.Counter()
    phases: collections.Counter[str] = collections.Counter()
    runs = different = wrong_code = 0
    while sum(by_signal.values()) < interruptions:
        output = folder / f"run-{runs}"
        for attempt in range(1000):
            log = folder / f"log-{runs}-{attempt}"
            process = start(flags(model, text, output), log)
            process.join(draw.uniform(0, 0.4 * seconds) if sum(by_signal.values()) < interruptions else None)
            if process.exitcode is not None:
                break
            number = draw.choice(list(SIGNALS))
            os.kill(process.pid, number)
            process.join()
            if process.exitcode == 0:  # it was done before the signal came
                break
            by_signal[number.name] += 1
            phases[phase(log.read_text())] += 1
            wrong_code += process.exitcode != SIGNALS[number]
        assert process.exitcode == 0, log.read_text()
        different += bundle_bytes(output) != reference
        runs += 1
    return {
        "interruptions": sum(by_signal.values()), "seed": seed, "runs": runs, "bundles_that_differ": different,
        "wrong_exit_codes": wrong_code, "signals": dict(sorted(by_signal.items())),
        "phases": dict(sorted(phases.items())), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interruptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        row = json.dumps(soak(options.interruptions, options.seed, Path(folder)))
    print(row)
    if options.out:
        with open(options.out, "a") as file:
            file.write(row + "\n")


if __name__ == "__main__":
    main()
